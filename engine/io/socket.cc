// Socket: system calls and their fallbacks.
#include "io/socket.h"

#include <fcntl.h>
#include <linux/udp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace gradwire::io {
namespace {

constexpr int kProbe = 0x10;  // the kernel's MSG_PROBE, which glibc does not name
// The interval at which timestamps are aligned with CLOCK_MONOTONIC.
constexpr Nanos kAlignEvery = 10 * kMillisecond;

Nanos read_clock(clockid_t clock) {
  timespec at{};
  ::clock_gettime(clock, &at);
  return Nanos{at.tv_sec} * kSecond + at.tv_nsec;
}

bool set_option(int fd, int level, int name, int value) {
  return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

int get_option(int fd, int level, int name) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, level, name, &value, &size) == 0 ? value : 0;
}

// Requests a buffer: beyond the system's limit with the privilege for it, else up to the limit.
int grow_buffer(int fd, int force, int plain, int wanted) {
  if (!set_option(fd, SOL_SOCKET, force, wanted)) set_option(fd, SOL_SOCKET, plain, wanted);
  return get_option(fd, SOL_SOCKET, plain);
}

std::string bind_failure(int code, const Address& address) {
  switch (code) {
    case EADDRINUSE:
      return "address in use: " + address.text() + " (another socket holds this port)";
    case EADDRNOTAVAIL:
      return "no such address on this host: " + address.text();
    case EACCES:
      return "may not bind: " + address.text() + " (a privileged port)";
    default:
      return "cannot bind: " + address.text();
  }
}

// Fills in the non-empty spans of datagram i and returns their number.
size_t gather(const Train& train, uint32_t i, iovec* out) {
  size_t count = 0;
  for (size_t half = 0; half < 2; ++half) {
    const Train::Span& span = train.spans[2 * size_t{i} + half];
    if (span.size == 0) continue;
    out[count].iov_base = const_cast<void*>(span.data);
    out[count].iov_len = span.size;
    ++count;
  }
  if (train.tagged) {
    out[0].iov_base = static_cast<uint8_t*>(out[0].iov_base) - wire::kTagBytes;
    out[0].iov_len += wire::kTagBytes;
  }
  return count;
}

// Control holds the control messages of one sendmsg: at most the segment length and the traffic
// class.
class Control {
 public:
  void attach(msghdr& header) {
    header.msg_control = used_ != 0 ? bytes_.data() : nullptr;
    header.msg_controllen = used_;
  }
  void add_segment(uint32_t bytes) { add(IPPROTO_UDP, UDP_SEGMENT, static_cast<uint16_t>(bytes)); }
  // The two bits below the DSCP are ECN's (RFC 3168).
  void add_class(bool v6, uint8_t dscp, uint8_t ecn) {
    add(v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS, int{dscp} << 2 | ecn);
  }

 private:
  template <class T>
  void add(int level, int type, T value) {
    auto* const at = reinterpret_cast<cmsghdr*>(bytes_.data() + used_);
    at->cmsg_level = level;
    at->cmsg_type = type;
    at->cmsg_len = CMSG_LEN(sizeof(T));
    std::memcpy(CMSG_DATA(at), &value, sizeof(T));
    used_ += CMSG_SPACE(sizeof(T));
  }

  alignas(
      cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(uint16_t)) + CMSG_SPACE(sizeof(int))> bytes_{};
  size_t used_ = 0;
};

bool is_full(int code) {
  return code == EAGAIN || code == EWOULDBLOCK;
}

}  // namespace

Nanos monotonic_now() {
  return read_clock(CLOCK_MONOTONIC);
}

Socket::Socket(const std::string& host, uint16_t port, uint8_t dscp) : dscp_(dscp) {
  const Address wanted = Address::resolve(host, port, AF_UNSPEC);
  fd_ = ::socket(wanted.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make a UDP socket");

  const bool v6 = wanted.family() == AF_INET6;
  if (v6) set_option(fd_, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (::bind(fd_, wanted.get(), wanted.size()) != 0) {
    const int code = errno;
    ::close(fd_);
    throw std::system_error(code, std::generic_category(), bind_failure(code, wanted));
  }
  address_ = Address::of_socket(fd_);

  features_.receive_buffer = grow_buffer(fd_, SO_RCVBUFFORCE, SO_RCVBUF, kReceiveBuffer);
  features_.send_buffer = grow_buffer(fd_, SO_SNDBUFFORCE, SO_SNDBUF, kSendBuffer);
  features_.timestamps = set_option(fd_, SOL_SOCKET, SO_TIMESTAMPNS, 1);
  set_option(fd_, SOL_SOCKET, SO_RXQ_OVFL, 1);
  // Datagrams are never fragmented by IP, and the kernel's estimate of the path MTU blocks none.
  if (v6) {
    set_option(fd_, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE);
  } else {
    set_option(fd_, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE);
  }
  features_.gro = set_option(fd_, IPPROTO_UDP, UDP_GRO, 1);
  // The value 0 changes nothing; the call shows whether the kernel has the option.
  features_.segment = set_option(fd_, IPPROTO_UDP, UDP_SEGMENT, 0);

  const bool marked = v6 ? set_option(fd_, IPPROTO_IPV6, IPV6_TCLASS, int{dscp} << 2)
                         : set_option(fd_, IPPROTO_IP, IP_TOS, int{dscp} << 2);
  if (!marked && dscp != 0) {
    const std::string why = std::generic_category().message(errno);
    ::close(fd_);
    throw std::invalid_argument("dscp=" + std::to_string(dscp) + ": the kernel refuses " +
                                (v6 ? "IPV6_TCLASS (" : "IP_TOS (") + why + "); 0 leaves it alone");
  }
  features_.dscp = takes_dscp();
  const bool tells = v6 ? set_option(fd_, IPPROTO_IPV6, IPV6_RECVTCLASS, 1)
                        : set_option(fd_, IPPROTO_IP, IP_RECVTOS, 1);
  features_.ecn = features_.dscp && tells;

  // The kernel gives pages of a place when it is first used.
  for (size_t i = 0; i < kPlaces; ++i) {
    auto place = std::make_unique<Place>();
    place->memory = std::make_unique_for_overwrite<uint8_t[]>(kMessageBytes);
    place->buffer.bytes = {place->memory.get(), kMessageBytes};
    free_.push_back(std::move(place));
  }
  std::memset(headers_.data(), 0, sizeof(headers_));
  for (size_t i = 0; i < kBatch; ++i) {
    places_[i] = std::move(free_.back());
    free_.pop_back();
    vectors_[i] = {places_[i]->memory.get(), kMessageBytes};
    headers_[i].msg_hdr.msg_iov = &vectors_[i];
    headers_[i].msg_hdr.msg_iovlen = 1;
    headers_[i].msg_hdr.msg_name = sources_[i].get();
    headers_[i].msg_hdr.msg_control = controls_[i].data();
  }
}

// True when sendmsg takes a DSCP; MSG_PROBE checks everything and sends nothing.
bool Socket::takes_dscp() {
  uint8_t byte = 0;
  iovec vector{&byte, 1};
  Control control;
  control.add_class(address_.family() == AF_INET6, dscp_, 0);
  msghdr header{};
  header.msg_name = address_.get();
  header.msg_namelen = address_.size();
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  control.attach(header);
  return ::sendmsg(fd_, &header, kProbe | MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

Socket::~Socket() {
  close();
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

uint32_t Socket::send(const Address& to, const Train& train, uint32_t first) {
  if (features_.segment && train.count - first > 1) {
    switch (send_segmented(to, train, first)) {
      case Segmented::sent:
        return train.count;
      case Segmented::blocked:
        ++counters_.blocked;
        return first;
      case Segmented::lost:
        counters_.last_error = errno;
        counters_.send_errors += train.count - first;
        return train.count;
      case Segmented::refused: {
        // Either the device or path cannot segment, or the datagrams are too long. If they can be
        // sent one by one, segmentation is the cause and is not tried again.
        const uint64_t errors = counters_.too_long + counters_.send_errors;
        const uint32_t next = send_plain(to, train, first);
        if (next > first && counters_.too_long + counters_.send_errors == errors) {
          features_.segment = false;
        }
        return next;
      }
    }
  }
  return send_plain(to, train, first);
}

Socket::Segmented Socket::send_segmented(const Address& to, const Train& train, uint32_t first) {
  std::array<iovec, 2 * Train::kMaxSegments> vectors;
  size_t count = 0;
  for (uint32_t i = first; i < train.count; ++i) count += gather(train, i, &vectors[count]);

  Control control;
  control.add_segment(train.segment_bytes + (train.tagged ? wire::kTagBytes : 0));
  if (marks(train)) control.add_class(address_.family() == AF_INET6, train.dscp, train.ecn);
  msghdr header{};
  header.msg_name = const_cast<sockaddr*>(to.get());
  header.msg_namelen = to.size();
  header.msg_iov = vectors.data();
  header.msg_iovlen = count;
  control.attach(header);

  for (;;) {
    ++counters_.send_calls;
    if (::sendmsg(fd_, &header, MSG_NOSIGNAL) >= 0) return Segmented::sent;
    if (is_full(errno)) return Segmented::blocked;
    switch (errno) {
      case EINTR:
        continue;
      case EIO:
      case EINVAL:
      case EMSGSIZE:
      case EOPNOTSUPP:
      case ENOPROTOOPT:
        return Segmented::refused;
      default:
        return Segmented::lost;
    }
  }
}

uint32_t Socket::send_plain(const Address& to, const Train& train, uint32_t first) {
  std::array<iovec, 2 * Train::kMaxSegments> vectors;
  std::array<mmsghdr, Train::kMaxSegments> headers;
  Control control;
  if (marks(train)) control.add_class(address_.family() == AF_INET6, train.dscp, train.ecn);
  for (uint32_t i = first; i < train.count; ++i) {
    msghdr& header = headers[i].msg_hdr;
    header = {};
    header.msg_name = const_cast<sockaddr*>(to.get());
    header.msg_namelen = to.size();
    header.msg_iov = &vectors[2 * size_t{i}];
    header.msg_iovlen = gather(train, i, header.msg_iov);
    control.attach(header);
  }
  while (first < train.count) {
    ++counters_.send_calls;
    const int sent = ::sendmmsg(fd_, &headers[first], train.count - first, MSG_NOSIGNAL);
    if (sent > 0) {
      first += static_cast<uint32_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (is_full(errno)) {
      ++counters_.blocked;
      return first;
    }
    // ENOBUFS, EPERM, a late ECONNREFUSED, …: this datagram is lost, and the next is tried.
    if (errno == EMSGSIZE) {
      ++counters_.too_long;
    } else {
      counters_.last_error = errno;
      ++counters_.send_errors;
    }
    ++first;
  }
  return first;
}

uint32_t Socket::route_limit(const Address& to) const {
  const bool v6 = address_.family() == AF_INET6;
  const int fd = ::socket(address_.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return 0;
  Address from = address_;
  from.set_port(0);
  int mtu = 0;
  // Only a connected socket has a route; connecting sends nothing.
  if (::bind(fd, from.get(), from.size()) == 0 && ::connect(fd, to.get(), to.size()) == 0)
    mtu = v6 ? get_option(fd, IPPROTO_IPV6, IPV6_MTU) : get_option(fd, IPPROTO_IP, IP_MTU);
  ::close(fd);
  const int overhead = v6 ? 48 : 28;  // of IP and UDP
  return mtu > overhead ? static_cast<uint32_t>(mtu - overhead) : 0;
}

// Puts free places where held ones are. A message beyond the free ones was not to be held.
void Socket::renew_places() {
  for (size_t i = 0; i < held_.size();) {
    if (held_[i]->buffer.holders) {
      ++i;
      continue;
    }
    free_.push_back(std::exchange(held_[i], std::move(held_.back())));
    held_.pop_back();
  }
  for (size_t i = 0; i < kBatch; ++i) {
    if (places_[i]->buffer.holders == 0) continue;
    held_.push_back(std::exchange(places_[i], std::move(free_.back())));
    free_.pop_back();
    vectors_[i].iov_base = places_[i]->memory.get();
  }
}

std::span<const Socket::Message> Socket::receive(Nanos now) {
  renew_places();
  for (size_t i = 0; i < kBatch; ++i) {
    headers_[i].msg_hdr.msg_namelen = Address::kCapacity;
    headers_[i].msg_hdr.msg_controllen = kControlBytes;
  }
  ++counters_.receive_calls;
  const int received = ::recvmmsg(fd_, headers_.data(), kBatch, MSG_DONTWAIT, nullptr);
  if (received <= 0) return {};  // EAGAIN, EINTR or the error of an earlier send

  if (now - aligned_at_ > kAlignEvery) align_clocks(now);
  size_t count = 0;
  for (size_t i = 0; i < static_cast<size_t>(received); ++i) {
    msghdr& header = headers_[i].msg_hdr;
    const size_t size = headers_[i].msg_len;
    if ((header.msg_flags & MSG_TRUNC) != 0 || size == 0) {
      ++counters_.truncated;
      continue;
    }
    Message& message = messages_[count++];
    message.source = &sources_[i];
    message.bytes = {places_[i]->memory.get(), size};
    message.buffer = free_.size() > i ? &places_[i]->buffer : nullptr;
    message.segment = size;
    message.arrival = 0;
    message.ecn = 0;
    read_control(header, message);
  }
  return {messages_.data(), count};
}

void Socket::read_control(msghdr& header, Message& message) {
  for (cmsghdr* at = CMSG_FIRSTHDR(&header); at != nullptr; at = CMSG_NXTHDR(&header, at)) {
    if (at->cmsg_level == IPPROTO_UDP && at->cmsg_type == UDP_GRO) {
      int segment = 0;
      std::memcpy(&segment, CMSG_DATA(at), sizeof(segment));
      if (segment > 0) message.segment = static_cast<size_t>(segment);
    } else if (at->cmsg_level == IPPROTO_IP && at->cmsg_type == IP_TOS) {
      message.ecn = *CMSG_DATA(at) & 3;  // one byte
    } else if (at->cmsg_level == IPPROTO_IPV6 && at->cmsg_type == IPV6_TCLASS) {
      int traffic = 0;
      std::memcpy(&traffic, CMSG_DATA(at), sizeof(traffic));
      message.ecn = static_cast<uint8_t>(traffic & 3);
    } else if (at->cmsg_level == SOL_SOCKET && at->cmsg_type == SCM_TIMESTAMPNS) {
      timespec stamp{};
      std::memcpy(&stamp, CMSG_DATA(at), sizeof(stamp));
      message.arrival = Nanos{stamp.tv_sec} * kSecond + stamp.tv_nsec + realtime_to_monotonic_;
    } else if (at->cmsg_level == SOL_SOCKET && at->cmsg_type == SO_RXQ_OVFL) {
      uint32_t mark = 0;
      std::memcpy(&mark, CMSG_DATA(at), sizeof(mark));
      counters_.overflows += static_cast<uint32_t>(mark - overflow_mark_);
      overflow_mark_ = mark;
    }
  }
}

// Kernel timestamps are CLOCK_REALTIME, which is stepped and slewed. The offset is measured every
// few milliseconds, from the reading with the shortest delay.
void Socket::align_clocks(Nanos now) {
  Nanos best = kNever;
  for (int attempt = 0; attempt < 4 && best > 500; ++attempt) {
    const Nanos before = read_clock(CLOCK_MONOTONIC);
    const Nanos real = read_clock(CLOCK_REALTIME);
    const Nanos after = read_clock(CLOCK_MONOTONIC);
    if (after - before >= best) continue;
    best = after - before;
    realtime_to_monotonic_ = before + (after - before) / 2 - real;
  }
  aligned_at_ = now;
}

void HeldTrain::hold(const Train& train, uint32_t from) {
  bytes_.clear();
  bytes_.reserve(Train::kMaxBytes);
  train_.destination = train.destination;
  train_.count = train.count;
  train_.segment_bytes = train.segment_bytes;
  train_.total_bytes = train.total_bytes;
  train_.dscp = train.dscp;
  train_.ecn = train.ecn;
  train_.whole = train.whole;
  train_.tagged = train.tagged;
  for (uint32_t i = from; i < train.count; ++i) {
    const auto* tag = static_cast<const uint8_t*>(train.spans[2 * size_t{i}].data);
    if (train.tagged) bytes_.insert(bytes_.end(), tag - wire::kTagBytes, tag);
    const size_t begin = bytes_.size();
    for (size_t half = 0; half < 2; ++half) {
      const Train::Span& span = train.spans[2 * size_t{i} + half];
      const auto* data = static_cast<const uint8_t*>(span.data);
      if (span.size != 0) bytes_.insert(bytes_.end(), data, data + span.size);
    }
    // The vector may still move, so only sizes are recorded until all bytes are copied.
    train_.spans[2 * size_t{i}] = {nullptr, bytes_.size() - begin};
    train_.spans[2 * size_t{i} + 1] = {nullptr, 0};
  }
  const uint8_t* at = bytes_.data();
  for (uint32_t i = from; i < train.count; ++i) {
    if (train.tagged) at += wire::kTagBytes;
    train_.spans[2 * size_t{i}].data = at;
    at += train_.spans[2 * size_t{i}].size;
  }
  first = from;
  held_ = true;
}

}  // namespace gradwire::io
