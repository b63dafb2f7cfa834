// Counters and Levels are what people are shown of one endpoint; Traffic is a part of it, and of
// what they are shown of paths and ops.
#pragma once

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

}  // namespace gradwire
