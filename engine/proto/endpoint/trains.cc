// Trains of chunks: what waits for each peer, which train goes next, and how it is written.
#include <algorithm>
#include <utility>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// Elements encoded for one train. Its packets are stamped before, so the time of encoding looks
// like queueing to the receiver.
constexpr uint32_t kMostEncoded = 1U << 16;
// Chunks for a peer that is not known to have started their op. Where all start together fewer go
// before its OPEN arrives, and the peer stashes more in any case.
constexpr size_t kMostEarly = kStashMost / 2;
// The share of a push whose last packets say so, for the close rule.
constexpr double kTailShare = 0.01;
// Packets of a probe time-out that go whatever the window is.
constexpr uint64_t kFewProbes = 2;
}  // namespace

// ---- what waits

// True when the peer may not have started this op: no packet of it, or of a later op of its lane,
// has arrived. A server has an op from the first OPEN on.
bool Endpoint::Impl::early(const Path& path, const Op& op) const {
  return config.servers == 0 && !path.started.contains(op.id);
}

// The chunks that may go early on a path, in either direction.
size_t Endpoint::Impl::most_early(const Path& path) const {
  if (!path.recovery.rtt.profile().early_share) return kMostEarly;
  return std::max(kMostEarly, kStashInAll / (paths.size() - 1));
}

// How many more may go early. Packets that a late peer refuses would be sent again and again.
uint64_t Endpoint::Impl::early_room(const Path& path) const {
  if (config.servers) return UINT64_MAX;
  const size_t most = most_early(path);
  return most - std::min<size_t>(most, path.early_sent);
}

// The chunks to send now, without those that wait for the peer to start their op.
uint64_t Endpoint::Impl::backlog(const Path& path) const {
  return scheduler.backlog(path.peer, scheduler.any_early(path.peer) && early_room(path) > 0);
}

// Counts what waits of an op for a peer; call it whenever that may have changed.
void Endpoint::Impl::recount(const Op& op, Path& path) {
  Scheduler::Waiting waiting;
  if (sums_for(op, path.peer)) waiting.ready = op.aggregator->back[path.peer]->backlog(true);
  const uint16_t aggregator = config.aggregator_at(path.peer);
  if (op.working() && aggregator != kNoAggregator) {
    const ChunkSender& push = *op.worker->push[aggregator];
    const uint32_t again = push.backlog(false);
    waiting.ready += again;
    (early(path, op) ? waiting.early : waiting.ready) += push.backlog(true) - again;
  }
  scheduler.set_waiting(path.peer, op.id, waiting);
  touch(path);
}

void Endpoint::Impl::recount(const Op& op) {
  for (auto& p : paths)
    if (p) recount(op, *p);
}

void Endpoint::Impl::set_uncounted(Op& op, Path& path) {
  Op*& other = due.uncounted[path.peer];
  if (other) recount(*other, path);
  other = &op;
  touch(path);
}

// Records that the peer has started the ops of a lane below this id.
void Endpoint::Impl::note_started(Path& path, uint64_t below) {
  const uint64_t before = path.started.next_of(below);
  if (!path.started.note_next(below) || config.servers) return;
  for (auto& [id, op] : ops) {
    if (lane_of(id) != lane_of(below) || id < before || id >= below) continue;
    path.counted.waits_end(op->started, due.clock);
    if (op->worker) path.early_sent -= std::exchange(op->worker->early[path.peer], 0);
    recount(*op, path);
  }
}

// An op ends here: nothing of it waits any more.
void Endpoint::Impl::drop(const Op& op) {
  if (last_found == &op) last_found = nullptr;
  op_agenda.in_passes -= op.spec.plan.control == Control::probe;
  op_agenda.timers.erase({op.due, op.id});
  for (auto& p : paths) {
    if (!p) continue;
    if (due.uncounted[p->peer] == &op) due.uncounted[p->peer] = nullptr;
    scheduler.set_waiting(p->peer, op.id, {});
    if (op.worker && config.servers == 0) p->early_sent -= op.worker->early[p->peer];
    touch(*p);
  }
}

// ---- which goes next

// The longest of the long paths that have a backlog.
SendController::LongPaths Endpoint::Impl::long_paths() const {
  SendController::LongPaths far;
  if (due.long_paths == 0) return far;
  for (const auto& p : paths) {
    if (!p || p->farewell.gone || !p->settled.spreads || backlog(*p) == 0) continue;
    ++far.count;
    far.rtprop = std::max(far.rtprop, p->recovery.rtt.minimum());
    far.round = std::max(far.round, p->recovery.rtt.smoothed());
    far.window += p->allowed.window;
  }
  return far;
}

// Sends the next train of chunks.
bool Endpoint::Impl::transmit_train(Nanos now, Train& train) {
  for (;;) {
    settle();
    const SendController::LongPaths far = long_paths();
    const double rate = btlbw();
    sender.pace(far, rate, rate > 0 ? unproven_rate(now) : 0, now);
    due.pace = 0;
    const double space = sender.room(now);
    const uint64_t window = space > 0 ? static_cast<uint64_t>(space / config.wire_bytes()) + 1 : 0;
    const bool apart = far.count > 1 && config.pacing;
    Nanos held = kNever;
    const Scheduler::Choice choice = scheduler.choose(
        window > 0, [&](uint16_t to) { return apart && holds(*paths[to], now, held); });
    counters.credit_stalls += choice.stalled;
    if (window == 0 && !choice.probe) {
      ++counters.window_stalls;
      sender.limited();
    }
    if (choice.to == Scheduler::kNowhere) {
      if (held != kNever) due.pace = held;
      return false;
    }
    Path& path = *paths[choice.to];
    const Nanos wait = sender.wait(choice.destinations > 1, now);
    if (wait) {
      due.pace = wait;
      return false;
    }
    // Probes need no credit. Two go without room in the window, too (RFC 9002 §7.5).
    const uint64_t most = choice.probe ? std::min<uint64_t>(path.recovery.probes(),
                                                            std::max<uint64_t>(kFewProbes, window))
                                       : std::min({path.allowed.left(path.recovery.next()), window,
                                                   uint64_t{sender.quantum()}});
    // The backlog may have chunks that were decided meanwhile; then the choice is made again.
    if (!transmit_data(path, now, train, static_cast<uint32_t>(most))) continue;
    went(path, train, choice.probe, apart);
    return true;
  }
}

// True when a path's own pace holds it back: where several are long, each has its part of its
// receiver's window. `until` becomes the first time at which one may go.
bool Endpoint::Impl::holds(Path& path, Nanos now, Nanos& until) {
  if (!path.settled.spreads || path.allowed.window <= 0) return false;
  const Nanos wait =
      sender.hold(path.hold.tokens, path.allowed.window, path.recovery.rtt.smoothed(), now);
  if (wait == 0) return false;
  path.hold.held = true;
  until = std::min(until, now + wait);
  return true;
}

// Counts a train that goes now.
void Endpoint::Impl::went(Path& path, const Train& train, bool probe, bool apart) {
  if (probe) {
    sender.probe_sent(train.total_bytes);
    return;
  }
  const double bytes = train.total_bytes + kOverhead * train.count;
  sender.train_sent(bytes);
  apart ? path.hold.tokens.spend(bytes) : path.hold.tokens.clear();
  path.hold.held = false;
  scheduler.went(path.peer);
}

// ---- how it is written

// Counts the packets of a train that goes now.
void Endpoint::Impl::sent(Path& path, const Train& train, Nanos now) {
  // The last one may be shorter than the others.
  const uint32_t longest = std::max(1U, train.total_bytes / train.segment_bytes);
  path.limit.sent(train.segment_bytes, now, longest);
  if (train.ecn != kNotEct) path.ecn.sent.sent(train.count);
  sender.on_sent(train.total_bytes, now, train.count);
  counters.packets_sent += train.count;
  counters.bytes_sent += train.total_bytes;
  path.counted.sent(train.count, train.total_bytes);
}

bool Endpoint::Impl::transmit_data(Path& path, Nanos now, Train& train, uint32_t most) {
  const uint64_t left = backlog(path);
  if (left == 0) return false;
  train.destination = path.peer;
  train.count = train.total_bytes = train.segment_bytes = 0;
  Filling filling;
  filling.header = header_at(now);
  filling.most = std::min(most, longest_train());
  filling.left = left;
  filling.room = early_room(path);
  filling.by_share = (sender.led_by_receiver() && path.settled.spreads) || path.hold.held;
  const uint16_t lane = scheduler.next_lane(path.peer, filling.room > 0);
  uint64_t id = scheduler.next_op(path.peer, id_of(0, lane));
  while (id != Scheduler::kNoOp && !filling.full) {
    Op& op = *find(id);
    fill(path, op, filling, now, train);
    recount(op, path);
    id = scheduler.next_op(path.peer, id + kLanes);
  }
  if (train.count == 0) return false;
  sent(path, train, now);
  return true;
}

// Counts a chunk that goes before the peer is known to have started its op.
void Endpoint::Impl::count_early(Path& path, Op& op, const Chunk& chunk, Filling& filling) {
  if (chunk.kind != wire::Kind::push || chunk.again) return;
  ++op.worker->early[path.peer];
  ++path.early_sent;
  --filling.room;
}

// Adds an op's chunks to a train.
void Endpoint::Impl::fill(Path& path, Op& op, Filling& filling, Nanos now, Train& train) {
  const auto longest =
      static_cast<uint32_t>(wire::kHeaderBytes + op.spec.plan.format.bytes(op.grid.chunk_elements));
  const bool in_parts = longest > path.limit.bytes();
  // Datagrams of one train have equal lengths, and one that is sent in fragments is a train of its
  // own.
  if (train.count && (longest != train.segment_bytes || in_parts)) return;
  const uint16_t aggregator = op.working() ? config.aggregator_at(path.peer) : kNoAggregator;
  const bool is_early = early(path, op);
  while (!filling.full) {
    filling.full = train.count >= filling.most || path.recovery.full();
    if (filling.full) return;
    const bool fresh = !is_early || filling.room > 0;
    const uint8_t dscp = next_dscp(op, aggregator, path.peer, fresh);
    filling.full = train.count && dscp != train.dscp;  // a train has one DSCP
    Chunk chunk;
    if (filling.full || !next_chunk(path, op, aggregator, fresh, chunk, train)) return;
    if (is_early) count_early(path, op, chunk, filling);
    train.dscp = dscp;
    write_twins(path, op, chunk, filling, now, train);
    const uint32_t bytes = write_chunk(path, op, chunk, false, filling, now, train);
    // A shorter datagram ends a train.
    filling.full = bytes < longest || filling.encoded >= kMostEncoded || in_parts;
  }
}

// Takes an op's next chunk for a peer; false when there is none.
bool Endpoint::Impl::next_chunk(Path& path, Op& op, uint16_t aggregator, bool fresh, Chunk& chunk,
                                const Train& train) {
  // Pushes go first, because the results of all workers wait for them.
  if (aggregator != kNoAggregator &&
      op.worker->push[aggregator]->next(chunk.id, chunk.again, fresh)) {
    const codec::Format& format = op.spec.plan.format;
    const uint64_t first = op.grid.offset[chunk.id];
    chunk.encoded = !op.spec.data.are_payloads(format);
    chunk.payload = op.spec.data.at(first);
    if (chunk.encoded) {
      // It is encoded whenever it is sent; its values stay the same until it is decided.
      if (scratch.encoded.empty()) scratch.encoded.resize(Train::kMaxBytes);
      uint8_t* const at = scratch.encoded.data() + train.total_bytes;
      codec::encode(format, op.spec.data.floats(first), op.grid.length(chunk.id), at);
      chunk.payload = at;
    }
    if (!op.spec.priorities.empty())
      chunk.flags = static_cast<uint16_t>(op.spec.priorities[chunk.id] << wire::kClassShift);
    if (op.worker->push[aggregator]->in_last(kTailShare)) chunk.flags |= wire::kTail;
    return true;
  }
  if (!sums_for(op, path.peer) ||
      !op.aggregator->back[path.peer]->next(chunk.id, chunk.again, true))
    return false;
  chunk.kind = wire::Kind::pull;
  chunk.payload = op.aggregator->sum.result_payload(chunk.id);
  return true;
}

// The copies of a chunk that go right before it. They go only where the path is long and loses, and
// where the queue here is short.
uint32_t Endpoint::Impl::twins_of(const Path& path, Op& op, const Chunk& chunk,
                                  const Filling& filling, Nanos now) const {
  const double loss = path.loss_to.share(now);
  if (loss == 0 || !path.recovery.rtt.profile().twins || sender.queued() ||
      !path.twins.apt(path.recovery.rtt.round(), now) || op.in_passes(chunk.kind) || op.commits() ||
      op.grid.length(chunk.id) < op.grid.chunk_elements)
    return 0;
  if (chunk.again) return path.twins.of_lost(loss);
  const double last = Twins::last(loss, config.workers - size_t{1});
  const uint64_t most = static_cast<uint64_t>(last * static_cast<double>(op.grid.shards[0].size()));
  return filling.left <= most && sender_of(op, path, chunk.kind).in_last(last)
             ? path.twins.of_last(loss)
             : 0;
}

void Endpoint::Impl::write_twins(Path& path, Op& op, const Chunk& chunk, Filling& filling,
                                 Nanos now, Train& train) {
  for (uint32_t left = twins_of(path, op, chunk, filling, now);
       left && train.count + 1 < longest_train() && !path.recovery.full(); --left)
    write_chunk(path, op, chunk, true, filling, now, train);
}

// Appends a chunk to a train as one packet; returns its length. `twin`: the chunk follows again.
uint32_t Endpoint::Impl::write_chunk(Path& path, Op& op, const Chunk& chunk, bool twin,
                                     Filling& filling, Nanos now, Train& train) {
  if (twin) {
    path.twins.take();
    ++counters.copies;
  } else if (filling.left) {
    --filling.left;
  }
  const uint32_t length = op.grid.length(chunk.id);
  if (chunk.encoded && !twin) filling.encoded += length;
  const size_t payload_bytes = op.spec.plan.format.bytes(length);
  SentPacket& packet = path.recovery.add();
  packet.op = op.id;
  packet.item = chunk.id;
  packet.kind = chunk.kind;
  packet.bytes = static_cast<uint16_t>(wire::kHeaderBytes + payload_bytes);
  packet.recovers = !twin && !op.in_passes(chunk.kind);
  packet.twin = twin;
  packet.ect = path.ecn.sent.capable();
  path.recovery.on_sent(packet, now);
  wire::Header& header = filling.header;
  set_header(header, packet, chunk.id, filling.left);
  header.flags = chunk.flags;
  if (filling.left && (packet.number >= path.allowed.credit || filling.by_share))
    header.flags |= wire::kOutOfCredit;
  uint8_t* at = train.headers[train.count].data();
  wire::write_header(at, header);
  train.spans[2 * train.count] = {at, wire::kHeaderBytes};
  train.spans[2 * train.count + 1] = {chunk.payload, payload_bytes};
  if (train.count == 0) {
    train.segment_bytes = packet.bytes;
    train.ecn = packet.ect ? kEct0 : kNotEct;
  }
  train.total_bytes += packet.bytes;
  ++train.count;
  op.traffic.add(packet.bytes);
  if (chunk.again || twin) {
    ++op.traffic.retransmissions;
    op.waits.resent.add(path.peer, 1);
    ++counters.retransmissions;
    ++path.counted.retransmissions;
  }
  return packet.bytes;
}

}  // namespace gradwire
