// TcpFlow is a flow of TCP Reno (RFC 5681) from outside into one port: other traffic that grows
// until the port drops packets, and yields then. The fabric calls start(), acked() and lost() when
// their times have come; what the flow sends in answer goes through the link at once.
#pragma once

#include <cstdint>
#include <deque>

#include "proto/base/time.h"

namespace gradwire::sim {

struct TcpFlowOptions {
  Nanos start = 0;
  Nanos end = kNever;                // sends nothing from then on
  Nanos round = 200 * kMicrosecond;  // the round trip without a queue

  // An empty string, or what is wrong.
  const char* validate() const {
    if (start < 0 || end <= start) return "start, end: a flow ends after its start";
    if (round <= 0) return "round: a round trip takes more than 0 ns";
    return "";
  }
};

struct TcpFlowCounters {
  uint64_t packets = 0;
  uint64_t dropped = 0;
  uint64_t delivered_bytes = 0;
};

class TcpFlow {
 public:
  explicit TcpFlow(const TcpFlowOptions& options) : options(options) {}

  // True when a packet may go now.
  bool sends(Nanos now) const { return now < options.end && in_flight_ < window_; }
  // A packet has been given to the link, which `dropped` it.
  void sent(Nanos now, bool dropped);
  void acked();
  // The oldest dropped packet that is not known as such is known now.
  void lost(Nanos now);

  TcpFlowOptions options;
  TcpFlowCounters counters;

 private:
  double window_ = 10;      // packets (RFC 6928)
  double threshold_ = 1e9;  // of slow start, in packets
  double in_flight_ = 0;
  std::deque<Nanos> dropped_;  // when packets were sent that the link dropped
  Nanos cut_ = -1;
};

}  // namespace gradwire::sim
