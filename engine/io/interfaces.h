// The network interfaces of this host, with all their addresses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::io {

struct Interface {
  std::string name;
  uint32_t mtu = 0;  // 0 when the interface went away meanwhile
  bool up = false;
  bool carrier = false;  // up, and its link as well
  bool loopback = false;
  // IPv4 and IPv6, in the kernel's order and without ports; IPv6 link-local ones with "%name".
  std::vector<std::string> addresses;
};

// In the kernel's order, also those without an address. Throws std::system_error.
std::vector<Interface> interfaces();

}  // namespace gradwire::io
