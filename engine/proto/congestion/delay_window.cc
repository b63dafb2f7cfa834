#include "proto/congestion/delay_window.h"

#include <algorithm>
#include <limits>

#include "proto/base/overhead.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

namespace {
// An epoch is one round trip; below this too few packets arrive to judge by.
constexpr Nanos kShortestEpoch = 300 * kMicrosecond;
// The share of the queue's excess above the target by which an epoch shrinks the window: the rest
// drains while the ACKs that show it are on their way.
constexpr double kCutShare = 0.7;
// Below this share of the target the window regains at once what other traffic has taken. It is
// compared with single batches, which bursts of one sender reach.
constexpr double kRegainQueue = 1.0 / 3;
// The share of way_back_ that the window covers. The rest is queueing at other ports: a window that
// covers all of it overflows the port of an incast, and one that covers less leaves ports idle
// where hosts are busy.
constexpr double kWayBack = 0.85;
// A rate below this share of BtlBw, beside a queue, is slow: several TCP flows take the rest.
constexpr double kSlow = 0.5;
// Bytes per round while competing: a window that shrinks by less than half at a loss, and grows by
// so much, gets what one flow of TCP gets that halves its own (RFC 9438 §4.3).
constexpr double kCompetitiveGrowth = 3.0 * (1.0 - kSignalCut) / (1.0 + kSignalCut) * kFullPacket;
// Bytes: a part of what a port's queue holds; a server 40 ms away overflows without this bound.
constexpr double kLongQueue = 64 << 10;
}  // namespace

DelayWindow::DelayWindow(double initial, const Bounds& bounds)
    : bounds_(bounds),
      window_(initial),
      maximum_(std::max(bounds.minimum, bounds.buffer)),
      target_(bounds.target),
      enough_(maximum_),
      law_(bounds.evidence) {}

// Where the network bears little, so is the smallest window.
double DelayWindow::smallest() const {
  if (bounds_.fewest == 0) return bounds_.minimum;
  return std::max(bounds_.fewest, law_.room() * bounds_.minimum);
}

void DelayWindow::sample(uint64_t bytes, Nanos queue, Nanos round, Nanos rtprop, bool lossy,
                         Nanos now, Nanos sent) {
  queue = std::max<Nanos>(queue, 0);
  meter_.add(bytes, now, lossy, sent, law_.loses(now) ? round : 0);
  stretch_.queued(queue);
  law_.queued(queue);
  target_ = aim(rtprop);
  lossy_ = lossy;
  delay_sum_ += static_cast<double>(queue) * static_cast<double>(bytes);
  bytes_sum_ += static_cast<double>(bytes);
  // While the queue is short the window regains at once what other traffic has taken.
  const double enough = ramps() ? maximum_ : enough_;
  if (limited_ && slow_start_.doubles() && window_ < enough &&
      static_cast<double>(queue) < kRegainQueue * static_cast<double>(target_))
    window_ = std::min(window_ + profile_of(rtprop).growth * static_cast<double>(bytes),
                       std::max(maximum_, window_));
  if (now < epoch_end_) return;
  if (epoch_end_ != 0) end_epoch(round, rtprop, now);
  // A change of the window shows after a round trip through the present queue.
  epoch_end_ = now + std::max(round, kShortestEpoch);
  delay_sum_ = bytes_sum_ = 0;
  epoch_start_ = now;
  limited_ = lost_ = false;
}

void DelayWindow::marked() {
  slow_start_.marked();
  window_ = std::max(smallest(), kSignalCut * window_);
  law_.marked();
  stretch_.marked();
}

// The target grows with the path, because bursts of a round are longer there: a queue too short for
// them runs empty, above all under incast. It must still fit into the port's buffer, so it shrinks
// with the room that losses leave.
Nanos DelayWindow::aim(Nanos rtprop) const {
  const double rate = meter_.bytes_per_second();
  const double share = bounds_.fewest > 0 ? law_.room() : 1.0;
  const auto shortest = static_cast<Nanos>(share * static_cast<double>(bounds_.target));
  if (ramps() || rate <= 0) return shortest;
  const double longest = profile_of(rtprop).target * static_cast<double>(rtprop);
  return std::max(shortest, static_cast<Nanos>(share * std::min(longest, kLongQueue * 1e9 / rate)));
}

void DelayWindow::end_epoch(Nanos round, Nanos rtprop, Nanos now) {
  const auto delay = static_cast<Nanos>(delay_sum_ / std::max(1.0, bytes_sum_));
  last_delay_ = delay;
  account(delay, round, rtprop);
  const double rate =
      bytes_sum_ * 1e9 / static_cast<double>(std::max<Nanos>(1, now - epoch_start_));
  const PathProfile& path = profile_of(rtprop);
  // Heavy loss ends slow start on a short path, because copies of lost packets would fill the port.
  // So does an RTprop whose growth of one round, sent at once, would exceed the wanted queue.
  const bool steep = path.growth * static_cast<double>(rtprop) > static_cast<double>(target_);
  const bool ends = some_queue(delay, target_) || (!path.ramps && (lossy_ || steep));
  slow_start_.round(rate, ends, limited_, path.ramps);
  // The buffers of a long path hold more than the queue aimed at, and each judgement takes rounds.
  // But a policer may stand before one, which takes most packets until it is known.
  if (!path.ramps || lossy_ || law_.loses(now) || law_.room() < 1)
    law_.judge({round, bounds_.target, lossy_, stretch_.use(), !path.ramps}, now);
  if (const double left = law_.left(); left < 1) meter_.replace(left * meter_.bytes_per_second());
  if (const double known = meter_.bytes_per_second(); known > 0) {
    stretch_.delivered(bytes_sum_, now - epoch_start_);
    if (stretch_.due()) stretch_.epoch(window_, known, delay, target_, limited_);
  }
  if (!compete(delay, rate, path, now)) steer(delay, path, now);
}

// Computes what the rate accounts for, and the most that the path and the receiver hold.
void DelayWindow::account(Nanos delay, Nanos round, Nanos rtprop) {
  const double target = static_cast<double>(target_);
  // The window holds the wanted queue, the path, and most of what is under way on the return path
  // beyond RTprop. More than that only lengthens the queue.
  const auto sample = static_cast<double>(
      std::clamp<Nanos>(round - delay - rtprop, 0, 2 * std::max(target_, bounds_.target)));
  way_back_ += (sample - way_back_) * (way_back_ == 0 ? 1.0 : 1.0 / kSmoothing);
  // It is at least what is under way at this rate and a quarter of the target's queue, since a
  // window that limits the rate could not grow otherwise.
  const double least =
      static_cast<double>(std::max<Nanos>(round - delay, 0)) - kShortQueue * target;
  const double way = static_cast<double>(rtprop) + kWayBack * way_back_;
  enough_ = meter_.bytes_per_second() > 0
                ? meter_.bytes_per_second() * 1e-9 * (target + std::max(way, least))
                : std::numeric_limits<double>::infinity();
  maximum_ = std::max(bounds_.minimum, bounds_.buffer) +
             meter_.bytes_per_second() * 1e-9 * static_cast<double>(rtprop);
}

// Runs trials and competition; true while they decide about the window.
bool DelayWindow::compete(Nanos delay, double rate, const PathProfile& path, Nanos now) {
  // An epoch that a pause has lengthened by half does not show whose traffic fills the port.
  const bool whole = 2 * (now - epoch_end_) < epoch_end_ - epoch_start_;
  // Under heavy loss a trial ends as it would without, but no first one begins.
  if (lossy_ ? competition_.trying() : whole && limited_) {
    const bool slow =
        path.steady && some_queue(delay, target_) && rate < kSlow * meter_.bytes_per_second();
    const double factor =
        competition_.observe(bytes_sum_, now - epoch_start_, delay, target_, slow, now);
    if (factor != 1.0) window_ = std::clamp(factor * window_, smallest(), maximum_);
  }
  if (competition_.trying()) return true;
  if (!competition_.competes()) return false;
  if (lost_) {
    window_ *= kSignalCut;
  } else if (limited_) {
    window_ += kCompetitiveGrowth;
  }
  window_ = std::clamp(window_, smallest(), maximum_);
  return true;
}

// Holds the queue at the target: shrinks in proportion to its excess, and grows below.
void DelayWindow::steer(Nanos delay, const PathProfile& path, Nanos now) {
  const double target = static_cast<double>(target_);
  // A long path without a queue may carry more than the rate accounts for: losses may have ended
  // slow start before it found the rate.
  const double most =
      ramps() || (path.ramps && !lossy_ && !some_queue(delay, target_)) ? maximum_ : enough_;
  if (delay > target_) {
    const double excess = (static_cast<double>(delay) - target) / static_cast<double>(delay);
    window_ = std::max(smallest(), window_ * std::max(kSignalCut, 1.0 - kCutShare * excess));
  } else if (limited_ && window_ < most) {
    const double room = (target - static_cast<double>(delay)) / target;
    const double grown = window_ + std::max<double>(kFullPacket, path.slow_growth * window_) * room;
    // A step of a short path may end beyond `most`; one of a long path would take a round to show.
    window_ = std::min(grown, path.ramps ? most : maximum_);
  }
  // A window that is too large shrinks only when there is a queue. A long round without one is the
  // delay of busy hosts; shrinking for it would lower the rate, and with the rate the window, again
  // and again.
  if ((some_queue(delay, target_) || law_.loses(now)) && !ramps())
    window_ = std::min(window_, enough_);
  window_ = std::clamp(window_, smallest(), maximum_);
}

}  // namespace gradwire
