// kOverhead is what a datagram takes on the wire beside its payload: Ethernet, IPv4 and UDP
// headers. kFullPacket is what the longest datagram of plain Ethernet takes with it.
#pragma once

#include <cstdint>

namespace gradwire {

inline constexpr uint32_t kOverhead = 42;                  // bytes
inline constexpr uint32_t kFullPacket = 1472 + kOverhead;  // bytes

}  // namespace gradwire
