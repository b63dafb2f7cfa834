// Receiving: the way of each packet from its datagram to its op.
#include <algorithm>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// Bytes of an ERROR's text.
constexpr size_t kLongestError = 1024;
}  // namespace

void Endpoint::Impl::receive(uint16_t source, std::span<const uint8_t> datagram, Nanos now,
                             Nanos arrival, uint8_t ecn) {
  const auto head = wire::read_common(datagram);
  if (!head || head->session != config.session || head->source != source ||
      source >= paths.size() || !paths[source]) {
    ++counters.malformed;
    return;
  }
  Path& path = *paths[source];
  due.clock = now;
  touch(path);
  if (head->version != wire::kVersion) return other_version(path, head->version, now);
  ++counters.packets_received;
  counters.bytes_received += datagram.size();
  path.counted.received(datagram.size());
  path.life.note(now);
  if (path.limit.arrived(datagram.size())) counters.now.path_limit = longest_datagram();
  on_packet(path, head->kind, datagram, now, arrival, ecn);
}

// Fails where a peer that has not been heard before speaks another version. It keeps its version,
// so a later datagram of another one is foreign or damaged.
void Endpoint::Impl::other_version(const Path& path, uint8_t version, Nanos now) {
  if (path.life.heard) {
    ++counters.malformed;
    return;
  }
  fail({name(path.peer) + " speaks protocol version " + std::to_string(version) + ", " +
            name(config.endpoint) + " speaks " + std::to_string(wire::kVersion),
        path.peer, Cause::version},
       now);
}

void Endpoint::Impl::on_packet(Path& path, wire::Kind kind, std::span<const uint8_t> datagram,
                               Nanos now, Nanos arrival, uint8_t ecn) {
  bool good = true;
  if (wire::is_reliable(kind)) {
    on_reliable(path, datagram, now, arrival, ecn);
  } else if (kind == wire::Kind::ack) {
    wire::Ack ack;
    good = wire::read_ack(datagram, ack) && on_ack(path, ack, now);
  } else if (kind == wire::Kind::ping) {
    good = on_ping(path, datagram, now);
  } else if (kind == wire::Kind::pong) {
    good = on_pong(path, datagram, now);
  } else if (kind == wire::Kind::fragment) {
    on_fragment(path, datagram, now, arrival, ecn);
  } else if (kind == wire::Kind::error) {
    good = on_error(path, datagram, now);
  } else {
    good = kind == wire::Kind::bye && on_bye(path, datagram, now);
  }
  if (!good) ++counters.malformed;
}

// Takes what PING and PONG have in common: the op that starts next at the peer.
std::optional<wire::Ping> Endpoint::Impl::read_ping(Path& path, std::span<const uint8_t> datagram) {
  const auto ping = wire::read_ping(datagram);
  if (ping && path.peer < config.workers)
    note_started(path,
                 wire::expand(ping->begun, path.started.next_of(ping->begun), wire::kBegunBits));
  return ping;
}

bool Endpoint::Impl::on_ping(Path& path, std::span<const uint8_t> datagram, Nanos now) {
  const auto ping = read_ping(path, datagram);
  if (!ping) return false;
  const auto claim = wire::Reader(datagram.subspan(wire::kPingBytes)).get<uint16_t>();
  if (claim && claim < wire::kMinDatagram) return false;
  path.limit.claimed(claim, now);
  counters.now.path_limit = longest_datagram();
  // Before the first answer there is nothing to set against what the peer says.
  if (claim && !path.life.connected) limit(path, claim, now);
  path.life.pong_now = true;
  path.life.pong_stamp = ping->stamp;
  // A peer that still pings has not received this endpoint's ERROR.
  if (failure && path.farewell.errors_left == 0) path.farewell.errors_left = 1;
  return true;
}

bool Endpoint::Impl::on_pong(Path& path, std::span<const uint8_t> datagram, Nanos now) {
  const auto ping = read_ping(path, datagram);
  if (!ping) return false;
  const auto stamp = static_cast<Nanos>(ping->stamp);
  const auto round = static_cast<Nanos>(wire::stamp_of(now - stamp));
  if (round >= kSecond) return true;
  path.recovery.rtt.sample(round, 0, now);
  const uint32_t before = path.limit.bytes();
  if (path.limit.answered(ping->stamp, now, path.recovery.rtt.round()))
    path.limit.bytes() < before ? lowered(path, now) : raised(path);
  // The answered ping had the agreed length, or the length that the path has turned out to carry.
  if (path.life.connected || path.limit.on_trial()) return true;
  path.life.connected = true;
  emit(Event::Type::connected, path.peer);
  return true;
}

bool Endpoint::Impl::on_error(Path& path, std::span<const uint8_t> datagram, Nanos now) {
  wire::Reader reader(datagram.subspan(wire::kCommonBytes));
  const auto rank = reader.get<int32_t>();
  const auto cause = static_cast<Cause>(reader.get<uint8_t>());
  std::string text(reinterpret_cast<const char*>(reader.rest().data()), reader.rest().size());
  if (!reader.ok() || text.size() > kLongestError) return false;
  fail({name(path.peer) + " reports: " + text, rank, cause}, now);
  return true;
}

bool Endpoint::Impl::on_bye(Path& path, std::span<const uint8_t> datagram, Nanos now) {
  const auto bye = wire::read_bye(datagram);
  if (!bye) return false;
  path.farewell.acknowledged |= bye->heard;
  if (!bye->leaves) return true;
  path.farewell.lanes(bye->lanes);
  wire::Reader numbers(bye->numbers);
  for (uint64_t lane = bye->first; !numbers.rest().empty(); ++lane)
    path.farewell.note(lane, wire::expand(numbers.get<uint32_t>(), expected(lane)));
  if (!path.farewell.told()) return true;
  path.farewell.answer = !bye->heard && !leaving.over;
  if (path.farewell.gone) return true;
  path.farewell.gone = leaving.any_gone = true;
  for (auto& [id, op] : ops) op_changed(*op);
  for (auto& [id, op] : ops)
    if (!op->done() && !still_possible(*op, now)) return true;
  retire(now);
  return true;
}

void Endpoint::Impl::on_reliable(Path& path, std::span<const uint8_t> datagram, Nanos now,
                                 Nanos arrival, uint8_t ecn) {
  const auto header = wire::read_header(datagram);
  if (!header || datagram.size() > config.datagram_bytes) {
    ++counters.malformed;
    return;
  }
  const uint64_t number = wire::expand(header->packet_number, path.acks.largest() + 1);
  if (number == 0 || path.acks.seen(number)) {
    ++counters.duplicates;
    path.acks.hurry();
    return;
  }
  if (path.acks.doubtful(number, path.grant.granted)) {
    ++counters.malformed;
    return;
  }
  if (number > path.acks.largest()) receiver.credit.ask(path.grant, header->backlog);
  const uint64_t op_id = full_id(header->op);
  const Fate fate = accept(path, *header, op_id, datagram, now);
  if (fate == Fate::malformed) return;
  // Only now: what is not from the peer must not be measured either.
  const uint64_t bytes = datagram.size() + kOverhead;
  const Nanos queue = measure(path, *header, bytes, now, arrival);
  note_waits(path, op_id, number, queue);
  const bool refused = fate == Fate::refused;
  counters.refused += refused;
  if (!refused && !path.started.contains(op_id)) note_started(path, op_id + kLanes);
  path.arriving.count(number, path.acks.largest(), bytes, now);
  if (path.acks.record(number, refused, arrival)) receiver.missing();
  if (path.ecn.seen.add(ecn)) path.acks.hurry();  // RFC 9000 §13.2.1
  counters.marked += ecn == kCe;
  if (ecn == kCe) counters.mark_cuts += receiver.marked(path.recovery.rtt.round(), now);
  schedule_ack(path, *header, now);
}

// Measures the queueing delay of a new packet, which it returns, and the bytes that arrive.
Nanos Endpoint::Impl::measure(Path& path, const wire::Header& header, uint64_t bytes, Nanos now,
                              Nanos arrival) {
  const Nanos queue = path.arriving.delay.sample(header.send_time_us, arrival, now);
  if (path.arriving.bytes == 0) scratch.arrived.push_back(path.peer);
  receiver.arrived(path.arriving, queue, bytes, header.flags & wire::kOutOfCredit);
  path.acks.arrived(queue, bytes, now);
  return queue;
}

// Notes for reports what a new packet of an op under way tells of its path.
void Endpoint::Impl::note_waits(const Path& path, uint64_t op_id, uint64_t number, Nanos queue) {
  if (!last_found || last_found->id != op_id) return;  // most packets are of the op found last
  Waits& waits = last_found->waits;
  waits.queued.note(path.peer, queue);
  const uint64_t largest = path.acks.largest();
  if (largest == 0 || number <= largest + 1) return;
  waits.missed.add(path.peer, number - largest - 1);
  waits.burst.note(path.peer, static_cast<int64_t>(number - largest - 1));
}

// An ACK goes at once for a control frame, and for the last packet that waits.
void Endpoint::Impl::schedule_ack(Path& path, const wire::Header& header, Nanos now) {
  if (header.backlog == 0 || header.common.kind > wire::Kind::pull) path.acks.hurry();
  const uint32_t most = path.recovery.rtt.profile().packets_per_ack;
  const bool lossy = path.loss_to.share(now) > kHeavyLoss;
  path.acks.after(std::min(most, ReceiveController::packets_per_ack(path.grant, lossy)));
}

// Takes, refuses or rejects a new packet; only a taken one is acknowledged. A refused packet has
// crossed the network and will be sent again. A malformed one is not from the peer and leaves no
// trace.
Fate Endpoint::Impl::accept(Path& path, const wire::Header& header, uint64_t op_id,
                            std::span<const uint8_t> datagram, Nanos now) {
  if (failure) return Fate::malformed;
  const auto payload = datagram.subspan(wire::kHeaderBytes);
  if (Op* op = find(op_id)) return dispatch(path, *op, header, payload, now);
  if (finished(op_id)) return Fate::taken;
  const bool server = config.endpoint >= config.workers;
  if (number_of(op_id) >= expected(op_id) + kOpsAhead) return Fate::refused;
  if (server && header.common.kind == wire::Kind::open)
    return serve_open(path, header, op_id, payload, now);
  if (path.stash.size() >= kStashMost) {
    size_t all = 0;
    for (const auto& p : paths)
      if (p) all += p->stash.size();
    path.stash.no_room = all >= kStashInAll;
    if (path.stash.no_room) return Fate::refused;
  }
  const size_t cost = Stash::cost(datagram.size());
  path.stash.no_room = !memory.has_early(cost);
  if (path.stash.no_room) return Fate::refused;
  memory.early += cost;
  path.stash.add(op_id, datagram);
  // The peer sends no more of its backlog before this op starts, and would use spare credit all at
  // once then.
  const size_t most = server ? SIZE_MAX : most_early(path);
  const size_t room = most - std::min(most, path.stash.size());
  receiver.credit.lower(path.grant, room);
  return Fate::taken;
}

void Endpoint::Impl::replay(uint64_t op_id, Nanos now) {
  for (auto& p : paths) {
    if (!p) continue;
    const std::vector<Stash::Datagram> mine = p->stash.take(op_id);
    p->stash.no_room = false;
    for (const Stash::Datagram& each : mine) memory.early -= Stash::cost(each.size());
    size_t told = 0;
    for (const std::span<const uint8_t> datagram : mine) {
      const wire::Header header = *wire::read_header(datagram);
      told = std::max<size_t>(told, header.backlog);
      Op* op = find(op_id);
      if (!op) continue;
      dispatch(*p, *op, header, datagram.subspan(wire::kHeaderBytes), now, true);
    }
    // The packets held back come now, so every peer's share of the window is set at once.
    if (config.servers == 0 && p->stash.empty() && told > mine.size())
      receiver.credit.ask(p->grant, std::max<size_t>(p->grant.demand, told - mine.size()));
  }
  for (auto& p : paths)
    if (p) share_credit(*p, now);
}

// Hands a packet to its op.
Fate Endpoint::Impl::dispatch(Path& path, Op& op, const wire::Header& header,
                              std::span<const uint8_t> payload, Nanos now, bool stashed) {
  Fate fate = Fate::malformed;
  switch (header.common.kind) {
    case wire::Kind::push:
      if (sums_for(op, path.peer)) fate = on_push(path, op, header, payload, now, stashed);
      break;
    case wire::Kind::open:
    case wire::Kind::forgive:
      if (sums_for(op, path.peer)) fate = for_aggregator(path, op, header, payload, now);
      break;
    case wire::Kind::probe:
    case wire::Kind::bitmap:
    case wire::Kind::enough:
      fate = on_pass_packet(path, op, header, payload, now);
      break;
    default:
      if (op.spec.plan.control == Control::probe && header.common.kind == wire::Kind::stop) {
        fate = on_pass_packet(path, op, header, payload, now);
      } else if (pulls_from(op, path.peer)) {
        fate = op.done() ? Fate::taken : for_worker(path, op, header, payload, now);
      }
  }
  if (fate == Fate::malformed && !failure) ++counters.malformed;
  return fate;
}

// Takes a worker's contribution to a chunk that is summed here.
Fate Endpoint::Impl::on_push(Path& path, Op& op, const wire::Header& header,
                             std::span<const uint8_t> payload, Nanos now, bool stashed) {
  const uint16_t worker = path.peer;
  AggregatorPart& part = *op.aggregator;
  const auto added =
      part.sum.add(worker, header.chunk, payload, header.flags & wire::kTail, now, stashed);
  if (added == Aggregator::Added::no_memory) return Fate::refused;
  if (added == Aggregator::Added::malformed) return Fate::malformed;
  if (!part.result_class.empty()) {
    uint8_t& known = part.result_class[header.chunk - op.own_shard().begin];
    known = std::min(known, wire::priority_class(header.flags));
  }
  // Nothing follows from a contribution that completes no sum, where no region closes by count.
  if (added == Aggregator::Added::counted && part.passes.empty() && !part.sum.closes_regions() &&
      part.sum.finished().size() == part.counted)
    return Fate::taken;
  after_sum(op, now, worker);
  answer_push(op, worker);
  return Fate::taken;
}

// Takes what else a worker sends to the endpoint that sums its chunks.
Fate Endpoint::Impl::for_aggregator(Path& path, Op& op, const wire::Header& header,
                                    std::span<const uint8_t> payload, Nanos now) {
  const wire::Kind kind = header.common.kind;
  if (kind == wire::Kind::forgive) return on_forgive(path, op, payload, now);
  MessageReceiver& message = op.aggregator->opens[path.peer];
  return fate_of(on_message(op, path.peer, kind, message, header, payload, now));
}

Fate Endpoint::Impl::on_forgive(Path& path, Op& op, std::span<const uint8_t> payload, Nanos now) {
  if (payload.size() % 4) return Fate::malformed;
  wire::Reader reader(payload);
  while (!reader.rest().empty()) {
    const auto chunk = reader.get<uint32_t>();
    if (op.aggregator->sum.forgive(path.peer, chunk)) continue;
    fail({name(path.peer) + " gave up chunk " + std::to_string(chunk) + " of step " +
              std::to_string(op.spec.step) + ", which its bound does not allow",
          path.peer, Cause::bound},
         now);
    return Fate::malformed;
  }
  after_sum(op, now, path.peer);
  return Fate::taken;
}

// Takes what an aggregator sends to a worker that still waits for its result.
Fate Endpoint::Impl::for_worker(Path& path, Op& op, const wire::Header& header,
                                std::span<const uint8_t> payload, Nanos now) {
  const uint16_t aggregator = config.aggregator_at(path.peer);
  const wire::Kind kind = header.common.kind;
  WorkerPart& part = *op.worker;
  op.waits.pulled.note(path.peer, now - op.started);
  switch (kind) {
    case wire::Kind::pull:
      return fate_of(on_pull(path, op, header.chunk, payload, now));
    case wire::Kind::stop:
      return fate_of(on_stop(path, op, *part.push[aggregator], payload));
    case wire::Kind::close:  // an exact plan with an exact pull has none
      return fate_of(op.has_close && on_message(op, aggregator, kind, part.closes[aggregator],
                                                header, payload, now));
    case wire::Kind::commit:
      return fate_of(op.commits() && on_message(op, aggregator, kind, part.commits[aggregator],
                                                header, payload, now));
    case wire::Kind::fold:
      return fate_of(aggregator == 0 &&
                     on_message(op, aggregator, kind, part.fold, header, payload, now));
    default:
      return Fate::malformed;
  }
}

// Takes a result; false when the packet is malformed.
bool Endpoint::Impl::on_pull(Path& path, Op& op, uint32_t chunk, std::span<const uint8_t> payload,
                             Nanos now) {
  const uint16_t aggregator = config.aggregator_at(path.peer);
  const Grid::Shard& shard = op.grid.shards[aggregator];
  if (chunk < shard.begin || chunk >= shard.end ||
      !codec::valid(op.spec.plan.format, payload, op.grid.length(chunk)))
    return false;
  WorkerPart& part = *op.worker;
  if (!part.pull[aggregator].takes_results()) return false;
  if (!part.pull[aggregator].insert(chunk)) return true;
  apply(op, chunk, payload.data(), now);
  part.push[aggregator]->forget(chunk);
  count_later(op, path);
  answer_pull(op, aggregator);
  maybe_done(op, now);
  return true;
}

// Takes the regions of which a receiver needs no more chunks; false when malformed.
bool Endpoint::Impl::on_stop(Path& path, Op& op, ChunkSender& sender,
                             std::span<const uint8_t> payload) {
  if (payload.size() % 4) return false;
  wire::Reader reader(payload);
  bool good = true;
  while (good && !reader.rest().empty()) good = sender.stop_region(reader.get<uint32_t>());
  recount(op, path);
  return good;
}

// Computes the share of one sender anew.
void Endpoint::Impl::share_credit(Path& path, Nanos now) {
  if (!receiver.share(path.grant,
                      {path.arriving, path.recovery.rtt, path.acks.largest(), path.stash.size(),
                       path.stash.no_room},
                      now))
    return;
  path.acks.hurry();
  touch(path);
}

void Endpoint::Impl::flush(Nanos now) {
  due.clock = now;
  if (op_agenda.retire) retire(now);
  if (scratch.arrived.empty()) return;
  if (scratch.arrived.size() > 1) std::ranges::sort(scratch.arrived);
  for (const uint16_t peer : scratch.arrived) {
    Path& path = *paths[peer];
    receiver.sample(peer, path.arriving, path.recovery.rtt, now);
  }
  receiver.add_turns(scratch.arrived);
  for (const uint16_t peer : scratch.arrived)
    if (paths[peer]) share_credit(*paths[peer], now);
  scratch.arrived.clear();
  counters.now.send_window = sender.window().bytes();
  counters.now.receive_window = receiver.window().bytes();
  counters.now.queue_delay = receiver.window().queue_delay();
}

}  // namespace gradwire
