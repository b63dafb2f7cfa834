// Address: resolution, comparison and text.
#include "io/address.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <cerrno>
#include <memory>
#include <system_error>

namespace gradwire::io {

Address Address::resolve(const std::string& host, uint16_t port, int family) {
  addrinfo hints{};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (failed != 0 || found == nullptr) {
    const int code = failed == EAI_SYSTEM ? errno : EADDRNOTAVAIL;
    throw std::system_error(code, std::generic_category(),
                            "no such address: " + host + " (" + ::gai_strerror(failed) + ")");
  }
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  Address address;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (at->ai_family != AF_INET && at->ai_family != AF_INET6) continue;
    std::memcpy(&address.store_, at->ai_addr, at->ai_addrlen);
    address.set_port(port);
    return address;
  }
  throw std::system_error(EADDRNOTAVAIL, std::generic_category(),
                          "no such address: " + host + " (neither IPv4 nor IPv6)");
}

Address Address::of_socket(int fd) {
  Address address;
  socklen_t size = kCapacity;
  if (::getsockname(fd, address.get(), &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "getsockname");
  }
  return address;
}

std::string Address::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes = family() == AF_INET6 ? static_cast<const void*>(&store_.v6.sin6_addr)
                                           : static_cast<const void*>(&store_.v4.sin_addr);
  ::inet_ntop(family(), bytes, text, sizeof(text));
  return text;
}

uint16_t Address::port() const {
  return ntohs(family() == AF_INET6 ? store_.v6.sin6_port : store_.v4.sin_port);
}

void Address::set_port(uint16_t port) {
  if (family() == AF_INET6) {
    store_.v6.sin6_port = htons(port);
  } else {
    store_.v4.sin_port = htons(port);
  }
}

std::string Address::text() const {
  const std::string shown = family() == AF_INET6 ? "[" + host() + "]" : host();
  return shown + ":" + std::to_string(port());
}

bool Address::operator==(const Address& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET6) {
    return store_.v6.sin6_port == other.store_.v6.sin6_port &&
           std::memcmp(&store_.v6.sin6_addr, &other.store_.v6.sin6_addr, sizeof(in6_addr)) == 0;
  }
  return store_.v4.sin_port == other.store_.v4.sin_port &&
         store_.v4.sin_addr.s_addr == other.store_.v4.sin_addr.s_addr;
}

size_t Address::Hash::operator()(const Address& address) const {
  uint64_t key = address.port();
  if (address.family() == AF_INET6) {
    uint64_t halves[2];
    std::memcpy(halves, &address.store_.v6.sin6_addr, sizeof(halves));
    key ^= halves[0] * 0x9e3779b97f4a7c15u ^ halves[1];
  } else {
    key ^= uint64_t{address.store_.v4.sin_addr.s_addr} << 16;
  }
  key *= 0x9e3779b97f4a7c15u;
  return static_cast<size_t>(key ^ (key >> 32));
}

}  // namespace gradwire::io
