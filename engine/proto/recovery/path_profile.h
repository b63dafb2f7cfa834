// PathProfile is what the length of a path changes. On a long path most bytes in flight are on the
// wire, each answer takes a round, and a window sent as one burst would overflow the queues.
#pragma once

#include "proto/base/time.h"

namespace gradwire {

// The values beside the fields are those of a short path.
struct PathProfile {
  // ---- windows
  double growth = 0.5;        // bytes for each byte delivered without a queue
  double slow_growth = 0.05;  // share of the window for each epoch beside a queue
  double target = 0;          // the share of RTprop that the queue aimed at may take
  bool ramps = false;         // slow start goes on for rounds, and may end before the rate is found
  bool steady = true;         // the rate of one epoch shows whether other flows take the rest
  bool own_queue = false;     // a window gives way to its only receiver's queue
  // ---- credit
  bool spreads = false;          // a window is paced over a round, by the receiver's part of it
  double unasked = 0;            // the share of the receive window that senders get unasked
  bool outdates_demand = false;  // a demand that a STOP has met counts for a round more
  bool early_share = false;      // each path's part of the stash may go early
  // ---- recovery
  bool spaces_acks = false;    // two ACKs have a least time between them
  bool acks_all = false;       // under heavy loss an ACK repeats all that has arrived
  bool probes_window = false;  // a probe time-out sends a first window
  bool twins = false;          // packets whose loss would cost a round go several times at once
};

inline constexpr PathProfile kShortPath{};
inline constexpr PathProfile kLongPath{.growth = 1.0,
                                       .slow_growth = 0.1,
                                       .target = 0.25,
                                       .ramps = true,
                                       .steady = false,
                                       .own_queue = true,
                                       .spreads = true,
                                       .unasked = 1.0,
                                       .outdates_demand = true,
                                       .early_share = true,
                                       .spaces_acks = true,
                                       .acks_all = true,
                                       .probes_window = true,
                                       .twins = true};
// A path is long from an RTprop that is much longer than the queue that congestion control aims at.
// What was measured longer ago than a round of a short path says nothing about the present queue,
// and what has not come in that time is lost.
inline constexpr Nanos kLongRtprop = 5 * kMillisecond;

inline const PathProfile& profile_of(Nanos rtprop) {
  return rtprop > kLongRtprop ? kLongPath : kShortPath;
}

}  // namespace gradwire
