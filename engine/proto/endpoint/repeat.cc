// Packets that go again under heavy loss, before an ACK can arrive (proto/recovery/repetition.h).
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

// The rate in bytes/s to use while only heavy loss has shown one, else 0.
double Endpoint::Impl::unproven_rate(Nanos now) const {
  if (sender.window().rate_proven() || receiver.window().rate_proven()) return 0;
  FirstRound first;
  for (const auto& p : paths)
    if (p && !p->farewell.gone)
      first.add(p->recovery.in_flight() > 0 ? p->recovery.rtt.smoothed() : 0,
                p->loss_to.recent(now) ? p->allowed.window : 0);
  return first.rate(sender.window().bytes());
}

// Sends packets in flight again on paths with heavy loss. It does so when nothing else can be sent.
void Endpoint::Impl::repeat(Nanos now) {
  due.repeat = kNever;
  Copies& copies = sender.copies(btlbw(), due.lossy_paths ? unproven_rate(now) : 0, now);
  if (due.lossy_paths == 0) return;
  const bool full = sender.room(now) <= 0;
  for (auto& p : paths) {
    if (!p || !p->settled.is_lossy || p->farewell.gone || p->recovery.in_flight() == 0) continue;
    const bool blocked = full || p->allowed.left(p->recovery.next()) == 0;
    const Repeats after(p->loss(now), p->recovery.rtt.smoothed(), sender.queued(), backlog(*p) > 0,
                        blocked);
    due.repeat = std::min(due.repeat, p->recovery.repeat(after, copies, now, scratch.lost));
    packets_lost(*p, now);
  }
  if (copies.lacking()) sender.limited();
}

}  // namespace gradwire
