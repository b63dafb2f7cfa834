// What acknowledged and lost packets mean for the ops and windows concerned.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

void Endpoint::Impl::packet_acked(Path& path, const SentPacket& packet, Nanos now) {
  if (!packet.data()) {
    if (!path.control.live(packet.item)) return;
    Op* op = find(packet.op);
    path.control.release(packet.item);
    if (op) --op->control_open;
    return;
  }
  Op* op = find(packet.op);
  if (!op) return;
  if (packet.kind == wire::Kind::push) {
    if (op->done) return;
    PushSender& push = op->push[op->grid.aggregator_of(packet.item)];
    push.acked(packet.item);
    const auto forgiven = push.take_forgiven();
    if (!forgiven.empty()) send_list(path.peer, *op, wire::Kind::forgive, forgiven);
  } else {
    op->back[path.peer].acked(packet.item);
    last_result_taken = now;
    if (op->committed) try_commit(*op, now);
  }
}

void Endpoint::Impl::packet_lost(Path& path, const SentPacket& packet, Again why, Nanos now) {
  const bool forgivable = why == Again::lost;
  in_flight_bytes -= packet.bytes;
  if (forgivable) {
    ++counters.declared_lost;
    breaker.lost();
    send_window.lost();
  }
  if (!packet.data()) {
    path.control.again(packet.item);
    return;
  }
  Op* op = find(packet.op);
  if (!op) return;
  if (packet.kind == wire::Kind::push) {
    if (op->done) return;
    PushSender& push = op->push[op->grid.aggregator_of(packet.item)];
    push.lost(packet.item, why);
    const auto forgiven = push.take_forgiven();
    if (!forgiven.empty()) send_list(path.peer, *op, wire::Kind::forgive, forgiven);
  } else if (!(forgivable && op->committed && op->back[path.peer].in_flight(packet.item) &&
               withhold(*op, packet.item))) {
    op->back[path.peer].lost(packet.item);
  } else {
    try_commit(*op, now);
  }
}

void Endpoint::Impl::packets_lost(Path& path, Nanos now) {
  for (const Recovery::Lost& each : lost) packet_lost(path, each.packet, each.why, now);
  lost.clear();
}

void Endpoint::Impl::on_ack(Path& path, const wire::Ack& ack, Nanos now) {
  acked.clear();
  if (!path.recovery.on_ack(ack, now, acked)) {
    ++counters.malformed;
    return;
  }
  const uint64_t granted = wire::expand(ack.credit, path.recovery.next());
  if (granted > path.allowed.credit && granted < path.recovery.next() + SentPackets::kMost) {
    path.allowed.credit = granted;
    path.recovery.feed();
  }
  if (ack.share) path.allowed.window = ack.share;
  path.loss_to.reported = ack.loss / 65'536.0;
  path.loss_to.time = now;
  in_flight_bytes -= acked.in_flight;
  counters.spurious_retransmissions += acked.spurious;
  for (const SentPacket& packet : acked.packets) {
    path.ecn.sent.acked(packet.ect);
    if (packet.state != SentPacket::State::lost) path.limit.acked(packet.bytes);
    packet_acked(path, packet, now);
  }
  on_counts(path, ack, now);
  if (acked.bytes) {
    path.recovery.detect_losses(lost);
    packets_lost(path, now);
    departing.add(path.peer, Nanos{ack.queue_us} * kMicrosecond, acked.bytes, now);
    const double arrived = static_cast<double>(acked.bytes) / (config.wire_bytes());
    loss_to.add(
        arrived * path.loss_to.reported / (1.0 - std::min(path.loss_to.reported, LossMeter::kMost)),
        arrived, now);
    double told = 0;
    const double share = loss_to.share(now);
    for (const auto& p : paths)
      if (share > 0 && p && p->loss_to.recent(now)) told += p->allowed.window;
    send_window.loss(share, told);
    Nanos delay = departing.shared(now);
    // With one destination the queue may be at either end, and the receiver's credit already keeps
    // it short (or competes). The send window must not shrink for it a second time.
    const bool alone = departing.in_use(now) == 1;
    if (alone && !long_path(path.recovery.rtt.minimum()))
      delay = std::min(delay, config.delay_target);
    send_window.sample(acked.bytes, delay, path.recovery.rtt.round(), path.recovery.rtt.minimum(),
                       path.loss_to.reported > kHeavyLoss, now,
                       alone ? 0 : path.recovery.largest_acked_sent());
    counters.btlbw = btlbw();
    counters.send_window = send_window.bytes();
    retire(now);
  }
}

void Endpoint::Impl::check_probe(Path& path, Nanos now) {
  const bool throttled = breaker.factor() < 1;
  // Chunks that wait matter only where a packet does not recover by itself.
  const bool more = path.recovery.waiting() && backlog(path) > 0;
  if (!path.recovery.on_timeout(path.life.last_heard, more, throttled, now, lost)) return;
  ++counters.probes;
  if (path.life.connected) path.ecn.sent.timed_out(path.recovery.timeouts());
  packets_lost(path, now);
}

}  // namespace gradwire
