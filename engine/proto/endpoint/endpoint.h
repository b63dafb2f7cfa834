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

#include "codec/elements.h"
#include "proto/base/failure.h"
#include "proto/base/overhead.h"
#include "proto/base/time.h"
#include "proto/base/zeroed.h"
#include "proto/endpoint/waits.h"
#include "proto/path/path_counters.h"
#include "proto/plan/lanes.h"
#include "proto/plan/plan.h"

namespace gradwire {

// The number of an endpoint that aggregates nothing.
inline constexpr uint16_t kNoAggregator = UINT16_MAX;

struct EndpointConfig {
  uint16_t endpoint = 0;  // workers first, then servers
  uint16_t workers = 1;
  uint16_t servers = 0;  // 0: route sharded
  uint32_t session = 0;
  uint32_t datagram_bytes = 1472;
  Nanos peer_timeout = 30 * kSecond;
  Nanos ping_interval = 1 * kSecond;
  Nanos delay_target = 1300 * kMicrosecond;   // the standing queue that congestion control aims at
  uint32_t receive_buffer = 1u << 20;         // usable bytes of the socket's receive buffer
  uint64_t memory_limit = uint64_t{1} << 31;  // bytes held for peers (proto/base/memory.h)
  bool pacing = true;
  uint8_t dscp = 0;             // of all datagrams whose plan gives no other
  bool ecn = true;              // acknowledged packets go as ECT(0) where the path carries it
  std::vector<uint32_t> ranks;  // the workers' names in texts; empty: 0, 1, 2, …

  // The bytes on the wire of a full datagram.
  uint32_t wire_bytes() const { return datagram_bytes + kOverhead; }
  uint16_t endpoints() const { return static_cast<uint16_t>(workers + servers); }
  uint16_t aggregators() const { return servers ? servers : workers; }
  bool aggregates() const { return servers == 0 || endpoint >= workers; }
  // The index of the shard that is aggregated here.
  uint16_t shard() const { return static_cast<uint16_t>(servers ? endpoint - workers : endpoint); }
  std::string name(uint16_t number) const;  // "rank 3", "server 0"
  // The number of endpoints with which one exchanges packets.
  uint32_t peers_of(uint16_t number) const {
    if (servers == 0) return workers - 1u;
    return number < workers ? servers : workers;
  }
  // True for endpoints that exchange packets: workers with each other, or workers with servers.
  bool talks_to(uint16_t other) const {
    return servers == 0 || (endpoint < workers) != (other < workers);
  }
  // The number of an endpoint as an aggregator, or kNoAggregator.
  uint16_t aggregator_at(uint16_t number) const {
    if (servers == 0) return number;
    return number >= workers ? static_cast<uint16_t>(number - workers) : kNoAggregator;
  }
  uint16_t aggregator_endpoint(uint16_t aggregator) const {
    return static_cast<uint16_t>(servers ? workers + aggregator : aggregator);
  }
};

inline constexpr size_t kStatSlots = 8;  // the first four are summed, the last four maximised
using Stats = std::array<double, kStatSlots>;

struct OpSpec {
  uint64_t op = 0;  // its id (proto/plan/lanes.h)
  uint64_t step = 0;
  Plan plan;
  codec::Elements data;            // plan.elements values, replaced by the result
  std::vector<uint32_t> critical;  // chunk ids
  // Order priority: the class of each chunk, 0 first; empty: all alike.
  std::vector<uint8_t> priorities;
  Stats stats{};
  Nanos timeout = 1800 * kSecond;
  std::string timeout_from;  // where the time-out comes from, for texts: "given to attach"
};

// Traffic is what one endpoint has sent of an op.
struct Traffic {
  uint64_t bytes = 0;
  uint64_t packets = 0;
  uint64_t retransmissions = 0;

  void add(size_t sent) {
    ++packets;
    bytes += sent;
  }
};

// OpCost is what an op has cost at one endpoint.
struct OpCost {
  Nanos push = 0;
  Nanos pull = 0;
  Nanos total = 0;
  Traffic traffic;
  uint32_t passes = 0;  // of the push: the most of any shard; 0 under control "stream"
  Nanos rtprop = 0;
  double btlbw = 0;  // bytes/s
  Waits waits;
};

struct OpReport {
  uint64_t op = 0;
  uint64_t step = 0;
  Failure failure;               // none when ok
  std::vector<uint8_t> counted;  // by chunk
  std::vector<uint8_t> applied;  // by chunk
  std::vector<uint32_t> withheld_chunks;
  std::vector<float> withheld_values;
  // The encoding's error in this endpoint's own results, for the elements from error_offset on.
  Zeroed<float> result_error;
  uint64_t error_offset = 0;
  std::vector<double> delivered;  // by region
  std::vector<uint32_t> exceeded;
  Stats stats{};
  OpCost cost;
  // The longest datagram that all paths of the job carried when the workers started the op. It is
  // the same on all workers.
  uint32_t datagram_bytes = 0;
};

struct Event {
  enum class Type : uint8_t {
    op_done,    // the report is of this op
    connected,  // the endpoint has answered for the first time
    failed,     // this endpoint can go on no more: report.failure
    suspect,    // the driver shall find the longest datagram on the route to this endpoint
    closed,     // close() has finished, with everything acknowledged or the time over
  };
  Type type = Type::op_done;
  uint16_t endpoint = 0;
  OpReport report;
};

// Train is a run of datagrams for one destination. All have `segment_bytes` but the last, which may
// be shorter. Header and payload of datagram i are spans[2 i] and spans[2 i + 1]; a payload may be
// empty.
struct Train {
  // Datagrams of a train: UDP_SEGMENT takes at most 64 in one call.
  static constexpr size_t kMaxSegments = 64;
  // Bytes of a train: one call takes less than 64 KiB.
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
  uint8_t ecn = 0;     // the two bits below the DSCP
  bool whole = false;  // a ping that tests a length; never split into fragments
  std::array<Span, 2 * kMaxSegments> spans;
  alignas(8) std::array<std::array<uint8_t, 32>, kMaxSegments> headers;
  std::vector<uint8_t> control;  // memory of control payloads
};

// Writes the ERROR that reports a failure to a peer. Drivers need it where an endpoint cannot go
// on.
void write_error(const EndpointConfig& config, const Failure& failure, uint16_t peer, Train& train);

// Levels are how memory and congestion control stand now.
struct Levels {
  uint64_t memory = 0;  // bytes held for peers, with reservations
  Nanos rtprop = 0;
  Nanos queue_delay = 0;
  double btlbw = 0;           // bytes/s
  double send_window = 0;     // bytes
  double receive_window = 0;  // bytes
  uint64_t path_limit = 0;    // bytes of the longest datagram that all paths carry
};

// Counters count what has happened since the endpoint was made.
struct Counters {
  uint64_t packets_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t packets_received = 0;
  uint64_t bytes_received = 0;
  uint64_t retransmissions = 0;
  uint64_t spurious_retransmissions = 0;
  uint64_t copies = 0;  // packets whose chunk went again at once
  uint64_t declared_lost = 0;
  uint64_t probes = 0;
  uint64_t acks_sent = 0;
  uint64_t duplicates = 0;
  uint64_t malformed = 0;
  uint64_t refused = 0;     // packets that arrived and found no room
  uint64_t fragmented = 0;  // datagrams sent in fragments
  uint64_t credit_stalls = 0;
  uint64_t window_stalls = 0;
  uint64_t marked = 0;      // packets that arrived with CE
  uint64_t mark_cuts = 0;   // reductions of own windows for marks
  uint64_t ecn_failed = 0;  // paths that do not carry ECT
  Levels now;
};

// PeerState is what an endpoint has observed of a peer.
struct PeerState {
  uint16_t endpoint = 0;
  bool answered = false;        // a ping of full length has been answered
  bool heard = false;           // a packet has arrived from it
  bool left = false;            // it has said goodbye
  Nanos silence = 0;            // time since the last packet
  std::vector<uint64_t> begun;  // by lane: ids below it are known to have started there
  PathState path;

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

  // Starts an op, or returns why it cannot start. Such an op gets no report, and changes nothing
  // unless the endpoint has failed.
  Failure start(OpSpec spec, Nanos now);
  // Takes one datagram from `source`, the endpoint whose address it came from. `arrival`: when the
  // kernel received it, at most `now`. `ecn`: its codepoint (RFC 3168).
  void receive(uint16_t source, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
               uint8_t ecn = 0);
  void flush(Nanos now);
  // Writes the next train; false when nothing is to be sent now. `urgent`: only ACKs, pings and
  // what ends the job, which the driver sends before a train that waits for the socket.
  bool transmit(Nanos now, Train& train, bool urgent = false);
  Nanos next_timer() const;
  void on_timer(Nanos now);
  // Sets the longest datagram that the route to a peer carries, as the driver has found.
  void limit(uint16_t peer, uint32_t bytes, Nanos now);
  bool next_event(Event& event);
  // Fails for a reason of the caller's, which the peers are told.
  void fail(const std::string& why, Nanos now);
  // Sends BYE to the peers and serves what they still need. Event::closed follows once all is
  // acknowledged: within `linger`, or later while peers still take results.
  void close(Nanos now, Nanos linger);

  const Counters& counters() const;
  std::vector<PeerState> peers(Nanos now) const;
  const Failure& failure() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire
