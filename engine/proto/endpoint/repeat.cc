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

// The bytes that the window still admits; negative when more is in flight.
double Endpoint::Impl::room(Nanos now) const {
  const double window = send_window.stretch(loss_to.share(now)) * send_window.bytes();
  return breaker.factor() * std::max(window, led) - static_cast<double>(in_flight_bytes);
}

// The time after which a packet in flight is sent again without an ACK. Under heavy loss so many
// copies go in a round that hardly ever all are lost. When only ACKs are lost it is longer, because
// the packet has most likely arrived.
Nanos Endpoint::Impl::repeat_after(const Path& path, Nanos now) const {
  const double to = path.loss_to(now);
  const double from = path.loss_from.share(now);
  const double loss = std::max(to, from);
  if (loss < kHeavyLoss) return kNever;
  const double share = -std::log(loss) / kRepeatSafety;
  const auto apart = static_cast<Nanos>(static_cast<double>(path.rtt.smoothed()) * share);
  if (to < kHeavyLoss)
    return static_cast<Nanos>(static_cast<double>(std::max(apart, kApart)) / (1.0 - from));
  if (4 * send_window.queue_delay() > 3 * send_window.target()) return std::max(apart, kApart);
  const auto close = static_cast<Nanos>(static_cast<double>(kApart) * -std::log(to));
  return std::max(apart, std::min(close, kApart));
}

// The rate in bytes/s to use while only heavy loss has shown one: a window per round, as in any
// first round. With less, the path's rate would never show.
double Endpoint::Impl::unproven_rate(Nanos now) const {
  if (send_window.rate_proven() || receive_window.rate_proven()) return 0;
  Nanos round = kShortestRound;
  double told = 0;
  for (const auto& p : paths) {
    if (!p || p->gone) continue;
    if (p->sent.in_flight() > 0) round = std::max(round, p->rtt.smoothed());
    if (now - p->loss_told_time < LossMeter::kMemory) told += p->window;
  }
  const double window = send_window.bytes();
  return (told > 0 ? std::min(window, told) : window) * 1e9 / static_cast<double>(round);
}

// The packets/s that may be sent again early.
double Endpoint::Impl::repeat_rate(Nanos now) const {
  const double rate =
      std::max(send_window.stretch(loss_to.share(now)) * btlbw(), unproven_rate(now));
  return breaker.factor() * rate / (config.datagram_bytes + 42.0);
}

// Sends packets in flight again, the oldest first, on paths with heavy loss. It does so when
// nothing else can be sent, at the rate that the path is known to carry.
void Endpoint::Impl::repeat(Nanos now) {
  const double rate = repeat_rate(now);
  repeats =
      std::min(kRepeatsAtOnce, repeats + rate * static_cast<double>(now - repeats_time) * 1e-9);
  const bool blocked = room(now) <= 0;
  repeats_time = now;
  repeat_due = kNever;
  double left = repeats;
  for (auto& p : paths) {
    if (!p || p->gone || p->sent.in_flight() == 0) continue;
    Nanos after = repeat_after(*p, now);
    // The peer had no room for packets, and would have none for copies.
    const bool refused = now - p->refused_time < p->rtt.probe_timeout();
    if (after == kNever || refused) {
      p->control_sent.clear();
      continue;
    }
    std::erase_if(p->control_sent, [&](uint64_t n) {
      SentPacket* packet = p->sent.find(n);
      if (!packet || packet->state != SentPacket::State::flight) return true;
      // Control frames go before data; nothing else limits their rate.
      const Nanos due = packet->time + std::max(after, kApart);
      if (due > now) {
        repeat_due = std::min(repeat_due, due);
        return false;
      }
      packet_lost(*p, *packet, Again::repeat, now);
      return true;
    });
    // With more to send, copies go only if that is blocked, and after a round without an ACK.
    if (backlog(*p) > 0) {
      if (!blocked && p->credit >= p->sent.next()) continue;
      after = std::max(kApart, p->rtt.smoothed() * 3 / 2);
    }
    for (uint64_t n = p->sent.lowest(); n < p->sent.next(); ++n) {
      SentPacket* packet = p->sent.find(n);
      if (!packet || packet->state != SentPacket::State::flight) continue;
      if (!recovered(*packet)) continue;  // goes in passes
      const Nanos allowed = now + static_cast<Nanos>((1 - left) / rate * 1e9) + 1;
      if (left < 1) send_window.limited();
      const Nanos due = std::max(packet->time + after, left < 1 ? allowed : 0);
      if (due > now) {
        repeat_due = std::min(repeat_due, due);
        break;
      }
      packet_lost(*p, *packet, Again::repeat, now);
      left -= 1;
      ++p->probes;
    }
  }
}

}  // namespace gradwire
