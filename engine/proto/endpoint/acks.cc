// What acknowledged and lost packets mean for the ops and windows concerned.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

// The op of a packet with a chunk; null when that has ended, or needs no more of its push.
Op* Endpoint::Impl::op_of(const SentPacket& packet) {
  Op* op = find(packet.op);
  return op && packet.kind == wire::Kind::push && op->done() ? nullptr : op;
}

void Endpoint::Impl::control_acked(Path& path, std::span<const SentPacket> packets) {
  for (const SentPacket& packet : packets) {
    if (!path.control.live(packet.item)) continue;
    path.control.release(packet.item);
    Op* op = find(packet.op);
    if (op && --op->control_open == 0) op_changed(*op);
  }
}

// Takes acknowledged chunks of one op and kind.
void Endpoint::Impl::chunks_acked(Path& path, std::span<const SentPacket> packets, Nanos now) {
  Op* op = op_of(packets.front());
  if (!op) return;
  count_later(*op, path);
  ChunkSender& chunks = sender_of(*op, path, packets.front().kind);
  const bool push = packets.front().kind == wire::Kind::push;
  const bool gives_up = push && op->spec.plan.spend == Spend::lost;
  for (const SentPacket& packet : packets) {
    chunks.acked(packet.item);
    if (gives_up) give_up(*op, path, chunks);
  }
  if (push) return;
  leaving.result_taken = now;
  may_be_drained(*op);
  if (op->commits()) try_commit(*op, now);
}

// Reports the chunks that a push has given up.
void Endpoint::Impl::give_up(Op& op, const Path& path, ChunkSender& push) {
  const auto forgiven = push.take_forgiven();
  if (!forgiven.empty()) send_list(path.peer, op, wire::Kind::forgive, forgiven);
}

void Endpoint::Impl::packet_lost(Path& path, const SentPacket& packet, Again why, Nanos now) {
  const bool forgivable = why == Again::lost;
  sender.on_left(packet.bytes);
  if (forgivable) {
    ++counters.declared_lost;
    ++path.counted.declared_lost;
    sender.on_lost();
  }
  if (packet.twin) return;
  if (!packet.data()) {
    path.control.again(packet.item);
    return;
  }
  Op* op = op_of(packet);
  if (!op) return;
  const bool push = packet.kind == wire::Kind::push;
  ChunkSender& chunks = sender_of(*op, path, packet.kind);
  if (!push && forgivable && op->commits() && chunks.in_flight(packet.item) &&
      withhold(*op, packet.item))
    return try_commit(*op, now);
  chunks.lost(packet.item, why);
  recount(*op, path);
  if (push) give_up(*op, path, chunks);
}

void Endpoint::Impl::packets_lost(Path& path, Nanos now) {
  int64_t run = 0;
  uint64_t next = 0;
  for (const Recovery::Lost& each : scratch.lost) {
    const uint64_t number = each.packet.number;
    run = each.why != Again::lost ? 0 : number == next ? run + 1 : 1;
    next = number + 1;
    if (Op* op = find(each.packet.op)) op->waits.burst.note(path.peer, run);
    packet_lost(path, each.packet, each.why, now);
  }
  scratch.lost.clear();
  touch(path);
}

// Takes how many packets came with which codepoint, as the peer counts.
void Endpoint::Impl::on_counts(Path& path, const wire::Ack& ack, Nanos now) {
  const bool marks = path.ecn.sent.told(ack.ect0, ack.ce);
  if (config.ecn && path.ecn.sent.failed() && !path.ecn.failure_counted) {
    path.ecn.failure_counted = true;
    ++counters.ecn_failed;
  }
  if (marks && sender.marked(path.recovery.largest_acked_sent(), now)) ++counters.mark_cuts;
}

// Takes what an ACK has acknowledged for the first time.
void Endpoint::Impl::packets_acked(Path& path, Nanos now) {
  uint16_t longest = 0;
  std::span<const SentPacket> left = scratch.acked.packets;
  while (!left.empty()) {
    const SentPacket& first = left.front();
    size_t run = 0;
    for (; run < left.size() && left[run].op == first.op && left[run].kind == first.kind; ++run) {
      path.ecn.sent.acked(left[run].ect);
      if (left[run].state != SentPacket::State::lost) longest = std::max(longest, left[run].bytes);
    }
    first.data() ? chunks_acked(path, left.first(run), now) : control_acked(path, left.first(run));
    left = left.subspan(run);
  }
  if (longest) path.limit.acked(longest);
}

// False when the ACK is malformed.
bool Endpoint::Impl::on_ack(Path& path, const wire::Ack& ack, Nanos now) {
  scratch.acked.clear();
  touch(path);
  if (!path.recovery.on_ack(ack, now, scratch.acked)) return false;
  const uint64_t granted = wire::expand(ack.credit, path.recovery.next());
  if (granted > path.allowed.credit && granted < path.recovery.next() + SentPackets::kMost) {
    path.allowed.credit = granted;
    path.recovery.feed();
  }
  if (path.recovery.latest()) {
    if (ack.share) path.allowed.window = ack.share;
    path.loss_to = {ack.loss / 65'536.0, Nanos{ack.queue_us} * kMicrosecond, now};
    if (!short_queue(path.loss_to.queue, sender.window().target())) path.twins.queued(now);
  }
  sender.on_left(scratch.acked.in_flight);
  counters.spurious_retransmissions += scratch.acked.spurious;
  path.twins.arrived(scratch.acked.packets.size());
  packets_acked(path, now);
  on_counts(path, ack, now);
  if (scratch.acked.bytes == 0) return true;
  path.recovery.detect_losses(now, scratch.lost);
  packets_lost(path, now);
  const Rtt& rtt = path.recovery.rtt;
  const auto windows = [&] {
    double total = 0;
    for (const auto& p : paths)
      if (p && p->loss_to.recent(now)) total += p->allowed.window;
    return total;
  };
  sender.on_ack(
      {path.peer, scratch.acked.bytes, path.loss_to.reported, Nanos{ack.queue_us} * kMicrosecond,
       rtt.round(), rtt.minimum(), path.recovery.largest_acked_sent()},
      windows, now);
  counters.now.btlbw = btlbw();
  counters.now.send_window = sender.window().bytes();
  retire(now);
  return true;
}

void Endpoint::Impl::check_probe(Path& path, Nanos now) {
  if (path.recovery.loss_due() <= now) {
    path.recovery.detect_losses(now, scratch.lost);
    packets_lost(path, now);
  }
  // Chunks that wait matter only where a packet does not recover by itself.
  const bool more = path.recovery.waiting() && backlog(path) > 0;
  if (!path.recovery.on_timeout(path.life.last_heard, more, sender.throttled(), now, scratch.lost))
    return;
  ++counters.probes;
  if (path.life.connected) path.ecn.sent.timed_out(path.recovery.timeouts());
  packets_lost(path, now);
}

}  // namespace gradwire
