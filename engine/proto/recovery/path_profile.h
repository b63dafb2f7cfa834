// PathProfile is what the length of a path changes. On a long path most bytes in flight are on the
// wire, each answer takes a round, and a window sent as one burst would overflow the queues.
#pragma once

#include "proto/base/time.h"

namespace gradwire {

struct PathProfile {
  // ---- windows
  double growth;       // bytes by which a window grows for each byte delivered without a queue
  double slow_growth;  // the share of itself by which it grows in an epoch beside a queue
  double target;       // the share of RTprop that the queue aimed at may take
  bool ramps;          // slow start goes on for rounds, and a window may exceed what is known
  bool steady;         // the rate of one epoch shows whether other flows take the rest
  bool own_queue;      // a window gives way to its only receiver's queue
  // ---- credit
  bool spreads;          // a window is paced over a round, by the receiver's part of it
  double unasked;        // the share of the receive window that all senders get unasked
  bool outdates_demand;  // a demand counts until a round after it was met
  bool early_share;      // a path's part of the stash may go early
  // ---- recovery
  double ack_spacing;  // the least time between two ACKs, as a share of RTprop
  bool acks_all;       // under heavy loss an ACK repeats all that has arrived
  bool probes_window;  // a probe time-out sends a round's first window
};

inline constexpr PathProfile kShortPath{.growth = 0.5,
                                        .slow_growth = 0.05,
                                        .target = 0,
                                        .ramps = false,
                                        .steady = true,
                                        .own_queue = false,
                                        .spreads = false,
                                        .unasked = 0,
                                        .outdates_demand = false,
                                        .early_share = false,
                                        .ack_spacing = 0,
                                        .acks_all = false,
                                        .probes_window = false};
inline constexpr PathProfile kLongPath{.growth = 1.0,
                                       .slow_growth = 0.1,
                                       .target = 0.25,
                                       .ramps = true,
                                       .steady = false,
                                       .own_queue = true,
                                       .spreads = true,
                                       .unasked = 0.5,
                                       .outdates_demand = true,
                                       .early_share = true,
                                       .ack_spacing = 1.0 / 32,
                                       .acks_all = true,
                                       .probes_window = true};
// A path is long from an RTprop that is much longer than the queue that congestion control aims at.
inline constexpr Nanos kLongRtprop = 5 * kMillisecond;

inline const PathProfile& profile_of(Nanos rtprop) {
  return rtprop > kLongRtprop ? kLongPath : kShortPath;
}

}  // namespace gradwire
