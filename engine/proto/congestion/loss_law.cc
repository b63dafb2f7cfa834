#include "proto/congestion/loss_law.h"

#include "proto/congestion/competition.h"
#include "proto/congestion/loss_count.h"
#include "proto/congestion/queue_delay.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

namespace {
// The share of packets that may be lost. Twice it loses twice as much, half of it takes the chance
// of a single packet for a queue.
constexpr double kBorne = 0.01;
// The factor by which losses have to change to be others: they come in runs.
constexpr double kOther = 2;
// Periods of LossCount for which losses of before a change may still be counted, since a packet
// counts as lost when it cannot come late any more. With one of them a trial judges what was
// before it.
constexpr Nanos kSettled = kInARow;
// The factor of the room where losses were too many, and at a mark.
constexpr double kCut = 0.9;
// The divisor of the room when a cut takes most of it. With 1.4 in its place short queues go on
// losing; without it windows stay short (10 Gbit/s, 2 ranks, 122 KiB: 1.6 in place of 1.3).
constexpr double kMostCut = 2;
// The time for which losses that were this end's own are taken for that.
constexpr Nanos kOwn = 2 * kSecond;
// The longest pause after a trial that was of no use, which is twice as long each time: all hosts
// of a job wait for one that tries. After one of heavy loss it is the longest.
constexpr Nanos kLongestPause = WindowedMin::kWindow;
// The time after which heavy loss is tried out: bursts are shorter. The first pause is as long.
constexpr Nanos kPatience = 1 * kSecond;
// The share of the queue at the losses that a trial aims at: with a fourth of it an op in which one
// runs takes 1.25 in place of 1.15 (1 Gbit/s, 2 ranks, 122 KiB).
constexpr double kTried = 0.5;
}  // namespace

LossLaw::LossLaw(double evidence) : evidence_(evidence), pause_(kPatience) {}

void LossLaw::judge(const Port& port, Nanos now) {
  if (start_ == 0) start_ = now;
  if (bursts(port)) {
    trying_ = settling_ = false;
    room_ = saved_;
    return begin(now);
  }
  if (!enough(port, now)) return;
  if (std::exchange(settling_, false)) return begin(now);
  // Beside a queue that makes the target a short one, others have filled its buffer.
  const bool others = short_queue(port.target, static_cast<Nanos>(queue_));
  const bool stands = some_queue(least_.get(), port.target);
  if (trying_) return end_trial(others, stands, now);
  const double loss = lost_ / packets_;
  const bool lasts = outlasts_bursts(port.lossy || loss >= kHeavyLoss, now);
  if (loss <= kBorne || (loss <= kOther * of_path_ + kBorne && now < again_)) {
    bear(loss);
    regain(now);
  } else if (!others && (lasts || (stands && short_buffer(port)))) {
    if (lost_ < evidence_) return;
    act(port, loss, stands, now);
  }
  begin(now);
}

// False while loss is heavy, and may be a burst.
bool LossLaw::outlasts_bursts(bool heavy, Nanos now) {
  if (!heavy || heavy_since_ == 0) heavy_since_ = now;
  return !heavy || now - heavy_since_ >= kPatience;
}

// The queue in which packets were lost is shorter than the target, so it is this end that fills its
// buffer. Under heavy loss of the path packets that go again make a queue as long as the target; on
// a long path they make a short one.
bool LossLaw::short_buffer(const Port& port) const {
  return port.on_short_path && short_queue(static_cast<Nanos>(queue_), port.target);
}

// A burst that takes most packets has begun in the midst of a trial.
bool LossLaw::bursts(const Port& port) const {
  return trying_ && before_ < kHeavyLoss && port.lossy && lost_ >= evidence_ &&
         lost_ >= kHeavyLoss * packets_;
}

bool LossLaw::enough(const Port& port, Nanos now) const {
  const Nanos took = now - start_;
  const bool many = packets_ >= 2 * LossMeter::kPackets;
  if (settling_ && took < std::max(2 * port.round, kSettled * LossCount::kTime)) return false;
  if (trying_ && took >= Competition::kTrial) return packets_ > 0;
  if (settling_) return many || !trying_;
  if (took < std::max(2 * port.round, LossCount::kTime) || !many) return false;
  return !trying_ || before_ * packets_ >= evidence_;
}

void LossLaw::begin(Nanos now) {
  start_ = now;
  lost_ = packets_ = queue_ = 0;
  least_ = {};
}

// More is lost than the path loses. `stands`: beside a queue that stood all the time.
void LossLaw::act(const Port& port, double loss, bool stands, Nanos now) {
  if (stands) own_until_ = now + kOwn;
  if (stands || (now < own_until_ && room_ > kLeast)) {
    settling_ = true;
    // The buffer is no longer than the queue that lost packets met.
    cut(loss, kShortQueue * queue_ / static_cast<double>(port.target));
  } else if (now >= again_) {
    start_trial(port, loss);
  } else if (now >= own_until_) {
    regain(now);
  }
}

void LossLaw::start_trial(const Port& port, double loss) {
  before_ = loss;
  // Before BtlBw is known much more may have been sent than it.
  arrived_ = std::clamp(loss < kHeavyLoss ? 0.0 : port.use, 1.0 - loss, 1.0);
  saved_ = room_;
  const double tried = kTried * queue_ / static_cast<double>(port.target);
  room_ = std::clamp(tried, kLeast, saved_);
  trying_ = settling_ = true;
}

// `others`: other traffic fills the queue, so the trial shows nothing. `stands`: a queue stood all
// the time. A trial of too few packets shows nothing, either.
void LossLaw::end_trial(bool others, bool stands, Nanos now) {
  const double expected = packets_ * before_;
  const bool shows = expected >= kEvidence / 2;
  const bool own = !others && (stands || (shows && kOther * lost_ < expected));
  left_ = own ? pace() : 1.0;
  trying_ = false;
  settling_ = true;
  room_ = saved_;
  if (own) {
    take_for_own(before_, now);
  } else if (!others) {
    if (shows) {
      own_until_ = 0;
      of_path_ = before_;
      if (before_ >= kHeavyLoss) pause_ = kLongestPause;
    }
    wait(now);
  }
  begin(now);
}

void LossLaw::floods(double loss, double use, Nanos now) {
  if (trying_) room_ = saved_;
  trying_ = false;
  settling_ = true;
  left_ = use;
  take_for_own(loss, now);
  begin(now);
}

void LossLaw::take_for_own(double loss, Nanos now) {
  own_until_ = now + kOwn;
  of_path_ = 0;
  cut(loss);
}

// Takes the more room the more is lost. What is left is no more than `most`, unless that is less
// than one cut may leave.
void LossLaw::cut(double loss, double most) {
  const double left = std::min(kCut, 1.0 - 2 * loss) * room_;
  room_ = std::max(kLeast, std::min(left, std::max(most, room_ / kMostCut)));
}

// Follows the path's loss downwards. Once it is others than a trial has found, there may be
// another.
void LossLaw::bear(double loss) {
  of_path_ += std::min(0.0, loss - of_path_) / kSmoothing;
  if (kOther * of_path_ < before_) again_ = 0;
  if (of_path_ >= kBorne / 2) return;
  of_path_ = 0;
  pause_ = kPatience;
}

void LossLaw::regain(Nanos now) {
  const double seconds = std::min(1.0, 1e-9 * static_cast<double>(now - start_));
  room_ = std::min(1.0, room_ * (1.0 + seconds));
}

void LossLaw::wait(Nanos now) {
  again_ = now + pause_;
  pause_ = std::min(2 * pause_, kLongestPause);
}

}  // namespace gradwire
