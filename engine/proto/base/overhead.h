// kOverhead is what a datagram takes on the wire beside its payload: Ethernet, IPv4 and UDP
// headers.
#pragma once

#include <cstdint>

namespace gradwire {

inline constexpr uint32_t kOverhead = 42;  // bytes

}  // namespace gradwire
