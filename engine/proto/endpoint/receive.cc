// The way of a packet, from its datagram to its op.
#include <algorithm>
#include <utility>

#include "proto/base/overhead.h"
#include "proto/endpoint/endpoint.h"

namespace gradwire {

namespace {
// Control frames waiting for a peer above which its PROBEs are refused. Each has an answer, and a
// correct peer sends the next only after it has taken that.
constexpr size_t kMostFrames = 1024;

Failure other_version(const EndpointConfig& config, uint16_t source, uint8_t version) {
  return {config.name(source) + " speaks protocol version " + std::to_string(version) + ", " +
              config.name(config.endpoint) + " speaks " + std::to_string(wire::kVersion),
          source, Cause::version};
}
}  // namespace

void Endpoint::receive(uint16_t source, std::span<const Datagram> datagrams, Nanos now,
                       Nanos arrival, uint8_t ecn, Buffer* buffer) {
  Path* const path = paths_.find(source);
  const wire::Common own = port_.header(wire::Kind::push);
  Path::Run run{arrival, ecn};
  uint64_t packets = 0;
  uint64_t bytes = 0;
  port_.memory.arriving = buffer;
  for (const Datagram datagram : datagrams) {
    const auto head = wire::read_common(datagram);
    const bool known = head && head->session == own.session && head->source == source && path;
    // A peer keeps its version, so a later datagram of another one is foreign or damaged.
    if (!known || (head->version != own.version && path->life.heard)) {
      ++port_.counters.malformed;
      continue;
    }
    due_.clock = now;
    if (head->version != own.version) {
      port_.memory.arriving = nullptr;
      return fail(other_version(port_.config, source, head->version), now);
    }
    ++packets;
    bytes += datagram.size();
    path->life.note(now);
    path->limit.arrived(datagram.size());
    if (!on_packet(*path, head->kind, datagram, run, now)) ++port_.counters.malformed;
  }
  port_.memory.arriving = nullptr;
  if (packets == 0) return;
  if (timeline_.on()) timeline_.note(now, Timeline::What::read, source, arrival);
  end_run(*path, run, now);
  port_.counters.received.add(bytes, packets);
  path->counted.received.add(bytes, packets);
  act(*path, now);
}

// False for what no correct peer sends.
bool Endpoint::on_packet(Path& path, wire::Kind kind, Datagram datagram, Path::Run& run,
                         Nanos now) {
  if (wire::is_reliable(kind)) return on_reliable(path, datagram, run, now);
  end_run(path, run, now);
  switch (kind) {
    case wire::Kind::ack: {
      wire::Ack ack;
      return wire::read_ack(datagram, ack) && on_ack(path, ack, now);
    }
    case wire::Kind::ping:
    case wire::Kind::pong: {
      const auto ping = wire::read_ping(datagram);
      if (!ping) return false;
      // Both say which op starts next at the peer.
      if (path.peer < port_.config.workers)
        note_started(
            path, wire::expand(ping->begun, path.started.next_of(ping->begun), wire::kBegunBits));
      if (kind == wire::Kind::ping)
        return path.on_ping(*ping, datagram.subspan(wire::kPingBytes), now);
      path.on_pong(*ping, now);
      return true;
    }
    case wire::Kind::fragment: {
      const auto whole = path.on_fragment(datagram);
      return whole.empty() || on_packet(path, wire::read_common(whole)->kind, whole, run, now);
    }
    case wire::Kind::error: {
      Failure why = path.read_error(datagram);
      if (!why) return false;
      fail(std::move(why), now);
      return true;
    }
    case wire::Kind::bye:
      return on_bye(path, datagram, now);
    default:
      return false;
  }
}

void Endpoint::act(Path& path, Nanos now) {
  const Path::News news = std::exchange(path.news, {});
  changes_.touch(path);
  if (news.suspect) emit(Event::Type::suspect, path.peer);
  if (news.connected) emit(Event::Type::connected, path.peer);
  if (news.failure) return fail(news.failure, now);
  lost(path, now);
}

// ---- packets of ops

// Takes a packet of an op. It adds it to the run that it continues, or ends that and begins
// another.
bool Endpoint::on_reliable(Path& path, Datagram datagram, Path::Run& run, Nanos now) {
  const auto header = wire::read_header(datagram);
  if (!header || datagram.size() > port_.config.datagram_bytes) return false;
  const uint64_t number = wire::expand(header->packet_number, path.acks.largest() + 1);
  if (!run.continues(*header, number)) end_run(path, run, now);
  if (!path.is_new(number, *header)) return true;
  const uint64_t id = run.packets ? run.op : ops_.full_id(header->op);
  const Fate fate = accept(path, *header, id, datagram, now);
  // What is not from the peer must not be measured either.
  if (fate == Fate::malformed) {
    if (Op* op = ops_.last_found(id)) act(*op, now);
    return bool(failure_);
  }
  const bool refused = fate == Fate::refused;
  if (refused != run.refused) end_run(path, run, now);
  if (run.packets == 0) run.begin(*header, id, number, refused);
  run.add(*header, datagram.size() + kOverhead);
  return true;
}

// Does what follows from the packets of a run, once for all.
void Endpoint::end_run(Path& path, Path::Run& run, Nanos now) {
  if (run.packets == 0) return;
  if (Op* op = ops_.last_found(run.op)) {
    op->follow(now);
    act(*op, now);
  }
  if (path.arriving.bytes == 0) arrived_.push_back(path.peer);
  const uint64_t largest = path.acks.largest();
  const Nanos queue = path.record(run, now);
  if (Op* op = ops_.last_found(run.op)) op->waits.arrived(path.peer, run.first, largest, queue);
  if (!run.refused && !path.started.contains(run.op)) note_started(path, run.op + kLanes);
  run = {run.arrival, run.ecn};
}

// Takes, refuses or rejects a new packet; only a taken one is acknowledged. A refused packet has
// crossed the network and will be sent again. A malformed one is not from the peer and leaves no
// trace.
Fate Endpoint::accept(Path& path, const wire::Header& header, uint64_t id, Datagram datagram,
                      Nanos now) {
  const EndpointConfig& config = port_.config;
  if (failure_) return Fate::malformed;
  const auto payload = datagram.subspan(wire::kHeaderBytes);
  if (Op* op = ops_.find(id)) {
    if (header.common.kind == wire::Kind::probe && path.control.open() >= kMostFrames)
      return Fate::refused;
    return op->take(path.peer, header, payload, now);
  }
  if (ops_.finished(id)) return Fate::taken;
  if (ops_.far_ahead(id)) return Fate::refused;
  if (config.endpoint < config.workers || header.common.kind != wire::Kind::open)
    return path.keep(id, datagram) ? Fate::taken : Fate::refused;
  return path.peer < config.workers ? take_open(path.peer, header, id, payload, now)
                                    : Fate::malformed;
}

// Takes a worker's OPEN of an op that this server does not have yet.
Fate Endpoint::take_open(uint16_t worker, const wire::Header& header, uint64_t id,
                         std::span<const uint8_t> payload, Nanos now) {
  Failure why;
  const Admission::Took took = admission_.add_open(id, worker, header.chunk, payload, why);
  if (why) fail(std::move(why), now);
  if (took == Admission::Took::whole) retire(now);  // admits what fits
  if (took == Admission::Took::malformed) return Fate::malformed;
  return took == Admission::Took::no_room ? Fate::refused : Fate::taken;
}

// Records that the peer has started the ops of a lane below this id.
void Endpoint::note_started(Path& path, uint64_t below) {
  const uint64_t before = path.started.next_of(below);
  if (!path.started.note_next(below) || port_.config.servers) return;
  for (auto& [id, op] : ops_.all()) {
    if (lane_of(id) != lane_of(below) || id < before || id >= below) continue;
    path.counted.waits_end(op->started, due_.clock);
    path.started.forget_early(id);
    changes_.touch(path, *op);
  }
}

// ---- acknowledgements

bool Endpoint::on_ack(Path& path, const wire::Ack& ack, Nanos now) {
  if (!path.on_ack(ack, now)) return false;
  std::span<const uint32_t> items = port_.acked.items;
  for (const auto& [first, packets] : port_.acked.runs) {
    acked(path, first, items.first(packets), now);
    items = items.subspan(packets);
  }
  if (!path.judge(ack, now)) return true;
  lost(path, now);
  path.teach(ack, [&] { return paths_.windows(now); }, now);
  retire(now);
  return true;
}

// Takes acknowledged packets that went together.
void Endpoint::acked(Path& path, const SentPacket& first, std::span<const uint32_t> items,
                     Nanos now) {
  Op* const op = ops_.find(first.op);
  if (!first.data()) {
    for (const uint32_t item : items) {
      if (!path.control.live(item)) continue;
      path.control.release(item);
      if (op) op->control_acked();
    }
    if (op) act(*op, now);
    return;
  }
  // An op that is done needs no more of its push.
  if (!op || (first.kind == wire::Kind::push && op->done())) return;
  changes_.touch(path, *op);
  op->acked(path.peer, first.kind, items, now);
  act(*op, now);
}

// Takes the packets in Port::lost, which have left flight and go again.
void Endpoint::lost(Path& path, Nanos now) {
  int64_t run = 0;
  uint64_t next = 0;
  for (const Recovery::Lost& each : port_.lost) {
    const SentPacket& packet = each.packet;
    run = each.why != Again::lost ? 0 : packet.number == next ? run + 1 : 1;
    next = packet.number + 1;
    Op* const op = ops_.find(packet.op);
    if (op) op->waits.burst.note(path.peer, run);
    if (!path.lost(each) || !op || (packet.kind == wire::Kind::push && op->done())) continue;
    op->lost(path.peer, packet.kind, packet.item, each.why, now);
    act(*op, now);
  }
  port_.lost.clear();
  changes_.touch(path);
}

// ---- the end of peers

bool Endpoint::on_bye(Path& path, std::span<const uint8_t> datagram, Nanos now) {
  const bool before = path.farewell.gone;
  const auto expected = [this](uint64_t lane) { return ops_.expected(lane); };
  if (!path.on_bye(datagram, expected)) return false;
  if (!path.farewell.gone) return true;
  for (auto& [id, op] : ops_.all()) {
    if (path.farewell.complete(id)) op->left(path.peer);
    act(*op, now);
  }
  if (before) return true;
  for (auto& [id, op] : ops_.all())
    if (!op->done() && !still_possible(*op, now)) return true;
  retire(now);
  return true;
}

// ---- the end of a batch

void Endpoint::flush(Nanos now) {
  due_.clock = now;
  if (due_.retire) retire(now);
  if (!arrived_.empty()) {
    std::ranges::sort(arrived_);
    for (const uint16_t peer : arrived_) paths_.at(peer).sample(now);
    port_.receiver.add_others(arrived_);
    for (const uint16_t peer : arrived_)
      if (Path* path = paths_.find(peer); path && path->share_credit(now)) changes_.touch(*path);
    arrived_.clear();
  }
  for (size_t peer; (peer = port_.receiver.next_slot(now)) != GrantSlots::kNone;)
    if (paths_.at(peer).share_credit(now)) changes_.touch(paths_.at(peer));
  catch_up();
}

}  // namespace gradwire
