// Socket is the engine's UDP socket. It sends trains with UDP_SEGMENT and receives batches with
// recvmmsg and UDP_GRO; kernels and devices without these have a fallback.
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

// Bytes of socket buffer requested from the kernel, which may grant less.
inline constexpr int kReceiveBuffer = 16 << 20;
inline constexpr int kSendBuffer = 4 << 20;

// Features are what the kernel has granted.
struct Features {
  bool segment = false;
  bool gro = false;
  bool timestamps = false;
  bool dscp = false;       // a DSCP on each datagram
  bool ecn = false;        // ECT on each datagram sent, and the codepoint of each received
  int receive_buffer = 0;  // by getsockopt, which includes the kernel's overhead
  int send_buffer = 0;
};

struct SocketCounters {
  uint64_t send_calls = 0;
  uint64_t receive_calls = 0;
  uint64_t blocked = 0;      // trains that found the send buffer full
  uint64_t too_long = 0;     // datagrams above the path's MTU
  uint64_t send_errors = 0;  // datagrams that the kernel refused for another reason
  int last_error = 0;        // the errno of the newest of these
  uint64_t truncated = 0;
  uint64_t overflows = 0;  // datagrams dropped by the kernel: receive buffer full
};

class Socket {
 public:
  // Messages of one recvmmsg.
  static constexpr size_t kBatch = 16;

  // Message is one received message: datagrams of `segment` bytes, the last may be shorter.
  struct Message {
    const Address* source;
    std::span<uint8_t> bytes;
    size_t segment;
    Nanos arrival;   // CLOCK_MONOTONIC; 0 without a kernel timestamp
    uint8_t ecn;     // the codepoint that all datagrams of the message have
    Buffer* buffer;  // where the bytes may stay; null: they live until the next call
  };

  // `dscp`: that of trains with no other. Throws std::system_error with a text that has the
  // address, and std::invalid_argument for a DSCP that the kernel refuses.
  Socket(const std::string& host, uint16_t port, uint8_t dscp = 0);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Closes the socket, which frees the port.
  void close();

  int fd() const { return fd_; }
  const Address& address() const { return address_; }
  const Features& features() const { return features_; }
  const SocketCounters& counters() const { return counters_; }

  // Gives the datagrams [first, train.count) to the kernel. Returns the first that found the send
  // buffer full, or train.count. A datagram refused for another reason is counted and lost.
  uint32_t send(const Address& to, const Train& train, uint32_t first);

  // The longest datagram in bytes that the kernel's route to an address carries; 0: not known.
  uint32_t route_limit(const Address& to) const;

  // Returns up to kBatch messages; their bytes live until the next call, or while their buffer has
  // holders.
  std::span<const Message> receive(Nanos now);

 private:
  // The result of one send with UDP_SEGMENT.
  enum class Segmented : uint8_t { sent, blocked, lost, refused };
  Segmented send_segmented(const Address& to, const Train& train, uint32_t first);
  uint32_t send_plain(const Address& to, const Train& train, uint32_t first);
  bool takes_dscp();
  // A server does not choose its plans, so without kernel support it sends the datagrams unmarked.
  bool marks(const Train& train) const {
    return (train.dscp != dscp_ || train.ecn != 0) && features_.dscp;
  }
  void read_control(msghdr& header, Message& message);
  void align_clocks(Nanos now);
  void renew_places();

  // Bytes of a message's buffer: the longest that UDP_GRO delivers.
  static constexpr size_t kMessageBytes = 65'536;
  // Bytes for the control messages that the kernel attaches.
  static constexpr size_t kControlBytes = 128;

  int fd_ = -1;
  Address address_;
  uint8_t dscp_;
  Features features_;
  SocketCounters counters_;
  uint32_t overflow_mark_ = 0;
  Nanos realtime_to_monotonic_ = 0;
  Nanos aligned_at_ = -kSecond;

  // Memory of a message, and its buffer.
  struct Place {
    Buffer buffer;
    std::unique_ptr<uint8_t[]> memory;
  };
  // Places: those of one batch, and as many as holders may keep beside.
  static constexpr size_t kPlaces = kBatch + 64;
  std::vector<std::unique_ptr<Place>> free_;
  std::vector<std::unique_ptr<Place>> held_;
  std::array<std::unique_ptr<Place>, kBatch> places_;
  std::array<std::array<uint8_t, kControlBytes>, kBatch> controls_;
  std::array<Address, kBatch> sources_;
  std::array<iovec, kBatch> vectors_;
  std::array<mmsghdr, kBatch> headers_;
  std::array<Message, kBatch> messages_;
};

// HeldTrain keeps a train that found the send buffer full. It copies the bytes, because the
// endpoint's pointers live only until its next call.
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
