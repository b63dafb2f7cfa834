// Receiving: the way of each packet from its datagram to its op.
#include <algorithm>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// The longest delay of an ACK; Rtt::kMaxAckDelay is above it.
constexpr Nanos kAckDelay = 800 * kMicrosecond;
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
  if (head->version != wire::kVersion) {
    // A peer keeps its version, so this datagram is foreign or damaged.
    if (path.heard) {
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
  path.last_heard = now;
  path.heard = true;
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
        path.note_next(wire::expand(ping->begun, path.next_of(ping->begun), wire::kBegunBits));
      if (kind == wire::Kind::ping) {
        wire::Reader more(datagram.subspan(wire::kPingBytes));
        if (const auto bytes = more.get<uint16_t>(); more.ok() && bytes) {
          if (bytes < wire::kMinDatagram) {
            ++counters.malformed;
            return;
          }
          limit(path, bytes, now);
        }
        path.pong_now = true;
        path.pong_stamp = ping->stamp;
        // A peer that still pings has not received this endpoint's ERROR.
        if (failure && path.errors_left == 0) path.errors_left = 1;
        return;
      }
      const auto stamp = static_cast<Nanos>(ping->stamp);
      const auto round = static_cast<Nanos>(wire::stamp_of(now - stamp));
      if (round < kSecond) {
        path.rtt.sample(round, 0, now);
        if (path.limit.answered(ping->stamp, now, path.rtt.round())) lowered(path, now);
        // The answered ping had the agreed length, or the length that the path has turned out to
        // carry.
        if (!path.connected && !path.limit.on_trial()) {
          path.connected = true;
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
      path.bye_acked |= bye->heard;
      if (!bye->leaves) return;
      path.answer_bye = !bye->heard && !closed;
      path.gone_op = std::max(path.gone_op, bye->complete_below);
      if (path.gone) return;
      path.gone = true;
      for (auto& [id, op] : ops)
        if (!(op->worker && op->done) && !still_possible(*op, now)) return;
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
  arrivals = true;
  const uint64_t number = wire::expand(header->packet_number, path.received.largest() + 1);
  const Nanos queue = path.delay.sample(header->send_time_us, arrival, now);
  const uint64_t bytes = datagram.size() + 42;
  path.batch_delay += static_cast<double>(queue) * static_cast<double>(bytes);
  path.batch_bytes += bytes;
  if (header->flags & wire::kOutOfCredit) receive_window.limited();
  if (path.unacked++ == 0) path.ack_due = now + kAckDelay;
  // A number may be far ahead: a peer whose packets were lost for long has used many.
  if (number == 0 || path.received.seen(number)) {
    ++counters.duplicates;
    path.ack_now = true;
    return;
  }
  if (number > path.received.largest()) path.demand = header->backlog;
  const uint64_t op_id = wire::expand(header->op, id_of(expected(header->op), lane_of(header->op)));
  const Fate fate = accept(path, *header, op_id, datagram, now);
  // A refused packet was not examined, and a number far ahead would make all earlier ones old.
  const bool far_ahead = number >= path.received.largest() + ReceivedPackets::kWindow;
  if (fate == Fate::malformed || (fate == Fate::refused && far_ahead)) return;
  const bool refused = fate == Fate::refused;
  if (refused) {
    ++counters.refused;
    path.refused = std::max(path.refused, number);
  } else {
    path.note_next(op_id + kLanes);
  }
  if (number > path.received.largest()) path.largest_arrival = arrival;
  const uint64_t before = path.received.largest();
  if (number < before) {
    path.loss_from.late();
  } else if (before) {
    path.loss_from.add(static_cast<double>(number - before - 1), 1, now);
    path.sent_meter.add((number - before) * bytes, now);
  }
  if (path.received.insert(number, refused)) {
    path.ack_now = true;
    receive_window.lost();
  }
  count_ecn(path, ecn, now);
  if (header->backlog == 0 || header->common.kind > wire::Kind::pull) path.ack_now = true;
  // At least three ACKs go for each share of credit: with fewer the sender waits, and each takes as
  // much of the return path as a tenth of a chunk. When ACKs are lost heavily every packet gets
  // one, or what has arrived would be sent again.
  const uint32_t each = path.loss_to(now) > kHeavyLoss ? 1 : path.share / 3;
  if (path.unacked >= std::clamp<uint32_t>(each, 1, 32)) path.ack_now = true;
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
  if (path.stash.size() >= kStashMost) {
    size_t all = 0;
    for (const auto& p : paths)
      if (p) all += p->stash.size();
    path.no_room = all >= kStashInAll;
    if (path.no_room) return Fate::refused;
  }
  Path::Stashed kept{op_id, {datagram.begin(), datagram.end()}};
  path.no_room = !memory.has_early(kept.cost());
  if (path.no_room) return Fate::refused;
  memory.early += kept.cost();
  path.stash.push_back(std::move(kept));
  // The peer sends no more of its backlog before this op starts, and would use spare credit all at
  // once then.
  const size_t most = server ? SIZE_MAX : most_early(path);
  const size_t room = most - std::min(most, path.stash.size());
  path.demand = static_cast<uint16_t>(std::min<size_t>(path.demand, room));
  return Fate::taken;
}

void Endpoint::Impl::replay(uint64_t op_id, Nanos now) {
  for (auto& p : paths) {
    if (!p) continue;
    std::vector<Path::Stashed> kept;
    std::vector<Path::Stashed> mine;
    for (Path::Stashed& s : p->stash) (s.op == op_id ? mine : kept).push_back(std::move(s));
    p->stash = std::move(kept);
    p->no_room = false;
    for (const Path::Stashed& s : mine) memory.early -= s.cost();
    size_t backlog = 0;
    for (const Path::Stashed& s : mine) {
      const std::span<const uint8_t> datagram(s.datagram);
      const wire::Header header = *wire::read_header(datagram);
      backlog = std::max<size_t>(backlog, header.backlog);
      Op* op = find(op_id);
      if (!op) continue;
      dispatch(*p, *op, header, datagram.subspan(wire::kHeaderBytes), now, true);
    }
    // The packets held back come now, so every peer's share of the window is set at once.
    if (config.servers == 0 && p->stash.empty() && backlog > mine.size())
      p->demand = std::max(p->demand, static_cast<uint16_t>(backlog - mine.size()));
  }
  share_credit(now);
}

Endpoint::Impl::Fate Endpoint::Impl::dispatch(Path& path, Op& op, const wire::Header& header,
                                              std::span<const uint8_t> payload, Nanos now,
                                              bool stashed) {
  const uint16_t source = path.peer;
  const bool from_worker = source < config.workers;
  uint16_t aggregator = UINT16_MAX;  // the source's number as an aggregator
  for (uint16_t a = 0; a < config.aggregators(); ++a)
    if (config.aggregator_endpoint(a) == source) aggregator = a;
  const wire::Kind kind = header.common.kind;
  bool good = false;
  switch (kind) {
    case wire::Kind::push: {
      if (!op.aggregator || !from_worker) break;
      const auto added = op.aggregator->add(source, header.chunk, payload,
                                            header.flags & wire::kTail, now, stashed);
      if (added == Aggregator::Added::no_memory) return Fate::refused;
      if (added == Aggregator::Added::malformed) break;
      note_class(op, header);
      after_sum(op, now);
      op.probes ? answer_push(op, source) : void_backlog(op, source);
      return Fate::taken;
    }
    case wire::Kind::pull: {
      if (op.done) return Fate::taken;
      if (aggregator == UINT16_MAX || !op.worker || !op.pulls || header.chunk >= op.grid.chunks() ||
          op.grid.aggregator_of(header.chunk) != aggregator ||
          !codec::valid(op.spec.plan.format, payload, op.grid.length(header.chunk)))
        break;
      if (op.pull[aggregator].insert(header.chunk)) {
        apply(op, header.chunk, payload.data(), now);
        op.push[aggregator].decided(header.chunk);
        if (op.lossy_pull) {
          op.ledgers[aggregator].arrived(header.chunk);
          answer_pull(op, aggregator);
        }
        maybe_done(op, now);
      }
      return Fate::taken;
    }
    case wire::Kind::open:
      if (!op.aggregator || !from_worker) break;
      good = on_message(op, source, kind, op.opens[source], header, payload, now);
      break;
    case wire::Kind::forgive: {
      if (!op.aggregator || !from_worker || payload.size() % 4) break;
      wire::Reader reader(payload);
      while (!reader.rest().empty()) {
        const auto chunk = reader.get<uint32_t>();
        if (op.aggregator->forgive(source, chunk)) continue;
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
      good = op.probes && on_pass(source, aggregator, op, header, payload, now);
      break;
    case wire::Kind::enough:
      good = on_enough(source, op, payload);
      break;
    case wire::Kind::stop: {
      if (op.probes) {
        good = on_pass(source, aggregator, op, header, payload, now);
        break;
      }
      if (op.done) return Fate::taken;
      if (aggregator == UINT16_MAX || !op.worker || payload.size() % 4) break;
      wire::Reader reader(payload);
      good = true;
      while (!reader.rest().empty()) {
        const auto region = reader.get<uint32_t>();
        good = good && !op.exact && region < op.spec.plan.regions.size() &&
               op.spec.plan.regions[region].bound > 0;
        if (good) op.push[aggregator].stop_region(region);
      }
      break;
    }
    case wire::Kind::close:
      // An exact plan with an exact pull has no CLOSE.
      if (aggregator == UINT16_MAX || !op.worker || !op.has_close) break;
      if (op.done) return Fate::taken;
      good = on_message(op, aggregator, kind, op.closes[aggregator], header, payload, now);
      break;
    case wire::Kind::commit:
      if (aggregator == UINT16_MAX || !op.worker || !op.committed) break;
      if (op.done) return Fate::taken;
      good = on_message(op, aggregator, kind, op.commits[aggregator], header, payload, now);
      break;
    case wire::Kind::fold:
      if (aggregator != 0 || !op.worker) break;
      if (op.done) return Fate::taken;
      good = on_message(op, aggregator, kind, op.fold, header, payload, now);
      break;
    default:
      break;
  }
  if (good) return Fate::taken;
  ++counters.malformed;
  return Fate::malformed;
}

// The number of paths in use. Each samples a part of the shared queue, so the more there are, the
// faster each mean must move.
uint64_t Endpoint::Impl::in_use(SmoothedDelay Path::* which, Nanos now) const {
  const auto fresh = std::count_if(paths.begin(), paths.end(), [which, now](const auto& p) {
    return p && ((*p).*which).fresh(now);
  });
  return std::max<uint64_t>(1, static_cast<uint64_t>(fresh));
}

// The delay of the queue at this endpoint's port, which the paths in use share: their smallest
// delay.
Nanos Endpoint::Impl::shared_delay(SmoothedDelay Path::* which, Nanos now) const {
  Nanos least = kNever;
  for (const auto& p : paths)
    if (p && ((*p).*which).fresh(now)) least = std::min(least, ((*p).*which).mean());
  return least == kNever ? 0 : least;
}

void Endpoint::Impl::flush(Nanos now) {
  if (retire_due) retire(now);
  if (arrivals) {
    arrivals = false;
    for (auto& p : paths) {
      if (!p || p->batch_bytes == 0) continue;
      p->delay_from.add(static_cast<Nanos>(p->batch_delay / static_cast<double>(p->batch_bytes)),
                        p->batch_bytes * in_use(&Path::delay_from, now), now);
      receive_window.sample(p->batch_bytes, shared_delay(&Path::delay_from, now), p->rtt.round(),
                            p->rtt.minimum(), p->loss_from.share(now) > kHeavyLoss, now);
      p->ack_delay += p->batch_delay;
      p->ack_bytes += p->batch_bytes;
      p->batch_delay = 0;
      p->batch_bytes = 0;
    }
    share_credit(now);
    counters.send_window = send_window.bytes();
    counters.receive_window = receive_window.bytes();
    counters.queue_delay = receive_window.queue_delay();
  }
}

}  // namespace gradwire
