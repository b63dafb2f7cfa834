// Again is the reason why a packet is sent again.
#pragma once

#include <cstdint>

namespace gradwire {

// lost: it was declared lost. refused: the receiver had no room for it. probe: a probe time-out, or
// a path that has become too short for it. repeat: heavy loss, before an ACK could arrive.
enum class Again : uint8_t { lost, refused, probe, repeat };

}  // namespace gradwire
