// Receiving: the way of each packet from its datagram to its op.
#include <algorithm>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// Bytes of an ERROR's text.
constexpr size_t kLongestError = 1024;
// Control frames waiting for a peer above which its PROBEs are refused.
constexpr size_t kMostFrames = 1024;
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
  clock = now;
  touch(path);
  if (head->version != wire::kVersion) {
    // A peer keeps its version, so this datagram is foreign or damaged.
    if (path.life.heard) {
      ++counters.malformed;
      return;
    }
    fail({name(source) + " speaks protocol version " + std::to_string(head->version) + ", " +
              name(config.endpoint) + " speaks " + std::to_string(wire::kVersion),
          source, Cause::version},
         now);
    return;
  }
  ++counters.packets_received;
  counters.bytes_received += datagram.size();
  path.life.note(now);
  on_packet(path, head->kind, datagram, now, arrival, ecn);
}

void Endpoint::Impl::on_packet(Path& path, wire::Kind kind, std::span<const uint8_t> datagram,
                               Nanos now, Nanos arrival, uint8_t ecn) {
  const uint16_t source = path.peer;
  if (wire::is_reliable(kind)) {
    on_reliable(path, datagram, now, arrival, ecn);
    return;
  }
  switch (kind) {
    case wire::Kind::ack: {
      const auto ack = wire::read_ack(datagram);
      if (ack) {
        on_ack(path, *ack, now);
      } else {
        ++counters.malformed;
      }
      return;
    }
    case wire::Kind::ping:
    case wire::Kind::pong: {
      const auto ping = wire::read_ping(datagram);
      if (!ping) {
        ++counters.malformed;
        return;
      }
      if (source < config.workers)
        note_started(
            path, wire::expand(ping->begun, path.started.next_of(ping->begun), wire::kBegunBits));
      if (kind == wire::Kind::ping) {
        wire::Reader more(datagram.subspan(wire::kPingBytes));
        if (const auto bytes = more.get<uint16_t>(); more.ok() && bytes) {
          if (bytes < wire::kMinDatagram) {
            ++counters.malformed;
            return;
          }
          limit(path, bytes, now);
        }
        path.life.pong_now = true;
        path.life.pong_stamp = ping->stamp;
        // A peer that still pings has not received this endpoint's ERROR.
        if (failure && path.farewell.errors_left == 0) path.farewell.errors_left = 1;
        return;
      }
      const auto stamp = static_cast<Nanos>(ping->stamp);
      const auto round = static_cast<Nanos>(wire::stamp_of(now - stamp));
      if (round < kSecond) {
        path.recovery.rtt.sample(round, 0, now);
        if (path.limit.answered(ping->stamp, now, path.recovery.rtt.round())) lowered(path, now);
        // The answered ping had the agreed length, or the length that the path has turned out to
        // carry.
        if (!path.life.connected && !path.limit.on_trial()) {
          path.life.connected = true;
          Event event;
          event.type = Event::Type::connected;
          event.endpoint = source;
          events.push_back(std::move(event));
        }
      }
      return;
    }
    case wire::Kind::fragment:
      on_fragment(path, datagram, now, arrival, ecn);
      return;
    case wire::Kind::error: {
      wire::Reader reader(datagram.subspan(wire::kCommonBytes));
      const auto rank = reader.get<int32_t>();
      const auto cause = static_cast<Cause>(reader.get<uint8_t>());
      std::string text(reinterpret_cast<const char*>(reader.rest().data()), reader.rest().size());
      if (!reader.ok() || text.size() > kLongestError) {
        ++counters.malformed;
        return;
      }
      fail({name(source) + " reports: " + text, rank, cause}, now);
      return;
    }
    case wire::Kind::bye: {
      const auto bye = wire::read_bye(datagram);
      if (!bye) {
        ++counters.malformed;
        return;
      }
      path.farewell.acknowledged |= bye->heard;
      if (!bye->leaves) return;
      path.farewell.answer = !bye->heard && !closed;
      path.farewell.gone_op = std::max(path.farewell.gone_op, bye->complete_below);
      if (path.farewell.gone) return;
      path.farewell.gone = any_gone = true;
      for (auto& [id, op] : ops) op_changed(*op);
      for (auto& [id, op] : ops)
        if (!(op->done()) && !still_possible(*op, now)) return;
      retire(now);
      return;
    }
    default:
      ++counters.malformed;
  }
}

void Endpoint::Impl::on_reliable(Path& path, std::span<const uint8_t> datagram, Nanos now,
                                 Nanos arrival, uint8_t ecn) {
  const auto header = wire::read_header(datagram);
  if (!header || datagram.size() > config.datagram_bytes) {
    ++counters.malformed;
    return;
  }
  const uint64_t number = wire::expand(header->packet_number, path.acks.largest() + 1);
  const Nanos queue = path.arriving.delay.sample(header->send_time_us, arrival, now);
  const uint64_t bytes = datagram.size() + wire::kOverhead;
  if (path.arriving.batch.bytes == 0) arrived.push_back(path.peer);
  path.arriving.batch.add(queue, bytes);
  if (header->flags & wire::kOutOfCredit) receive_window.limited();
  path.acks.arrived(now);
  // A number may be far ahead: a peer whose packets were lost for long has used many.
  if (number == 0 || path.acks.seen(number)) {
    ++counters.duplicates;
    path.acks.hurry();
    return;
  }
  if (number > path.acks.largest()) credit.ask(path.grant, header->backlog);
  const uint64_t op_id = wire::expand(header->op, id_of(expected(header->op), lane_of(header->op)));
  const Fate fate = accept(path, *header, op_id, datagram, now);
  // A refused packet was not examined, and a number far ahead would make all earlier ones old.
  const bool far_ahead = number >= path.acks.largest() + ReceivedPackets::kWindow;
  if (fate == Fate::malformed || (fate == Fate::refused && far_ahead)) return;
  const bool refused = fate == Fate::refused;
  if (refused) {
    ++counters.refused;
  } else {
    note_started(path, op_id + kLanes);
  }
  const uint64_t before = path.acks.largest();
  if (number < before) {
    path.arriving.loss.late();
  } else if (before) {
    path.arriving.loss.add(static_cast<double>(number - before - 1), 1, now);
    path.arriving.rate.add((number - before) * bytes, now);
  }
  if (path.acks.record(number, refused, arrival)) receive_window.lost();
  count_ecn(path, ecn, now);
  if (header->backlog == 0 || header->common.kind > wire::Kind::pull) path.acks.hurry();
  // At least three ACKs go for each share of credit: with fewer the sender waits, and each takes as
  // much of the return path as a tenth of a chunk. When ACKs are lost heavily every packet gets
  // one, or what has arrived would be sent again.
  path.acks.after(path.loss_to.share(now) > kHeavyLoss ? 1 : path.grant.share / 3);
}

// Takes, refuses or rejects a new packet; only a taken one is acknowledged. A refused packet has
// crossed the network and will be sent again. A malformed one is not from the peer and leaves no
// trace.
Endpoint::Impl::Fate Endpoint::Impl::accept(Path& path, const wire::Header& header, uint64_t op_id,
                                            std::span<const uint8_t> datagram, Nanos now) {
  if (failure) return Fate::malformed;
  if (finished(op_id)) return Fate::taken;
  const auto payload = datagram.subspan(wire::kHeaderBytes);
  Op* op = find(op_id);
  if (op) return dispatch(path, *op, header, payload, now);
  const bool server = config.endpoint >= config.workers;
  if (number_of(op_id) >= expected(op_id) + kOpsAhead) return Fate::refused;
  if (server && header.common.kind == wire::Kind::open)
    return serve_open(path, header, op_id, payload, now);
  if (path.stash.packets.size() >= kStashMost) {
    size_t all = 0;
    for (const auto& p : paths)
      if (p) all += p->stash.packets.size();
    path.stash.no_room = all >= kStashInAll;
    if (path.stash.no_room) return Fate::refused;
  }
  Stash::Packet kept{op_id, {datagram.begin(), datagram.end()}};
  path.stash.no_room = !memory.has_early(kept.cost());
  if (path.stash.no_room) return Fate::refused;
  memory.early += kept.cost();
  path.stash.packets.push_back(std::move(kept));
  // The peer sends no more of its backlog before this op starts, and would use spare credit all at
  // once then.
  const size_t most = server ? SIZE_MAX : most_early(path);
  const size_t room = most - std::min(most, path.stash.packets.size());
  credit.ask(path.grant, std::min<size_t>(path.grant.demand, room));
  return Fate::taken;
}

void Endpoint::Impl::replay(uint64_t op_id, Nanos now) {
  for (auto& p : paths) {
    if (!p) continue;
    std::vector<Stash::Packet> kept;
    std::vector<Stash::Packet> mine;
    for (Stash::Packet& s : p->stash.packets) (s.op == op_id ? mine : kept).push_back(std::move(s));
    p->stash.packets = std::move(kept);
    p->stash.no_room = false;
    for (const Stash::Packet& s : mine) memory.early -= s.cost();
    size_t told = 0;
    for (const Stash::Packet& s : mine) {
      const std::span<const uint8_t> datagram(s.datagram);
      const wire::Header header = *wire::read_header(datagram);
      told = std::max<size_t>(told, header.backlog);
      Op* op = find(op_id);
      if (!op) continue;
      dispatch(*p, *op, header, datagram.subspan(wire::kHeaderBytes), now, true);
    }
    // The packets held back come now, so every peer's share of the window is set at once.
    if (config.servers == 0 && p->stash.packets.empty() && told > mine.size())
      credit.ask(p->grant, std::max<size_t>(p->grant.demand, told - mine.size()));
  }
  for (auto& p : paths)
    if (p) share_credit(*p, now);
}

Endpoint::Impl::Fate Endpoint::Impl::dispatch(Path& path, Op& op, const wire::Header& header,
                                              std::span<const uint8_t> payload, Nanos now,
                                              bool stashed) {
  const uint16_t source = path.peer;
  const bool from_worker = source < config.workers;
  const uint16_t aggregator = config.aggregator_at(source);
  const wire::Kind kind = header.common.kind;
  bool good = false;
  switch (kind) {
    case wire::Kind::push: {
      if (!op.aggregator || !from_worker) break;
      const auto added = op.aggregator->sum.add(source, header.chunk, payload,
                                                header.flags & wire::kTail, now, stashed);
      if (added == Aggregator::Added::no_memory) return Fate::refused;
      if (added == Aggregator::Added::malformed) break;
      note_class(op, header);
      after_sum(op, now);
      op.rules.probes ? answer_push(op, source) : void_backlog(op, source);
      return Fate::taken;
    }
    case wire::Kind::pull: {
      if (op.done()) return Fate::taken;
      if (aggregator == kNoAggregator || !op.worker || !op.rules.pulls ||
          header.chunk >= op.grid.chunks() || op.grid.aggregator_of(header.chunk) != aggregator ||
          !codec::valid(op.spec.plan.format, payload, op.grid.length(header.chunk)))
        break;
      if (op.worker->pull[aggregator].insert(header.chunk)) {
        apply(op, header.chunk, payload.data(), now);
        op.worker->push[aggregator].decided(header.chunk);
        recount(op, path);
        if (op.rules.lossy_pull) {
          op.worker->ledgers[aggregator].arrived(header.chunk);
          answer_pull(op, aggregator);
        }
        maybe_done(op, now);
      }
      return Fate::taken;
    }
    case wire::Kind::open:
      if (!op.aggregator || !from_worker) break;
      good = on_message(op, source, kind, op.aggregator->opens[source], header, payload, now);
      break;
    case wire::Kind::forgive: {
      if (!op.aggregator || !from_worker || payload.size() % 4) break;
      wire::Reader reader(payload);
      while (!reader.rest().empty()) {
        const auto chunk = reader.get<uint32_t>();
        if (op.aggregator->sum.forgive(source, chunk)) continue;
        fail({name(source) + " gave up chunk " + std::to_string(chunk) + " of step " +
                  std::to_string(op.spec.step) + ", which its bound does not allow",
              source, Cause::bound},
             now);
        return Fate::malformed;
      }
      after_sum(op, now);
      return Fate::taken;
    }
    case wire::Kind::probe:
      // Each PROBE has an answer, and a correct peer sends the next only after it has taken that.
      if (path.control.open() >= kMostFrames) return Fate::refused;
      [[fallthrough]];
    case wire::Kind::bitmap:
      good = op.rules.probes && on_pass(source, aggregator, op, header, payload, now);
      break;
    case wire::Kind::enough:
      good = on_enough(source, op, payload);
      break;
    case wire::Kind::stop: {
      if (op.rules.probes) {
        good = on_pass(source, aggregator, op, header, payload, now);
        break;
      }
      if (op.done()) return Fate::taken;
      if (aggregator == kNoAggregator || !op.worker || payload.size() % 4) break;
      wire::Reader reader(payload);
      good = true;
      while (!reader.rest().empty()) {
        const auto region = reader.get<uint32_t>();
        good = good && !op.rules.exact && region < op.spec.plan.regions.size() &&
               op.spec.plan.regions[region].bound > 0;
        if (good) op.worker->push[aggregator].stop_region(region);
      }
      recount(op, path);
      break;
    }
    case wire::Kind::close:
      // An exact plan with an exact pull has no CLOSE.
      if (aggregator == kNoAggregator || !op.worker || !op.rules.has_close) break;
      if (op.done()) return Fate::taken;
      good = on_message(op, aggregator, kind, op.worker->closes[aggregator], header, payload, now);
      break;
    case wire::Kind::commit:
      if (aggregator == kNoAggregator || !op.worker || !op.rules.committed) break;
      if (op.done()) return Fate::taken;
      good = on_message(op, aggregator, kind, op.worker->commits[aggregator], header, payload, now);
      break;
    case wire::Kind::fold:
      if (aggregator != 0 || !op.worker) break;
      if (op.done()) return Fate::taken;
      good = on_message(op, aggregator, kind, op.worker->fold, header, payload, now);
      break;
    default:
      break;
  }
  if (good) return Fate::taken;
  ++counters.malformed;
  return Fate::malformed;
}

void Endpoint::Impl::flush(Nanos now) {
  clock = now;
  if (retire_due) retire(now);
  if (arrived.empty()) return;
  std::ranges::sort(arrived);
  for (const uint16_t peer : arrived) {
    Path& path = *paths[peer];
    Arriving& from = path.arriving;
    arriving.add(peer, from.batch.mean(), from.batch.bytes, now);
    const Rtt& rtt = path.recovery.rtt;
    receive_window.sample(from.batch.bytes, arriving.shared(now), rtt.round(), rtt.minimum(),
                          from.loss.share(now) > kHeavyLoss, now);
    path.acks.queued(from.batch.delay, from.batch.bytes);
    from.batch = {};
  }
  share_credit(now);
  arrived.clear();
  counters.send_window = sender.window().bytes();
  counters.receive_window = receive_window.bytes();
  counters.queue_delay = receive_window.queue_delay();
}

}  // namespace gradwire
