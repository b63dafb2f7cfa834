// Early repetition: under heavy loss, packets in flight go again before an ACK can arrive, because
// on a long path ACKs come late and mostly not at all.
#include <algorithm>
#include <cmath>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// The least time between two copies of a packet. Without a queue it is shorter the higher the loss.
constexpr Nanos kApart = 500 * kMicrosecond;
// Copies of a round are all lost with a chance of e^-3.
constexpr double kRepeatSafety = 3.0;
// The round assumed where no rate is known.
constexpr Nanos kShortestRound = 1 * kMillisecond;
}  // namespace

// The time after which a packet in flight is sent again without an ACK. Under heavy loss so many
// copies go in a round that hardly ever all are lost. When only ACKs are lost it is longer, because
// the packet has most likely arrived.
Nanos Endpoint::Impl::repeat_after(const Path& path, Nanos now) const {
  const double to = path.loss_to.share(now);
  const double from = path.arriving.loss.share(now);
  const double loss = std::max(to, from);
  if (loss < kHeavyLoss) return kNever;
  const double share = -std::log(loss) / kRepeatSafety;
  const auto apart = static_cast<Nanos>(static_cast<double>(path.recovery.rtt.smoothed()) * share);
  if (to < kHeavyLoss)
    return static_cast<Nanos>(static_cast<double>(std::max(apart, kApart)) / (1.0 - from));
  if (4 * sender.window().queue_delay() > 3 * sender.window().target())
    return std::max(apart, kApart);
  const auto close = static_cast<Nanos>(static_cast<double>(kApart) * -std::log(to));
  return std::max(apart, std::min(close, kApart));
}

// The rate in bytes/s to use while only heavy loss has shown one, else 0.
double Endpoint::Impl::unproven_rate(Nanos now) const {
  if (sender.window().rate_proven() || receiver.window.rate_proven()) return 0;
  Nanos round = kShortestRound;
  double total = 0;
  for (const auto& p : paths) {
    if (!p || p->farewell.gone) continue;
    if (p->recovery.in_flight() > 0) round = std::max(round, p->recovery.rtt.smoothed());
    if (p->loss_to.recent(now)) total += p->allowed.window;
  }
  return sender.unproven_rate(total, round);
}

// Sends packets in flight again, the oldest first, on paths with heavy loss. It does so when
// nothing else can be sent, at the rate that the path is known to carry.
void Endpoint::Impl::repeat(Nanos now) {
  due.repeat = kNever;
  const double rate = sender.copy_rate(btlbw(), due.lossy_paths ? unproven_rate(now) : 0, now);
  double left = sender.copies(rate, now);
  if (due.lossy_paths == 0) return;
  const bool blocked = sender.room(now) <= 0;
  for (auto& p : paths) {
    if (!p || !p->is_lossy || p->farewell.gone || p->recovery.in_flight() == 0) continue;
    Nanos after = repeat_after(*p, now);
    // The peer had no room for packets, and would have none for copies.
    if (after == kNever || p->recovery.refused(now)) {
      touch(*p);
      p->recovery.forget_control();
      continue;
    }
    // Control frames go before data; nothing else limits their rate.
    due.repeat = std::min(due.repeat,
                          p->recovery.repeat_control(std::max(after, kApart), now, scratch.lost));
    packets_lost(*p, now);
    // With more to send, copies go only if that is blocked, and after one and a half
    // rounds without an ACK.
    if (backlog(*p) > 0) {
      if (!blocked && p->allowed.credit >= p->recovery.next()) continue;
      after = std::max(kApart, p->recovery.rtt.smoothed() * 3 / 2);
    }
    bool short_of = false;
    due.repeat = std::min(due.repeat,
                          p->recovery.repeat_data(after, left, rate, short_of, now, scratch.lost));
    if (short_of) sender.limited();
    packets_lost(*p, now);
  }
}

}  // namespace gradwire
