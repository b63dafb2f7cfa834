// Receiver credit lets the receiver schedule incast. All its senders together may have at most the
// receive window on the way. Each sender receives its share as the highest packet number that it
// may send, so that lost packets return their credit when a later one arrives.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
constexpr uint32_t kWireOverhead = 42;  // bytes: Ethernet, IP, UDP
// Stashed packets of a peer from which a server gives it no more credit.
constexpr size_t kStashLimit = 64;
}  // namespace

// The packets that each peer of `receiver` may always send to it without having reported a backlog.
// All peers together have about the first receive window at most.
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
  // Shares follow the square of what each peer still has to send: a peer that lags catches up, and
  // all end together. Even shares would favour peers whose ACKs return soonest.
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
      // On a long path half of the window is granted unasked, to all peers together: to ask takes a
      // round.
      unasked = std::max(standing, window / peers / 2);
      // The sender paces by `part`, so it is the port's rate even while the window is smaller than
      // what the path holds.
      const double known = receive_window.rate() * 1e-9 / wire_bytes *
                           static_cast<double>(p->rtt.minimum() + receive_window.target());
      p->part = std::max(unasked, static_cast<uint32_t>((wanted ? part : 1.0 / peers) *
                                                        std::max<double>(pool, known)));
    }
    p->share = std::max(unasked, std::min(wanted, static_cast<uint32_t>(part * pool)));
    // Packets lost on the path do not fill this port, so shares stretch by the loss. They stretch
    // to what this port carries, or to a higher rate if the peer has shown one.
    const double stretch = receive_window.stretch(p->loss_from.share(now));
    if (stretch > 1) {
      const double shown = p->sent_meter.bytes_per_second() * 1e-9 / wire_bytes *
                           static_cast<double>(p->rtt.round() + receive_window.target());
      const double most = receive_window.ramps()
                              ? UINT16_MAX
                              : std::max<double>({shown, 1.0 * window, 1.0 * p->part});
      p->share = static_cast<uint32_t>(std::min(p->share * stretch, most));
      p->part = static_cast<uint32_t>(std::min(p->part * stretch, most));
    }
    // A server gives no credit for packets that it can only stash. A worker goes on: its peers
    // limit by themselves what they send early, and need credit for the results of earlier ops.
    if (config.endpoint >= config.workers && (p->no_room || p->stash.size() >= kStashLimit))
      continue;
    p->granted = std::max(p->granted, p->received.largest() + p->share);
    // A peer that may run out of credit gets an ACK at once, others have it with their next ACK.
    const uint64_t untold = p->granted - p->granted_sent;
    if (wanted && p->granted_sent <= p->received.largest() + p->share / 2 && untold >= 2)
      p->ack_now = true;
  }
}

// The most packets that a peer can still want to send here: the undecided chunks of its pushes and
// the missing results. It is unbounded while packets of ops that have not started here wait.
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

// Lowers a worker's backlog after a STOP to what it can still want to send. The worker reported the
// backlog before the STOP arrived. It would take credit from other senders until the worker's next
// packet, which may be an op away.
void Endpoint::Impl::void_backlog(const Op& op, uint16_t worker) {
  Path& path = *paths[worker];
  if (path.demand == 0 || !op.aggregator->stopped(worker)) return;
  // On a short path the next report comes at once, and copies that must be sent again count as
  // well. A push that ends where an eager close does leaves nothing but copies.
  if (!long_path(path.rtt.minimum()) || eager_from_start(op.spec.plan)) return;
  path.demand = static_cast<uint16_t>(std::min<uint64_t>(path.demand, most_wanted(path)));
}

}  // namespace gradwire
