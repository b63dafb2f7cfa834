// interfaces(): getifaddrs(3) has addresses and flags, an ioctl the MTU.
#include "io/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

namespace gradwire::io {
namespace {

uint32_t mtu_of(int fd, const std::string& name) {
  ifreq request{};
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  return ::ioctl(fd, SIOCGIFMTU, &request) == 0 ? static_cast<uint32_t>(request.ifr_mtu) : 0;
}

// An empty string for families other than IPv4 and IPv6.
std::string text_of(const sockaddr* address) {
  if (address == nullptr) return "";
  socklen_t size = 0;
  if (address->sa_family == AF_INET) size = sizeof(sockaddr_in);
  if (address->sa_family == AF_INET6) size = sizeof(sockaddr_in6);
  if (size == 0) return "";
  char text[NI_MAXHOST] = "";
  const int failed = ::getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return failed == 0 ? text : "";
}

}  // namespace

std::vector<Interface> interfaces() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot list the interfaces");
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(found, &::freeifaddrs);
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  std::vector<Interface> all;
  for (const ifaddrs* at = found; at != nullptr; at = at->ifa_next) {
    // An IPv4 address may carry a label such as "eth0:1" in place of its interface's name.
    const std::string label = at->ifa_name;
    const std::string name = label.substr(0, label.find(':'));
    auto known = std::find_if(all.begin(), all.end(),
                              [&](const Interface& each) { return each.name == name; });
    if (known == all.end()) {
      Interface fresh;
      fresh.name = name;
      fresh.mtu = mtu_of(fd, name);
      fresh.up = (at->ifa_flags & IFF_UP) != 0;
      fresh.carrier = fresh.up && (at->ifa_flags & IFF_RUNNING) != 0;
      fresh.loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
      known = all.insert(all.end(), std::move(fresh));
    }
    if (std::string text = text_of(at->ifa_addr); !text.empty()) {
      known->addresses.push_back(std::move(text));
    }
  }
  if (fd >= 0) ::close(fd);
  return all;
}

}  // namespace gradwire::io
