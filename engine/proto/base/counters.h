// Counters and Levels are what people are shown of one endpoint, PathCounters and PathState of the
// way to and from one peer. Traffic is a part of these, and of what they are shown of ops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

// Traffic counts the packets that have gone one way.
struct Traffic {
  uint64_t packets = 0;
  uint64_t bytes = 0;
  uint64_t retransmissions = 0;  // chunks sent again; who receives does not know them

  void add(uint64_t more, uint64_t count = 1) {
    packets += count;
    bytes += more;
  }
};

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
  Traffic sent;  // but for acknowledgements, pings and farewells
  Traffic received;
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

// PathCounters count what has happened on a path since the endpoint was made.
struct PathCounters {
  Traffic sent;  // but for acknowledgements, pings and farewells
  Traffic received;
  uint64_t declared_lost = 0;  // packets
  Nanos waited = 0;        // in which ops that had started here waited for the peer to start them
  Nanos waited_until = 0;  // no time counts twice

  // The peer starts an op that has waited for it since then.
  void waits_end(Nanos since, Nanos now) {
    waited += std::max<Nanos>(now - std::max(since, waited_until), 0);
    waited_until = now;
  }
};

// PathState is how a path stands now.
struct PathState {
  PathCounters total;
  Nanos rtprop = 0;
  Nanos round = 0;         // smoothed round-trip time; 0 before the first
  Nanos queue_to = 0;      // queueing delay on the way to the peer, as it reports
  double loss_to = 0;      // share of packets lost on the way to the peer, as it reports
  double loss_from = 0;    // and on the way from it
  double window = 0;       // bytes of the peer's receive window for this endpoint; 0: not known
  uint64_t in_flight = 0;  // packets
};

}  // namespace gradwire
