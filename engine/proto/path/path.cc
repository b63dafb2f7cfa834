#include "proto/path/path.h"

#include <algorithm>

#include "proto/base/overhead.h"

namespace gradwire {

namespace {
// Chunks for a peer that is not known to have started their op. Where all start together fewer go
// before its OPEN arrives, and the peer stashes more in any case.
constexpr size_t kMostEarly = Stash::kMost / 2;
// A sender that waits for its turn asks for it after so long: other senders take milliseconds each.
constexpr Nanos kTurnWait = 50 * kMillisecond;
// Packets of a probe time-out that go whatever the window is.
constexpr uint64_t kFewProbes = 2;
// A path without an answer for this long may not carry datagrams of the agreed length.
constexpr Nanos kTrialAfter = 1 * kSecond;
// Packets of a train under heavy loss: a short queue, a small buffer or a policer may lose longer
// ones for good. With one the calls of fast hosts take more time than the network does.
constexpr uint64_t kLossyTrain = 2;
// The interval of pings in such a trial, at the start, when many peers may be late.
constexpr Nanos kTrialInterval = 50 * kMillisecond;
}  // namespace

Path::Path(uint16_t endpoint, Port& shared, Nanos now)
    : peer(endpoint), port(shared), limit(shared.config.datagram_bytes, shared.config.tag_bytes) {
  const EndpointConfig& config = port.config;
  allowed.credit = CreditPool::standing_for(config.peers_of(endpoint), config.engines);
  grant.granted = grant.granted_sent =
      CreditPool::standing_for(config.peers_of(config.endpoint), config.engines);
  life.last_heard = now;
  life.ping_now = true;
  if (!config.ecn) ecn.sent.off();
}

PathState Path::state(Nanos now) const {
  const Rtt& rtt = recovery.rtt;
  return {counted,
          rtt.minimum(),
          rtt.any() ? rtt.smoothed() : 0,
          loss_to.recent(now) ? loss_to.queue : 0,
          loss_to.share(now),
          arriving.loss.share(now),
          allowed.window,
          recovery.in_flight()};
}

// ---- packets of ops that arrive

bool Path::is_new(uint64_t number, const wire::Header& header) {
  if (number == 0 || acks.seen(number)) {
    ++port.counters.duplicates;
    acks.hurry();
    return false;
  }
  if (acks.doubtful(number, grant.granted)) {
    ++port.counters.malformed;
    return false;
  }
  if (number > acks.largest()) port.receiver.credit.ask(grant, header.backlog);
  return true;
}

// The peer sends no more of its backlog before the op starts, and would use spare credit all at
// once then.
bool Path::keep(uint64_t op, std::span<const uint8_t> datagram) {
  if (!stash.add(op, datagram, port.stashed, port.memory)) return false;
  const bool server = port.config.endpoint >= port.config.workers;
  const size_t most = server ? SIZE_MAX : most_early();
  lower_demand(most - std::min(most, stash.size()));
  return true;
}

void Path::announced(size_t packets, size_t kept) {
  if (port.config.servers == 0 && stash.empty() && packets > kept)
    port.receiver.credit.ask(grant, std::max<size_t>(grant.demand, packets - kept));
}

// An ACK goes at once for a control frame, and for the last packet that waits.
Nanos Path::record(const Run& run, Nanos now) {
  const Nanos queue = arriving.delay.sample(run.sent_us, run.arrival, recovery.rtt.excess(), now);
  port.receiver.arrived(arriving, queue, run.bytes, run.limited);
  acks.arrived(queue, run.packets, run.bytes, now);
  if (run.refused) port.counters.refused += run.packets;
  port.receiver.count(arriving, run.first, run.packets, acks.largest(), run.bytes, queue, now);
  if (acks.record(run.first, run.packets, run.refused, run.arrival)) port.receiver.missing();
  if (ecn.seen.add(run.ecn, run.packets)) acks.hurry();  // RFC 9000 §13.2.1
  if (run.ecn == kCe) {
    port.counters.marked += run.packets;
    port.counters.mark_cuts += port.receiver.marked(recovery.rtt.round(), now);
  }
  if (run.last || run.kind > wire::Kind::pull) acks.hurry();
  const bool lossy = loss_to.share(now) > kHeavyLoss;
  acks.after(ReceiveController::packets_per_ack(grant, lossy));
  return queue;
}

bool Path::share_credit(Nanos now) {
  const bool tell = port.receiver.share(
      grant, {peer, arriving, recovery.rtt, acks.largest(), stash.no_room()}, now);
  if (tell) acks.hurry();
  return tell;
}

// ---- acknowledgements

bool Path::on_ack(const wire::Ack& ack, Nanos now) {
  Recovery::Acked& acked = port.acked;
  acked.clear();
  // A share of less than a packet would hold this path back for ever.
  const uint32_t share = ack.share & ~wire::Ack::kTurns;
  if (share && share < port.config.wire_bytes()) return false;
  if (!recovery.on_ack(ack, now, acked)) return false;
  const uint64_t granted = wire::expand(ack.credit, recovery.next());
  if (granted > allowed.credit && granted < recovery.next() + SentPackets::kMost) {
    allowed.credit = granted;
    recovery.feed();
  }
  if (recovery.latest()) {
    if (share) allowed.window = share;
    allowed.turns = share != ack.share;
    loss_to = {ack.loss / 65'536.0, Nanos{ack.queue_us} * kMicrosecond, now};
    port.sender.told(peer, ack.room / 255.0);
    if (!short_queue(loss_to.queue, port.sender.window().target())) recovery.twins.queued(now);
  }
  port.sender.on_left(acked.in_flight);
  port.sender.on_spurious(acked.spurious);
  port.counters.spurious_retransmissions += acked.spurious;
  recovery.twins.arrived(acked.items.size());
  for (const auto& [first, packets] : acked.runs) ecn.sent.acked(first.ect, packets);
  if (acked.longest) limit.acked(acked.longest);
  return true;
}

bool Path::judge(const wire::Ack& ack, Nanos now) {
  // How many packets came with which codepoint, as the peer counts.
  const bool marks = ecn.sent.told(ack.ect0, ack.ce);
  if (port.config.ecn && ecn.sent.failed() && !ecn.failure_counted) {
    ecn.failure_counted = true;
    ++port.counters.ecn_failed;
  }
  if (marks && port.sender.marked(recovery.largest_acked_sent(), now)) ++port.counters.mark_cuts;
  if (recovery.refused(now)) {
    recovery.give_up_refused([this](uint64_t op) { return is_early(op); }, port.lost);
    for (const Recovery::Lost& each : port.lost) started.refuse(each.packet.op);
  }
  if (port.acked.bytes == 0) return false;
  recovery.detect_losses(now, port.lost);
  return true;
}

void Path::teach(const wire::Ack& ack, const std::function<double()>& windows, Nanos now) {
  const Rtt& rtt = recovery.rtt;
  port.sender.on_ack({peer, port.acked.bytes, loss_to.reported, Nanos{ack.queue_us} * kMicrosecond,
                      rtt.round(), rtt.minimum(), recovery.largest_acked_sent()},
                     windows, now);
}

bool Path::lost(const Recovery::Lost& each) {
  port.sender.on_left(each.packet.bytes);
  if (each.why == Again::lost) {
    ++port.counters.declared_lost;
    ++counted.declared_lost;
    port.sender.on_lost();
  }
  if (each.packet.ect) ecn.sent.given_up();
  if (each.packet.twin) return false;
  if (each.packet.data()) return true;
  control.again(each.packet.item);
  return false;
}

// ---- what is due

// Without a backlog no probe is needed and no credit is awaited.
void Path::adapt(uint64_t backlog, Nanos now) {
  standing.backlog = backlog;
  standing.spreads = profile().spreads;
  standing.lossy = loss(now).heavy() && !port.sender.window().pressed();
  if (!standing.lossy) recovery.forget_control();
  if (closed()) return;
  if (backlog == 0) {
    recovery.end_probes();
    recovery.feed();
  } else if (credit() == 0 && recovery.probes() == 0 && !port.failed) {
    if (!allowed.turns) return recovery.starve(now);
    if (recovery.in_flight() == 0) recovery.starve(now + kTurnWait);
  }
}

Nanos Path::next_send() const {
  if (life.ping_now || life.pong_now || farewell.answer) return 0;
  Nanos next = acks.next_timer();
  if (!port.failed && !farewell.gone) next = std::min(next, limit.next_ping());
  const bool bye = port.leaving && !port.left && !farewell_over();
  if (farewell.errors_left || bye) next = std::min(next, farewell.next);
  return next;
}

// The time at which the peer counts as silent. An endpoint that leaves waits for its peers no
// longer than it lingers, and their ends are no failure of the others any more.
Nanos Path::silence_due() const {
  return port.leaving || !life.connected ? kNever : life.last_heard + port.config.peer_timeout + 1;
}

Nanos Path::next_check(Nanos now) const {
  Nanos next = kNever;
  if (!farewell.gone) next = life.next_ping(port.config, port.failed);
  if (port.failed) return next;
  if (!farewell.gone) {
    if (life.connected)
      next = std::min({next, silence_due(), limit.next_timer(recovery.rtt.round())});
    else if (life.first_ping && !limit.on_trial())
      next = std::min(next, life.first_ping + kTrialAfter + 1);
  }
  if (recovery.waiting())
    next = std::min({next, recovery.loss_due(), recovery.next_timeout(life.last_heard, now)});
  else if (recovery.timeouts() > 0)
    next = std::min(next, now);
  return next;
}

void Path::check_pings(Nanos now) {
  if (life.next_ping(port.config, port.failed) > now) return;
  life.last_ping = now;
  // The sign of life of an endpoint that has failed is its failure: a ping would keep a peer
  // waiting to which all ERRORs so far were lost.
  if (port.failed) {
    farewell.errors_left = std::max(farewell.errors_left, uint32_t{!farewell.gone});
    return;
  }
  // A path on trial has pings of its own until it is connected.
  life.ping_now = !farewell.gone && (life.connected || !limit.on_trial());
}

void Path::check(Nanos now) {
  if (recovery.loss_due() <= now) recovery.detect_losses(now, port.lost);
  if (farewell.gone) return;
  if (!life.connected) {
    if (life.first_ping && now - life.first_ping > kTrialAfter) limit.try_out(now, kTrialInterval);
    return;
  }
  news.suspect = limit.suspect(now, recovery.rtt.round());
}

// Chunks that wait matter only where a packet does not recover by itself.
bool Path::check_probes(uint64_t backlog, Nanos now) {
  const bool more = recovery.waiting() && backlog > 0;
  if (!recovery.on_timeout(life.last_heard, more, now, port.lost)) return false;
  ++port.counters.probes;
  if (life.connected) ecn.sent.timed_out(recovery.timeouts());
  return true;
}

Nanos Path::repeat(bool full, Copies& copies, Nanos now) {
  if (!standing.lossy || farewell.gone || recovery.in_flight() == 0) return kNever;
  const Repeats after(loss(now), recovery.rtt.smoothed(), port.sender.queued(),
                      standing.backlog > 0, full || credit() == 0);
  return recovery.repeat(after, copies, now, port.lost);
}

bool Path::farewell_over() const {
  return farewell.over(recovery.rtt.any() || acks.largest() > 0, port.failed);
}

// ---- the length of datagrams

void Path::lower_limit(uint32_t bytes, Nanos now) {
  // A limit below the smallest ends the job, and what says so has to fit.
  if (limit.lower(std::max<uint32_t>(bytes, wire::kMinDatagram - 1), now)) limit_fell();
}

void Path::limit_fell() {
  if (limit.bytes() < wire::kMinDatagram) {
    news.failure = {"the path to " + port.config.name(peer) + " carries datagrams of " +
                        std::to_string(limit.bytes()) + " bytes at the most, of the " +
                        std::to_string(port.config.datagram_bytes) +
                        " agreed (datagram=); at least " + std::to_string(wire::kMinDatagram) +
                        " are needed: raise the MTU of its interfaces",
                    peer, Cause::mtu};
    return;
  }
  life.ping_now = true;  // the PING carries the new length
  recovery.give_up_longer(limit.bytes(), port.lost);
}

// ---- chunks

// The chunks that may go early, in either direction.
size_t Path::most_early() const {
  if (!profile().early_share) return kMostEarly;
  return std::max(kMostEarly, Stash::kInAll / (port.config.endpoints() - size_t{1}));
}

// Probes need no credit. Two go without room in the window, too (RFC 9002 §7.5).
uint32_t Path::most_packets(bool probe, uint64_t window) const {
  const uint64_t most =
      probe ? std::min<uint64_t>(recovery.probes(), std::max<uint64_t>(kFewProbes, window))
            : std::min({credit(), window, uint64_t{port.sender.quantum()}});
  if (!standing.lossy && !recovery.unanswered()) return static_cast<uint32_t>(most);
  // Where nothing is acknowledged although little is lost, as far as known, two may not fit either;
  // nor may two long ones.
  const bool longer = port.config.wire_bytes() > kFullPacket;
  const uint64_t fit = longer || !standing.lossy ? 1 : kLossyTrain;
  return static_cast<uint32_t>(std::min(most, fit));
}

bool Path::holds(Nanos now, Nanos& until) {
  if (!standing.spreads || allowed.window <= 0) return false;
  const Nanos wait = port.sender.hold(hold.tokens, allowed.window, recovery.rtt.smoothed(), now);
  if (wait == 0) return false;
  hold.held = true;
  until = std::min(until, now + wait);
  return true;
}

void Path::went(const Train& train, bool probe, bool apart) {
  if (probe) {
    port.sender.probe_sent(train.total_bytes);
    return;
  }
  const double bytes = train.total_bytes + kOverhead * train.count;
  port.sender.train_sent(bytes);
  apart ? hold.tokens.spend(bytes) : hold.tokens.clear();
  hold.held = false;
}

}  // namespace gradwire
