// The engine's UDP socket: trains out by UDP_SEGMENT, batches in by recvmmsg and UDP_GRO, each with
// a fallback for kernels and devices that cannot.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/address.h"
#include "proto/endpoint/endpoint.h"

namespace gradwire::io {

// Bytes of buffer that are asked of the kernel.
inline constexpr int kReceiveBuffer = 16 << 20;
inline constexpr int kSendBuffer = 4 << 20;

// What the kernel granted.
struct Features {
  bool segment = false;
  bool gro = false;
  bool timestamps = false;
  bool dscp = false;       // a DSCP for each datagram
  bool ecn = false;        // ECT on each datagram, and the field of each that comes
  int receive_buffer = 0;  // as getsockopt says: the kernel counts its own overhead in it
  int send_buffer = 0;
};

struct SocketCounters {
  uint64_t send_calls = 0;
  uint64_t receive_calls = 0;
  uint64_t blocked = 0;      // trains that found the send buffer full
  uint64_t too_long = 0;     // datagrams above the path's MTU
  uint64_t send_errors = 0;  // datagrams that the kernel refused for another reason
  int last_error = 0;        // that reason, the newest: an errno
  uint64_t truncated = 0;
  uint64_t overflows = 0;  // datagrams that the kernel dropped for want of receive buffer
};

class Socket {
 public:
  static constexpr size_t kBatch = 16;

  // A received message: `segment` bytes per datagram, the last may be shorter.
  struct Message {
    const Address* source;
    std::span<const uint8_t> bytes;
    size_t segment;
    Nanos arrival;  // CLOCK_MONOTONIC; 0 when the kernel did not say
    uint8_t ecn;    // the two bits of ECN; datagrams of one message share them
  };

  // `dscp`: of what is sent, where a train says nothing else. Throws std::system_error with a text
  // that names the address, std::invalid_argument for a DSCP that the kernel refuses.
  Socket(const std::string& host, uint16_t port, uint8_t dscp = 0);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Gives the port back; nothing may be sent or received any more.
  void close();

  int fd() const { return fd_; }
  const Address& address() const { return address_; }
  const Features& features() const { return features_; }
  const SocketCounters& counters() const { return counters_; }

  // Hands the datagrams [first, train.count) to the kernel; returns the first that it did not take
  // for want of buffer, train.count when none is left. What it refuses otherwise is lost, as on
  // any network, and counted.
  uint32_t send(const Address& to, const Train& train, uint32_t first);

  // The longest datagram in bytes that the route to an address is known to carry; 0: not known.
  uint32_t route_limit(const Address& to) const;

  // Up to kBatch messages; their bytes live until the next call.
  std::span<const Message> receive(Nanos now);

 private:
  // What became of one try with UDP_SEGMENT.
  enum class Segmented : uint8_t { sent, blocked, lost, refused };
  Segmented send_segmented(const Address& to, const Train& train, uint32_t first);
  uint32_t send_plain(const Address& to, const Train& train, uint32_t first);
  bool takes_dscp();
  // A server does not choose its plans: where the kernel cannot mark it sends unmarked.
  bool marks(const Train& train) const {
    return (train.dscp != dscp_ || train.ecn != 0) && features_.dscp;
  }
  void read_control(msghdr& header, Message& message);
  void align_clocks(Nanos now);

  static constexpr size_t kMessageBytes = 65'536;
  static constexpr size_t kControlBytes = 128;

  int fd_ = -1;
  Address address_;
  uint8_t dscp_;
  Features features_;
  SocketCounters counters_;
  uint32_t overflow_mark_ = 0;
  Nanos realtime_to_monotonic_ = 0;
  Nanos aligned_at_ = -kSecond;

  std::unique_ptr<uint8_t[]> buffers_;
  std::array<std::array<uint8_t, kControlBytes>, kBatch> controls_;
  std::array<Address, kBatch> sources_;
  std::array<iovec, kBatch> vectors_;
  std::array<mmsghdr, kBatch> headers_;
  std::array<Message, kBatch> messages_;
};

// A train that the kernel would not take yet. The endpoint's pointers live only until its next
// call, so the bytes are copied here.
class HeldTrain {
 public:
  void hold(const Train& train, uint32_t first);
  void release() { held_ = false; }
  bool held() const { return held_; }
  const Train& train() const { return train_; }
  uint32_t first = 0;

 private:
  bool held_ = false;
  Train train_;
  std::vector<uint8_t> bytes_;
};

Nanos monotonic_now();

}  // namespace gradwire::io
