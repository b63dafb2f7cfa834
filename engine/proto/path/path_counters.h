// PathCounters and PathState are what people are shown of the way to and from one peer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/counters.h"
#include "proto/base/time.h"

namespace gradwire {

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
