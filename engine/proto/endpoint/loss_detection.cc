// Loss detection: ACKs, the packet and time thresholds (RFC 9002 §6.1), and probe time-outs (§6.2).
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// Probe time-outs in a row before the backoff grows.
constexpr uint32_t kQuickProbes = 40;
// Packets that one probe time-out may send again; a round's first window.
constexpr uint32_t kMostProbes = 24;
// Doublings of the time-out at most.
constexpr uint32_t kSlowestBackoff = 8;
// The largest packet threshold; reordering beyond it counts as loss.
constexpr uint64_t kMostPacketThreshold = 512;
}  // namespace

void Endpoint::Impl::packet_acked(Path& path, const SentPacket& packet, Nanos now) {
  if (packet.kind != wire::Kind::push && packet.kind != wire::Kind::pull) {
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

void Endpoint::Impl::packet_lost(Path& path, SentPacket& packet, Again why, Nanos now) {
  const bool forgivable = why == Again::lost;
  in_flight_bytes -= packet.bytes;
  path.sent.settle(packet, forgivable ? SentPacket::State::lost : SentPacket::State::probed);
  path.lost_floor = std::min(path.lost_floor, packet.number);
  if (forgivable) {
    ++counters.declared_lost;
    breaker.lost();
    send_window.lost();
  }
  if (packet.kind != wire::Kind::push && packet.kind != wire::Kind::pull) {
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

// Declares packets lost by the packet threshold, or by the time threshold: sent long enough before
// the largest acknowledged one (RFC 9002 §6.1).
void Endpoint::Impl::detect_loss(Path& path, Nanos now) {
  const Nanos window = std::max<Nanos>(path.rtt.minimum() / 4, 500 * kMicrosecond);
  for (uint64_t n = path.sent.lowest(); n < path.largest_acked; ++n) {
    SentPacket* packet = path.sent.find(n);
    if (!packet || packet->state != SentPacket::State::flight) continue;
    if (n + path.packet_threshold > path.largest_acked &&
        (packet->time + window > path.largest_acked_sent || path.packet_threshold > 3))
      break;
    // An ACK reports only the highest refused number, so packets below it count as refused, not as
    // lost.
    packet_lost(path, *packet, n <= path.refused_there ? Again::refused : Again::lost, now);
  }
}

void Endpoint::Impl::on_ack(Path& path, const wire::Ack& ack, Nanos now) {
  const uint64_t largest = wire::expand(ack.largest, path.sent.next() - 1);
  if (largest >= path.sent.next()) {
    ++counters.malformed;
    return;
  }
  const uint64_t refused = wire::expand(ack.refused, largest);
  if (refused > path.refused_there && refused < path.sent.next()) {
    path.refused_there = refused;
    path.refused_time = now;
  }
  const uint64_t credit = wire::expand(ack.credit, path.sent.next());
  if (credit > path.credit && credit < path.sent.next() + SentPackets::kMost) {
    path.credit = credit;
    path.starved = false;
  }
  if (ack.share) path.window = ack.share;
  path.loss_told = ack.loss / 65'536.0;
  path.loss_told_time = now;
  const uint64_t floor = std::min(path.sent.lowest(), path.lost_floor);
  uint64_t acked_bytes = 0;
  for (uint16_t w = 0; w < ack.words; ++w) {
    uint64_t bits = ack.bitmap[w];
    while (bits) {
      const auto i = static_cast<uint64_t>(__builtin_ctzll(bits));
      bits &= bits - 1;
      const uint64_t back = uint64_t{w} * 64 + i;
      if (back >= largest || largest - back < floor) break;
      SentPacket* packet = path.sent.find(largest - back);
      if (!packet || packet->state == SentPacket::State::acked) continue;
      const bool probed = packet->state == SentPacket::State::probed;
      path.ecn.acked(packet->ect);
      if (probed) ++counters.spurious_retransmissions;
      if (packet->state == SentPacket::State::lost) {
        ++counters.spurious_retransmissions;
        // The packet was only late, so later packets need a larger gap to be lost (RFC 8985 §6.2).
        path.packet_threshold =
            std::min(std::max(path.packet_threshold, path.largest_acked - packet->number) + 2,
                     kMostPacketThreshold);
        packet->state = SentPacket::State::acked;
        packet_acked(path, *packet, now);
        continue;
      }
      if (packet->number > path.largest_acked) {
        path.largest_acked = packet->number;
        path.largest_acked_sent = packet->time;
        if (back == 0) path.rtt.sample(now - packet->time, Nanos{ack.delay_us} * kMicrosecond, now);
      }
      acked_bytes += packet->bytes + 42;
      path.limit.acked(packet->bytes);
      if (!probed) in_flight_bytes -= packet->bytes;
      path.sent.settle(*packet, SentPacket::State::acked);
      packet_acked(path, *packet, now);
    }
  }
  on_counts(path, ack, now);
  if (acked_bytes) {
    path.probe_count = 0;
    path.probes = 0;
    path.probe_base = now;
    detect_loss(path, now);
    if (path.lost_floor + path.sent.history() < path.sent.lowest())
      path.lost_floor = path.sent.lowest() - path.sent.history();
    path.delay_to.add(Nanos{ack.queue_us} * kMicrosecond,
                      acked_bytes * in_use(&Path::delay_to, now), now);
    const double arrived = static_cast<double>(acked_bytes) / (config.datagram_bytes + 42.0);
    loss_to.add(arrived * path.loss_told / (1.0 - std::min(path.loss_told, LossMeter::kMost)),
                arrived, now);
    double told = 0;
    for (const auto& p : paths)
      if (p && now - p->loss_told_time < LossMeter::kMemory) told += p->window;
    send_window.loss(loss_to.share(now), told);
    Nanos delay = shared_delay(&Path::delay_to, now);
    // With one destination the queue may be at either end, and the receiver's credit already keeps
    // it short (or competes). The send window must not shrink for it a second time.
    const bool alone = in_use(&Path::delay_to, now) == 1;
    if (alone && !long_path(path.rtt.minimum())) delay = std::min(delay, config.delay_target);
    send_window.sample(acked_bytes, delay, path.rtt.round(), path.rtt.minimum(),
                       path.loss_told > kHeavyLoss, now, alone ? 0 : path.largest_acked_sent);
    counters.btlbw = btlbw();
    counters.send_window = send_window.bytes();
    retire(now);
  }
}

// The time of a path's next probe time-out. The backoff stays small while packets of the peer
// arrive: then it is neither dead nor cut off, and its path loses packets.
Nanos Endpoint::Impl::probe_time(const Path& path, Nanos now) const {
  const bool quick = path.probe_count < kQuickProbes || now - path.last_heard < kHeardOf;
  const uint32_t doublings = quick ? std::min(path.probe_count, 1U)
                                   : std::min(path.probe_count - kQuickProbes + 1, kSlowestBackoff);
  return path.probe_base + (path.rtt.probe_timeout() << doublings);
}

// Handles a probe time-out (RFC 9002 §6.2, RFC 8985 §7): the oldest packets go again, or new ones
// beyond the credit, since the ACK that extends it may be lost.
void Endpoint::Impl::check_probe(Path& path, Nanos now) {
  const bool waiting = path.sent.in_flight() > 0 || path.starved;
  if (!waiting) {
    path.probe_count = 0;
    return;
  }
  if (now < probe_time(path, now)) return;
  ++path.probe_count;
  ++counters.probes;
  const Nanos answer_due = path.probe_base + path.rtt.round();
  path.probe_base = now;
  if (path.connected) path.ecn.timed_out(path.probe_count);
  // On a long path a time-out sends a round's first window. It does so on a short path too
  // when packets of the peer arrive but no ACKs: then the path most likely loses,
  // or the peer is late. When the peer has no room nothing was lost, so little is sent.
  const bool full = path.refused_there >= path.sent.lowest();
  const bool talks = path.probe_count > 1 && path.last_heard > answer_due;
  const bool worth_trying =
      !full && (long_path(path.rtt.minimum()) || (talks && breaker.factor() == 1));
  path.probes = worth_trying ? kMostProbes : 2;
  const bool more = backlog(path) > 0;
  uint32_t again = 0;
  for (uint64_t n = path.sent.lowest(); n < path.sent.next() && again < path.probes; ++n) {
    SentPacket* packet = path.sent.find(n);
    if (!packet || packet->state != SentPacket::State::flight) continue;
    // A chunk that goes in passes is not sent again now; the next one of its pass takes its place.
    if (recovered(*packet) || more) ++again;
    packet_lost(path, *packet, Again::probe, now);
  }
}

}  // namespace gradwire
