// One direction of a port: a rate, a drop-tail queue, a delay, and what may go wrong on the wire.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/time.h"
#include "sim/random.h"

namespace gradwire::sim {

struct LinkOptions {
  double rate = 125e6;              // bytes/s
  Nanos delay = 20 * kMicrosecond;  // one way, after the last byte has left the queue
  uint64_t queue_bytes = 256 << 10;
  double loss = 0.0;                         // share of packets lost on the wire
  double loss_burst = 1.0;                   // mean length of a run of losses; 1: independent
  double reorder = 0.0;                      // share of packets that come late …
  Nanos reorder_delay = 100 * kMicrosecond;  // … by up to this
  double duplicate = 0.0;                    // share of packets that come twice
  // An extra datagram that no length or session would let pass: cut short, too long, of another
  // session (and version), in another's name, or noise. It must change nothing.
  double garbage = 0.0;
  // Random bits of the packet itself flipped, as if the UDP checksum had not noticed. Anything may
  // come of it but a crash or an endless wait.
  double flip = 0.0;
  uint64_t ecn_bytes = 0;  // packets that are ECT and find more waiting are marked; 0: none are
  bool bleach = false;     // clears the ECN field of all
  bool drop_ect = false;   // loses all that are ECT
  uint32_t longest = 0;    // loses longer datagrams without a word; 0: none is too long

  // "" or what is wrong.
  std::string validate() const;
};

struct LinkCounters {
  uint64_t packets = 0;  // the endpoints' own, handed to the link
  uint64_t bytes = 0;    // on the wire
  uint64_t dropped_queue = 0;
  uint64_t dropped_loss = 0;
  uint64_t dropped_long = 0;
  uint64_t reordered = 0;
  uint64_t duplicated = 0;
  uint64_t garbage = 0;
  uint64_t cross_packets = 0;
  uint64_t cross_dropped = 0;
  uint64_t max_queue_bytes = 0;
  uint64_t ect = 0;     // of the endpoints' packets, those that came as ECT
  uint64_t marked = 0;  // and those that were marked here
};

class Link {
 public:
  Link(const LinkOptions& options, uint64_t seed);

  const LinkOptions& options() const { return options_; }
  void set_options(const LinkOptions& options) { options_ = options; }

  // The ECN field of what has come to the queue, as it leaves: marked, cleared, or as it was. To be
  // asked before `enqueue`.
  uint8_t mark(Nanos now, uint8_t ecn, uint32_t packets);
  // When the last byte will have left the queue; kNever when it finds no room. `packets` travel as
  // one (a train that segmentation offload keeps whole).
  Nanos enqueue(Nanos now, uint64_t wire_bytes, uint32_t packets, bool cross);
  // Whether the wire loses the next packet.
  bool lose(uint32_t packets);

  Random random;
  LinkCounters counters;

 private:
  LinkOptions options_;
  uint64_t queued(Nanos now) const;

  Nanos busy_until_ = 0;
  bool bad_ = false;
};

}  // namespace gradwire::sim
