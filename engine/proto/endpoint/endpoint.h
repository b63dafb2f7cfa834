// One endpoint of a job (a worker or a server) as a sans-IO state machine: datagrams in with a
// time, datagrams out, next timer, events. It reads no clock, no socket and no random source.
//
// The driver (io or sim) loops:
//   for each datagram:  receive(bytes, now, arrival)
//   after each batch:   flush(now)
//   when due:           on_timer(now)             (next_timer() says when)
//   while transmit(now, train): send the train    (its payload pointers live until the next call)
//   while next_event(event): hand the event on
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/base/failure.h"
#include "proto/base/time.h"
#include "proto/base/zeroed.h"
#include "proto/plan/lanes.h"
#include "proto/plan/plan.h"

namespace gradwire {

struct EndpointConfig {
  uint16_t endpoint = 0;  // workers first, then servers
  uint16_t workers = 1;
  uint16_t servers = 0;  // 0: route sharded
  uint32_t session = 0;
  uint32_t datagram_bytes = 1472;
  Nanos peer_timeout = 30 * kSecond;
  Nanos ping_interval = 1 * kSecond;
  Nanos delay_target = 1300 * kMicrosecond;   // standing queue that congestion control aims at
  uint32_t receive_buffer = 1u << 20;         // usable bytes of the socket's receive buffer
  uint64_t memory_limit = uint64_t{1} << 31;  // of what is held for peers: proto/memory.h
  bool pacing = true;
  uint8_t dscp = 0;  // of all datagrams to which no plan gives another
  bool ecn = true;   // packets that are acknowledged go as ECT(0), where the path carries that
  std::vector<uint32_t> ranks;  // what texts call the workers; empty: 0, 1, 2, …

  uint16_t endpoints() const { return static_cast<uint16_t>(workers + servers); }
  uint16_t aggregators() const { return servers ? servers : workers; }
  bool aggregates() const { return servers == 0 || endpoint >= workers; }
  // The part of each op that is aggregated here.
  uint16_t shard() const { return static_cast<uint16_t>(servers ? endpoint - workers : endpoint); }
  std::string name(uint16_t number) const;  // "rank 3", "server 0"
  // Workers talk to aggregators and back: to each other, or only to the servers.
  bool talks_to(uint16_t other) const {
    return servers == 0 || (endpoint < workers) != (other < workers);
  }
  uint16_t aggregator_endpoint(uint16_t aggregator) const {
    return static_cast<uint16_t>(servers ? workers + aggregator : aggregator);
  }
};

inline constexpr size_t kStatSlots = 8;  // the first four are summed, the last four maximised
using Stats = std::array<double, kStatSlots>;

struct OpSpec {
  uint64_t op = 0;  // its id (proto/lanes.h)
  uint64_t step = 0;
  Plan plan;
  float* data = nullptr;            // plan.elements values, replaced by the result
  std::vector<uint32_t> critical;   // chunk ids
  std::vector<uint8_t> priorities;  // order priority: class of each chunk, 0 first; empty: alike
  Stats stats{};
  Nanos timeout = 1800 * kSecond;
  std::string timeout_from;  // whose that is, for texts: "given to attach"
};

struct OpReport {
  uint64_t op = 0;
  uint64_t step = 0;
  Failure failure;               // none when ok
  std::vector<uint8_t> counted;  // per chunk
  std::vector<uint8_t> applied;  // per chunk
  std::vector<uint32_t> withheld_chunks;
  std::vector<float> withheld_values;
  // What the encoding took from this endpoint's own results: of elements [error_offset, …).
  Zeroed<float> result_error;
  uint64_t error_offset = 0;
  std::vector<double> delivered;  // per region
  std::vector<uint32_t> exceeded;
  Stats stats{};
  Nanos push = 0;
  Nanos pull = 0;
  Nanos total = 0;
  uint64_t bytes_sent = 0;
  uint64_t packets_sent = 0;
  uint64_t retransmissions = 0;
  uint32_t passes = 0;  // of the push: the most that any shard took; 0 under control "stream"
  Nanos rtprop = 0;
  double btlbw = 0;  // bytes/s
  // The longest datagram that all paths of the job carry, as the workers knew when they started
  // the op; the same at all of them.
  uint32_t datagram_bytes = 0;
};

struct Event {
  enum class Type : uint8_t {
    op_done,    // report
    connected,  // endpoint answered for the first time
    failed,     // the endpoint can serve no more: report.failure
    suspect,    // endpoint: what is the longest datagram that the route to it carries?
    closed,     // close() has finished: all acknowledged, or given up
  };
  Type type = Type::op_done;
  uint16_t endpoint = 0;
  OpReport report;
};

// A run of datagrams for one destination: all `segment_bytes` long but the last, which may be
// shorter. Header and payload of datagram i are spans[2 i] and spans[2 i + 1] (payload may be
// empty).
struct Train {
  static constexpr size_t kMaxSegments = 64;
  static constexpr size_t kMaxBytes = 65'000;
  struct Span {
    const void* data;
    size_t size;
  };
  uint16_t destination = 0;
  uint32_t count = 0;
  uint32_t segment_bytes = 0;
  uint32_t total_bytes = 0;
  uint8_t dscp = 0;
  uint8_t ecn = 0;     // the two bits below it
  bool whole = false;  // a trial of a length: goes in no parts
  std::array<Span, 2 * kMaxSegments> spans;
  alignas(8) std::array<std::array<uint8_t, 32>, kMaxSegments> headers;
  std::vector<uint8_t> control;  // backing store of control payloads
};

struct Counters {
  uint64_t packets_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t packets_received = 0;
  uint64_t bytes_received = 0;
  uint64_t retransmissions = 0;
  uint64_t spurious_retransmissions = 0;
  uint64_t declared_lost = 0;
  uint64_t probes = 0;
  uint64_t acks_sent = 0;
  uint64_t duplicates = 0;
  uint64_t malformed = 0;
  uint64_t refused = 0;  // packets that came and found no room
  uint64_t memory = 0;   // bytes held for peers now, reservations among them
  uint64_t credit_stalls = 0;
  uint64_t window_stalls = 0;
  uint64_t marked = 0;      // packets that came with CE
  uint64_t mark_cuts = 0;   // times that a window of ours shrank for marks
  uint64_t ecn_failed = 0;  // paths that do not carry ECT
  Nanos rtprop = 0;
  Nanos queue_delay = 0;
  double btlbw = 0;
  double send_window = 0;     // bytes
  double receive_window = 0;  // bytes
  uint64_t fragmented = 0;    // datagrams that went in parts
  uint64_t path_limit = 0;    // the longest datagram that all paths carry, bytes
};

// What an endpoint knows of another one that it talks to.
struct PeerState {
  uint16_t endpoint = 0;
  bool answered = false;        // a ping of full length has been answered
  bool heard = false;           // something has come from it
  Nanos silence = 0;            // since then
  std::vector<uint64_t> begun;  // by lane: ids below it have started there, as far as heard

  bool has_begun(uint64_t op) const {
    return lane_of(op) < begun.size() && op < begun[lane_of(op)];
  }
};

class Endpoint {
 public:
  explicit Endpoint(const EndpointConfig& config, Nanos now);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // None, or why the op cannot start: then it is not reported, and nothing has changed unless the
  // endpoint has failed.
  Failure start(OpSpec spec, Nanos now);
  // One datagram from `source` (the endpoint whose address it came from). `arrival` is when the
  // kernel got it, at most `now`; `ecn` the two bits that it came with (RFC 3168).
  void receive(uint16_t source, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
               uint8_t ecn = 0);
  void flush(Nanos now);
  bool transmit(Nanos now, Train& train);
  Nanos next_timer() const;
  void on_timer(Nanos now);
  // Knowledge from outside: the longest datagram that the route to a peer carries.
  void limit(uint16_t peer, uint32_t bytes, Nanos now);
  bool next_event(Event& event);
  // Says goodbye once what others need from here is acknowledged; Event::closed follows within
  // `linger`.
  void close(Nanos now, Nanos linger);

  const Counters& counters() const;
  std::vector<PeerState> peers(Nanos now) const;
  const Failure& failure() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire
