#include "proto/recovery/repetition.h"

#include <cmath>

#include "proto/recovery/rtt.h"

namespace gradwire {

namespace {
// The chance that a packet and all its twins are lost, at most.
constexpr double kAllLost = 1e-3;
// Twins of a packet at most.
constexpr double kMostTwins = 2;
// All copies of a round are lost with a chance of e^-3.
constexpr double kSafety = 3.0;
// Rounds without an ACK after which data goes again though other data waits.
constexpr double kBlockedRounds = 1.5;
}  // namespace

uint32_t Twins::of_lost(double loss) const {
  if (loss <= 0 || loss >= kHeavyLoss) return 0;
  const double times = std::ceil(std::log(kAllLost) / std::log(loss));
  return static_cast<uint32_t>(
      std::clamp(times - 1, 0.0, std::min(kMostTwins, std::max(0.0, left_))));
}

// So many copies go in a round that hardly ever all are lost. When only ACKs are lost the time is
// longer, because the packet has most likely arrived. Two copies of a packet go at least as far
// apart as hosts are late; without a queue they are closer the higher the loss.
Nanos repeat_after(PathLoss loss, Nanos round, bool queued) {
  if (!loss.heavy()) return kNever;
  const double share = -std::log(std::max(loss.to, loss.from)) / kSafety;
  const auto apart = static_cast<Nanos>(static_cast<double>(round) * share);
  if (loss.to < kHeavyLoss)
    return static_cast<Nanos>(static_cast<double>(std::max(apart, kHostDelay)) / (1.0 - loss.from));
  if (queued) return std::max(apart, kHostDelay);
  const auto close = static_cast<Nanos>(static_cast<double>(kHostDelay) * -std::log(loss.to));
  return std::max(apart, std::min(close, kHostDelay));
}

// With more to send, copies go only if that is blocked. Control frames go before data, and nothing
// else limits their rate.
Repeats::Repeats(PathLoss loss, Nanos round, bool queued, bool more, bool blocked)
    : data(repeat_after(loss, round, queued)) {
  control = std::max(data, kHostDelay);
  if (more && data != kNever)
    data = blocked ? std::max(kHostDelay, static_cast<Nanos>(kBlockedRounds * round)) : kNever;
}

}  // namespace gradwire
