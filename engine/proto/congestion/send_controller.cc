#include "proto/congestion/send_controller.h"

#include <algorithm>
#include <utility>

#include "proto/congestion/loss_count.h"

namespace gradwire {

namespace {
// The pace above BtlBw that looks for a higher rate while the queue is almost empty.
constexpr double kProbeGain = 0.2;
// A pace above BtlBw may add this share of the delay target to the queue in a round of a long path.
constexpr double kProbeRoom = 0.5;
// Seconds of the pace that a late timer may catch up on, where the network has room; two trains of
// a long path.
constexpr double kPaceDepth = 1e-9 * kHostDelay;
// The share of the longest queueing delay of a path that the next ACK still counts with: a loss is
// declared some ACKs after the queue that it met.
constexpr double kStillLong = 1.0 - 1.0 / kSmoothing;
// Trains that may go at once at least, so that a timer that is late by one train costs nothing.
constexpr double kTrainsAtOnce = 2;
// The share of a train for which tokens are awaited: the next goes in debt, and in time.
constexpr double kTrainAwaited = 0.5;
// A window goes in at least so many trains: long trains of several senders collide in one port and
// leave others idle.
constexpr double kTrainsPerWindow = 16;
// A train that takes no longer than so many seconds at BtlBw may be twice as long, and longer where
// the network bears less and windows are small: on fast networks the calls of short trains cost
// more than collisions do.
constexpr double kTrainSeconds = 50e-6;

uint32_t train_of(double packets) {
  return static_cast<uint32_t>(std::clamp(packets, 1.0 * kShortestTrain, 1.0 * UINT16_MAX));
}
}  // namespace

void SendController::on_sent(uint64_t bytes, Nanos now, uint32_t packets) {
  in_flight_ += bytes;
  window_.sent(bytes);
  copies_.sent(packets);
  breaker_.sent(bytes, loss_.share(now), packets);
}

// With one destination the queue may be at either end, and the receiver's credit already keeps it
// short (or competes). The send window must not shrink for it a second time.
void SendController::on_ack(const Report& report, const std::function<double()>& windows,
                            Nanos now) {
  breaker_.arrived(report.bytes);
  const double arrived = static_cast<double>(report.bytes) / wire_bytes_;
  const double reported = arrived * report.loss / (1.0 - std::min(report.loss, LossMeter::kMost));
  loss_.add(reported, arrived, now);
  const double loss = loss_.share(now);
  window_.loss(loss, loss > 0 ? windows() : 0);
  const bool lossy = report.loss > kHeavyLoss;
  double& longest = longest_[report.path];
  longest = std::max(static_cast<double>(report.queue), kStillLong * longest);
  // Under heavy loss packets go again before they are declared lost.
  const auto declared = static_cast<double>(std::exchange(lost_, 0));
  window_.count(lossy ? reported : std::min(declared, LossCount::kRun), arrived, longest);
  const PortDelay::Now port = departing_.add(report.path, report.queue, report.bytes, now);
  const bool alone = port.in_use == 1;
  const PathProfile& profile = profile_of(report.rtprop);
  const bool elsewhere = alone && !profile.own_queue;
  window_.sample(report.bytes, elsewhere ? std::min(port.delay, window_.target()) : port.delay,
                 report.round, report.rtprop, lossy, now,
                 alone || lossy || !profile.spreads ? 0 : report.last_sent);
}

void SendController::told(size_t path, double room) {
  if (room == told_[path]) return;
  told_[path] = room;
  least_told_ = *std::min_element(told_.begin(), told_.end());
}

bool SendController::marked(Nanos sent, Nanos now) {
  if (sent <= cut_) return false;
  cut_ = now;
  window_.marked();
  return true;
}

// The receiver's window for the only destination, on a long path. It applies in place of the send
// window, which would have to learn this sender's share of an incast. It is the smaller the more
// the queue exceeds the target, whoever fills it.
double SendController::led(const LongPaths& far) const {
  if (window_.ramps()) return 0;
  const auto target = static_cast<double>(window_.target());
  const auto queue = static_cast<double>(window_.queue_delay());
  return far.window * std::min(1.0, target / std::max(queue, 1.0));
}

// Pacing at BtlBw keeps the port's queue short: packets wait here, where the destination can still
// be chosen. While the queue is short the pace is a little higher, to find a higher rate.
void SendController::pace(const LongPaths& far, double rate, double unproven, const Turn& turn,
                          Nanos now) {
  const auto target = static_cast<double>(window_.target());
  const double loss = loss_.share(now);
  const bool heavy = loss >= kHeavyLoss;
  far_ = far.count > 0;
  led_ = far.alone() && !heavy ? led(far) : 0;
  const double stretch = window_.stretch(loss);
  const double queue = static_cast<double>(window_.queue_delay()) / (kShortQueue * target);
  double gain = (window_.pressed() ? kFullRate : 1.0) +
                kProbeGain * spare() * std::clamp(1.0 - queue, 0.0, 1.0 - kHostQueue);
  if (far_) gain = std::min(gain, 1.0 + kProbeRoom * target / static_cast<double>(far.rtprop));
  rate_ = 0;
  // In slow start the rate of a short path is not known yet: a pace would keep it from showing.
  if (pacing_ && rate > 0 && (far_ || !window_.ramps() || throttled()))
    rate_ = breaker_.factor() * window_.pace() * std::max(stretch * gain * rate, unproven);
  rate_ = std::min(rate_, breaker_.most());
  led_by_receiver_ = false;
  const double late = takes(turn) ? 0 : kPaceDepth * bears();
  if (far_ && pacing_) spread(far, std::max(led_, stretch * window_.bytes()));
  const double window = window_.bytes() / wire_bytes_;
  const double usual = window / kTrainsPerWindow;
  const double timed = rate * kTrainSeconds / wire_bytes_;
  quantum_ = train_of(std::clamp(timed, bears() * usual, 2 * usual / bears()));
  if (far_) quantum_ = std::min(quantum_, train_of(rate_ * kPaceDepth / 2 / wire_bytes_));
  if (rate_ > 0) {
    refill(tokens_, rate_, late, now);
  } else {
    tokens_.reset(now);  // bytes sent before a rate was known are no debt
  }
}

// A turn is known to fit its receiver's port, so this end's window does not bound it.
bool SendController::takes(const Turn& turn) {
  if (turn.bytes <= 0 || throttled()) return false;
  led_ = static_cast<double>(in_flight_) + turn.bytes;
  rate_ = pacing_ ? turn.rate : 0;
  return true;
}

// On a long path a window is spread over a round; as one burst it would overflow queues on the
// path.
void SendController::spread(const LongPaths& far, double window) {
  const double round = ramp() * breaker_.factor() * 1e9 / static_cast<double>(far.round);
  // A window has the wanted queue, too, so that this pace is above BtlBw, and a trial's is below.
  if (!window_.pressed() && (far.alone() || window_.ramps()))
    rate_ = std::max(rate_, window * round);
  if (!far.alone()) return;
  rate_ = std::min(rate_, far.window * round);
  led_by_receiver_ = window >= far.window;
  if (!led_by_receiver_) window_.limited();
}

double SendController::room(Nanos now) const {
  const double window = window_.stretch(loss_.share(now)) * window_.bytes();
  return breaker_.factor() * std::max(window, led_) - static_cast<double>(in_flight_);
}

Nanos SendController::wait(Nanos now) {
  paced_ = rate_ > 0;
  if (!paced_ || tokens_.tokens() > 0) return 0;
  return now + awaited(tokens_, rate_);
}

// A receiver's port has no queue for the bytes that all its senders have saved up while the credit
// of other receivers was used up, so each path's part of a window is paced over a round.
Nanos SendController::hold(TokenBucket& tokens, double window, Nanos round, Nanos now) const {
  const double rate = ramp() * breaker_.factor() * window / static_cast<double>(round) * 1e9;
  refill(tokens, rate, kPaceDepth * bears(), now);
  if (tokens.tokens() > 0) return 0;
  return awaited(tokens, rate);
}

void SendController::refill(TokenBucket& tokens, double rate, double late, Nanos now) const {
  tokens.refill(rate, std::max(kTrainsAtOnce * quantum_bytes(), rate * late), now);
}

Nanos SendController::awaited(const TokenBucket& tokens, double rate) const {
  return tokens.wait(kTrainAwaited * quantum_bytes(), rate);
}

Copies& SendController::copies(double rate, double unproven, Nanos now) {
  const double carried = std::max(window_.stretch(loss_.share(now)) * rate, unproven);
  copies_.refill(breaker_.factor() * carried / wire_bytes_, now);
  return copies_;
}

}  // namespace gradwire
