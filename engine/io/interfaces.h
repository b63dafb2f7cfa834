// interfaces() lists the network interfaces of this host with their addresses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::io {

struct Interface {
  std::string name;
  uint32_t mtu = 0;  // 0 when the interface has disappeared meanwhile
  bool up = false;
  bool carrier = false;  // the interface and its link are up
  bool loopback = false;
  // In the kernel's order, without ports; link-local ones of IPv6 end in "%name".
  std::vector<std::string> addresses;
};

// All interfaces in the kernel's order, with and without addresses. Throws std::system_error.
std::vector<Interface> interfaces();

}  // namespace gradwire::io
