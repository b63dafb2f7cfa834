// The endpoint's part of receiver credit: what it knows of each sender (proto/credit/credit.h).
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/push/push_list.h"

namespace gradwire {

namespace {
// Stashed packets of a peer from which a server gives it no more credit.
constexpr size_t kStashLimit = 64;
// Senders whose share is computed after each batch of arrivals, besides those that sent it.
constexpr size_t kCreditTurns = 8;
}  // namespace

// Computes the share of one sender anew.
void Endpoint::Impl::share_credit(Path& path, Nanos now) {
  const Rtt& rtt = path.recovery.rtt;
  // A server gives no credit for packets that it can only stash. A worker goes on: its peers limit
  // by themselves what they send early, and need credit for the results of earlier ops.
  const bool stalled = config.endpoint >= config.workers &&
                       (path.stash.no_room || path.stash.packets.size() >= kStashLimit);
  CreditPool::Sender from;
  from.rtprop = rtt.minimum();
  from.largest = path.acks.largest();
  from.stalled = stalled;
  if (receiver.window.stretches()) {
    from.round = rtt.round();
    from.loss = path.arriving.loss.share(now);
    from.rate = path.arriving.rate.bytes_per_second();
  }
  if (!receiver.credit.share(path.grant, from, receiver.window, config.wire_bytes())) return;
  path.acks.hurry();
  touch(path);
}

// Shares the receive window after arrivals, which change the share of every sender: it is computed
// for those from which packets have arrived, and for some others in turn.
void Endpoint::Impl::share_credit(Nanos now) {
  for (const uint16_t peer : scratch.arrived) share_credit(*paths[peer], now);
  const size_t turns = std::min(kCreditTurns, paths.size());
  for (size_t i = 0; i < turns; ++i) {
    receiver.turn = (receiver.turn + 1) % paths.size();
    if (paths[receiver.turn]) share_credit(*paths[receiver.turn], now);
  }
}

// The most packets that a peer can still want to send here: the undecided chunks of its pushes and
// the missing results. It is unbounded while packets of ops that have not started here wait.
uint64_t Endpoint::Impl::most_wanted(const Path& path) const {
  if (!path.stash.packets.empty()) return UINT64_MAX;
  for (const auto& [id, opens] : waiting.opens)
    if (opens.messages.contains(path.peer)) return UINT64_MAX;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) {
    if (sums_for(*op, path.peer)) total += op->aggregator->sum.undecided(path.peer);
    if (op->working() && pulls_from(*op, path.peer))
      total += op->worker->pull[config.aggregator_at(path.peer)].missing();
  }
  return total;
}

// Lowers a worker's backlog after a STOP to what it can still want to send. The worker reported the
// backlog before the STOP arrived. It would take credit from other senders until the worker's next
// packet, which may be an op away.
void Endpoint::Impl::void_backlog(const Op& op, uint16_t worker) {
  Path& path = *paths[worker];
  if (path.grant.demand == 0 || !op.aggregator->sum.stopped(worker)) return;
  // On a short path the next report comes at once, and copies that must be sent again count as
  // well. A push that ends where an eager close does leaves nothing but copies.
  if (!long_path(path.recovery.rtt.minimum()) || eager_from_start(op.spec.plan)) return;
  receiver.credit.ask(path.grant, std::min<uint64_t>(path.grant.demand, most_wanted(path)));
}

}  // namespace gradwire
