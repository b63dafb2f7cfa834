// Address is a socket address of IPv4 or IPv6: comparable, hashable and printable.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace gradwire::io {

class Address {
 public:
  Address() { std::memset(&store_, 0, sizeof(store_)); }

  // Throws std::system_error with the host's name. `family` AF_UNSPEC takes the resolver's first
  // answer.
  static Address resolve(const std::string& host, uint16_t port, int family);
  // The address that a socket is bound to.
  static Address of_socket(int fd);

  int family() const { return store_.any.sa_family; }
  std::string host() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  std::string text() const;  // "10.0.0.1:4711", "[::1]:4711"

  const sockaddr* get() const { return &store_.any; }
  sockaddr* get() { return &store_.any; }
  socklen_t size() const {
    return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  }
  static constexpr socklen_t kCapacity = sizeof(sockaddr_in6);

  // Flow label and scope do not distinguish endpoints, so they are not compared.
  bool operator==(const Address& other) const;

  struct Hash {
    size_t operator()(const Address& address) const;
  };

 private:
  union Store {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  } store_;
};

}  // namespace gradwire::io
