// Receiver credit: incast is the receiver's to schedule. What all senders together may have on the
// way here stays within the receive window; each knows its share as the highest packet number that
// it may send, so that lost packets give their credit back when a later one arrives.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
constexpr uint32_t kWireOverhead = 42;  // Ethernet, IP, UDP
constexpr uint32_t kMostShare = 65'535;
// Packets of ops that a server has no memory for yet: no more credit from there on.
constexpr size_t kStashLimit = 64;
constexpr size_t kLongStashLimit = 1024;
}  // namespace

// What each peer of `receiver` may always send there without having been asked. All of them
// together: about half of the first window.
uint32_t Endpoint::Impl::standing_credit(uint16_t receiver) const {
  EndpointConfig there = config;
  there.endpoint = receiver;
  uint32_t peers = 0;
  for (uint16_t e = 0; e < config.endpoints(); ++e) peers += e != receiver && there.talks_to(e);
  peers = std::max<uint32_t>(1, peers);
  return std::clamp<uint32_t>(24 / peers, 1, 12);
}

void Endpoint::Impl::share_credit(Nanos now) {
  const uint32_t wire_bytes = config.datagram_bytes + kWireOverhead;
  const auto window = static_cast<uint32_t>(receive_window.bytes() / wire_bytes);
  const uint32_t standing = standing_credit(config.endpoint);
  uint32_t idle = 0;
  uint32_t peers = 0;
  for (auto& p : paths)
    if (p) ++peers, idle += p->demand == 0;
  const uint32_t pool = window - std::min(window / 2, idle * standing);
  // In proportion to what each still has to send, squared: whoever lags catches up, and all end
  // together. An even share would favour those whose acknowledgements come back soonest.
  double weights = 0;
  for (auto& p : paths)
    if (p) weights += static_cast<double>(p->demand) * p->demand;
  for (auto& p : paths) {
    if (!p) continue;
    const uint32_t wanted = p->demand;
    const double part = wanted ? static_cast<double>(wanted) * wanted / weights : 0.0;
    uint32_t unasked = standing;
    p->part = std::max(standing, static_cast<uint32_t>(part * pool));
    if (long_path(p->rtt.minimum())) {
      // Not to wait a round for word: half of the window may come unasked, from all together.
      unasked = std::max(standing, window / peers / 2);
      // The pace is that of the port, also while the window is smaller than what the path holds.
      const double known = receive_window.rate() * 1e-9 / wire_bytes *
                           static_cast<double>(p->rtt.minimum() + receive_window.target());
      p->part = std::max(unasked, static_cast<uint32_t>((wanted ? part : 1.0 / peers) *
                                                        std::max<double>(pool, known)));
    }
    p->share = std::max(unasked, std::min(wanted, static_cast<uint32_t>(part * pool)));
    // What gets lost on the way does not fill the port.
    // But a peer's port hardly carries more than this one, unless it has shown that it does.
    const double stretch = receive_window.stretch(p->loss_from.share(now));
    if (stretch > 1) {
      const double shown = p->sent_meter.bytes_per_second() * 1e-9 / wire_bytes *
                           static_cast<double>(p->rtt.round() + receive_window.target());
      const double most = receive_window.ramps()
                              ? kMostShare
                              : std::max<double>({shown, 1.0 * window, 1.0 * p->part});
      p->share = static_cast<uint32_t>(std::min(p->share * stretch, most));
      p->part = static_cast<uint32_t>(std::min(p->part * stretch, most));
    }
    // What a worker has not started, its peers hold back by themselves. Without credit they would
    // hold back results of the ops before, too.
    if (config.endpoint >= config.workers &&
        (p->no_room ||
         p->stash.size() >= (long_path(p->rtt.minimum()) ? kLongStashLimit : kStashLimit)))
      continue;
    p->granted = std::max(p->granted, p->received.largest() + p->share);
    // A peer that waits is told at once; one that is served hears with its next ACK.
    const uint64_t untold = p->granted - p->granted_sent;
    if (wanted && p->granted_sent <= p->received.largest() + p->share / 2 && untold >= 2)
      p->ack_now = true;
  }
}

// Packets that a peer can still want to send to here: what is undecided of its pushes, and missing
// of its results. Of ops that have not started here nobody knows.
uint64_t Endpoint::Impl::most_wanted(const Path& path) const {
  if (!path.stash.empty()) return UINT64_MAX;
  for (const auto& [id, opens] : waiting_opens)
    if (opens.messages.contains(path.peer)) return UINT64_MAX;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) {
    if (op->aggregator && path.peer < config.workers) total += op->aggregator->undecided(path.peer);
    if (!op->worker || op->done || !op->pulls) continue;
    for (uint16_t a = 0; a < config.aggregators(); ++a)
      if (config.aggregator_endpoint(a) == path.peer) total += op->pull[a].missing();
  }
  return total;
}

// What a worker said of its backlog before it heard of a STOP is void, and would take credit from
// those who need it until its next packet, which may be an op away. A push that ends where an eager
// close does leaves none but copies.
void Endpoint::Impl::void_backlog(const Op& op, uint16_t worker) {
  Path& path = *paths[worker];
  if (path.demand == 0 || !op.aggregator->stopped(worker)) return;
  // On a short path its next word comes at once, and what it must send again is no less than this.
  if (!long_path(path.rtt.minimum()) || eager_from_start(op.spec.plan)) return;
  path.demand = static_cast<uint16_t>(std::min<uint64_t>(path.demand, most_wanted(path)));
}

}  // namespace gradwire
