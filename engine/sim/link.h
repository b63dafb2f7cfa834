// Link is one direction of a port: a rate, a drop-tail queue, a delay, and faults of the wire.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/time.h"
#include "sim/random.h"

namespace gradwire::sim {

struct LinkOptions {
  double rate = 125e6;              // bytes/s
  Nanos delay = 20 * kMicrosecond;  // one way, from the end of the queue
  uint64_t queue_bytes = 256 << 10;
  double loss = 0.0;                         // share of packets lost on the wire
  double loss_burst = 1.0;                   // mean length of a run of losses; 1: independent
  double reorder = 0.0;                      // share of packets that are delayed …
  Nanos reorder_delay = 100 * kMicrosecond;  // … by up to this
  double duplicate = 0.0;                    // share of packets that arrive twice
  // The share of packets followed by an extra datagram that the endpoint must ignore: cut short,
  // too long, of another session (and version), with another source, or noise.
  double garbage = 0.0;
  // The share of packets in which random bits are flipped, as if the UDP checksum had missed it. It
  // must cause neither a crash nor an endless wait.
  double flip = 0.0;
  // The share of packets with flipped bits that the UDP checksum finds: they cross the link and the
  // receiving host's kernel drops them.
  double corrupt = 0.0;
  uint64_t ecn_bytes = 0;  // ECT packets that find more waiting get CE; 0: none
  bool bleach = false;     // clears the ECN field of all packets
  bool drop_ect = false;   // loses all ECT packets
  uint32_t longest = 0;    // loses longer datagrams silently; 0: no limit
  // A token bucket without a queue, before the queue: packets beyond it are lost.
  double police_rate = 0.0;  // bytes/s; 0: none
  uint64_t police_burst = 64 << 10;

  // An empty string, or what is wrong.
  std::string validate() const;
};

struct LinkCounters {
  uint64_t packets = 0;  // of the endpoints, given to the link
  uint64_t bytes = 0;    // on the wire
  uint64_t dropped_queue = 0;
  uint64_t dropped_loss = 0;
  uint64_t dropped_long = 0;
  uint64_t dropped_policer = 0;
  uint64_t reordered = 0;
  uint64_t duplicated = 0;
  uint64_t garbage = 0;
  uint64_t corrupted = 0;
  uint64_t cross_packets = 0;
  uint64_t cross_dropped = 0;
  uint64_t max_queue_bytes = 0;
  uint64_t ect = 0;     // packets of the endpoints that arrived as ECT
  uint64_t marked = 0;  // packets of the endpoints that got CE here
};

class Link {
 public:
  Link(const LinkOptions& options, uint64_t seed);

  const LinkOptions& options() const { return options_; }
  void set_options(const LinkOptions& options) { options_ = options; }

  // The ECN codepoint of an arriving packet after this queue: CE, cleared, or unchanged. Call it
  // before enqueue().
  uint8_t mark(Nanos now, uint8_t ecn, uint32_t packets);
  // The time when the last byte leaves the queue; kNever when the packet is dropped. `packets`
  // travel as one (a train that segmentation offload keeps whole). `cross`: of other traffic.
  Nanos enqueue(Nanos now, uint64_t wire_bytes, uint32_t packets, bool cross);
  // The bytes that wait.
  uint64_t queued(Nanos now) const;
  // When all that is queued has left.
  Nanos empty_at(Nanos now) const { return busy_until_ > now ? busy_until_ : now; }
  // True when the wire loses the next packet.
  bool lose(uint32_t packets);

  Random random;
  LinkCounters counters;

 private:
  LinkOptions options_;
  bool polices(Nanos now, uint64_t wire_bytes);

  Nanos busy_until_ = 0;
  // Bytes that the policer lets pass, and when they were counted.
  double police_tokens_ = 0;
  Nanos policed_ = kNever;
  bool bad_ = false;
};

}  // namespace gradwire::sim
