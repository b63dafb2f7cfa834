// Sending: ACKs, pings and farewells first, then control frames, then trains of chunks.
#include <algorithm>
#include <utility>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {

// The interval of the first farewells (BYE, ERROR).
constexpr Nanos kFarewellInterval = 10 * kMillisecond;
// Farewells at that interval; each further one doubles it.
constexpr uint32_t kQuickFarewells = 3;
// Doublings at most.
constexpr uint32_t kFarewellDoublings = 2;
// The pace above BtlBw that looks for a higher rate while the queue is almost empty.
constexpr double kProbeGain = 0.2;
// With a queue above this share of the delay target the pace is BtlBw.
constexpr double kProbeQueue = 0.75;
// A pace above BtlBw may add this share of the delay target to the queue in a round of a long path.
constexpr double kProbeRoom = 0.5;
// In slow start on a long path, the pace is this multiple of a window per round.
constexpr double kRampGain = 1.25;
// The least time between two ACKs on a long path.
constexpr Nanos kAckSpacing = 800 * kMicrosecond;
// Seconds of the pace that a late timer may catch up on; two trains of a long path.
constexpr double kPaceDepth = 0.0005;
// A window goes in at least so many trains: long trains of several senders collide in one port and
// leave others idle.
constexpr double kTrainsPerWindow = 16;
// Datagrams; a shorter train would spend a send call on few packets.
constexpr uint32_t kShortestTrain = 4;
// Elements encoded for one train. Its packets are stamped before, so the time of encoding looks
// like queueing to the receiver.
constexpr uint32_t kMostEncoded = 1U << 16;
// Chunks for a peer that is not known to have started their op. Where all start together fewer go
// before its OPEN arrives, and the peer stashes more in any case.
constexpr size_t kMostEarly = kStashMost / 2;
// Bytes of a failure's text that travel in ERROR.
constexpr size_t kLongestReport = 800;

uint8_t* begin_control(Train& train, uint16_t destination, size_t bytes) {
  train.destination = destination;
  train.control.resize(bytes);
  return train.control.data();
}

void end_control(Train& train, size_t bytes, uint8_t dscp, uint8_t ecn = kNotEct) {
  train.dscp = dscp;
  train.ecn = ecn;
  train.count = 1;
  train.segment_bytes = train.total_bytes = static_cast<uint32_t>(bytes);
  train.spans[0] = {train.control.data(), bytes};
  train.spans[1] = {nullptr, 0};
}

}  // namespace

void Endpoint::Impl::sent(Path& path, SentPacket& packet, Nanos now) {
  packet.time = now;
  path.limit.sent(packet.bytes, now);
  packet.ect = path.ecn.capable();
  if (packet.ect) path.ecn.sent();
  in_flight_bytes += packet.bytes;
  path.probe_base = now;
  const bool data = packet.kind == wire::Kind::push || packet.kind == wire::Kind::pull;
  if (path.probes && data) --path.probes;  // control frames need no credit
  repeats = std::max(repeats - 1, -kRepeatsAtOnce);
  path.starved = false;
  breaker.sent(packet.bytes, loss_to.share(now));
  ++counters.packets_sent;
  counters.bytes_sent += packet.bytes;
}

void Endpoint::Impl::write_ping(Path& path, Nanos now, bool pong, size_t bytes, Train& train) {
  uint8_t* at = begin_control(train, path.peer, bytes);
  std::fill_n(at, bytes, uint8_t{0});
  constexpr uint64_t mask = (uint64_t{1} << wire::kBegunBits) - 1;
  wire::write_ping(
      at, common(pong ? wire::Kind::pong : wire::Kind::ping),
      {pong ? path.pong_stamp : wire::stamp_of(now), static_cast<uint32_t>(next_id(path) & mask)});
  if (path.limit.reduced() && bytes >= wire::kPingBytes + wire::kLimitBytes)
    wire::put(at + wire::kPingBytes, static_cast<uint16_t>(path.limit.bytes()));
  end_control(train, bytes, control_dscp);
}

bool Endpoint::Impl::transmit_unreliable(Path& path, Nanos now, Train& train) {
  // On a long path ACKs are spaced: frequent gaps would cause one per packet, and report nothing
  // sooner.
  const Nanos rtprop = path.rtt.minimum();
  if (path.ack_now && long_path(rtprop)) {
    const Nanos next = path.last_ack + std::min(rtprop / 32, kAckSpacing);
    if (now < next) {
      path.ack_now = false;
      path.ack_due = std::min(path.ack_due, next);
    }
  }
  if (path.ack_now || path.ack_due <= now) {
    path.last_ack = now;
    wire::Ack ack{};
    ack.largest = static_cast<uint32_t>(path.received.largest());
    ack.refused = static_cast<uint32_t>(path.refused);
    ack.credit = static_cast<uint32_t>(path.granted);
    ack.loss = static_cast<uint16_t>(path.loss_from.share(now) * 65'536.0);
    ack.share = path.part * (config.datagram_bytes + 42);
    ack.ect0 = path.ecn_seen.ect0;
    ack.ce = path.ecn_seen.ce;
    ack.delay_us = static_cast<uint32_t>(
        std::clamp<Nanos>((now - path.largest_arrival) / kMicrosecond, 0, 1'000'000));
    ack.queue_us = static_cast<uint32_t>(
        path.ack_bytes == 0
            ? 0.0
            : std::max(0.0, path.ack_delay / static_cast<double>(path.ack_bytes)) / kMicrosecond);
    // The bitmap covers twice the share, or what arrived since the last ACK: a batch may hold
    // hundreds.
    uint64_t span = std::max<uint64_t>(path.share, path.received.largest() - path.largest_told);
    const double lossy = path.loss_from.share(now);
    if (lossy > kHeavyLoss && long_path(rtprop)) span = path.received.largest();
    const auto words =
        static_cast<uint16_t>(std::clamp<uint64_t>(span / 32, 2, most_ack_words(path)));
    path.largest_told = path.received.largest();
    path.received.fill(ack, words);
    uint8_t* at = begin_control(train, path.peer, wire::kAckFixedBytes + 8 * wire::kAckMaxWords);
    end_control(train, wire::write_ack(at, common(wire::Kind::ack), ack), control_dscp);
    path.ack_now = false;
    path.ack_due = kNever;
    // Under heavy loss ACKs are lost too, so they are repeated for two rounds.
    if (lossy > kHeavyLoss && path.rtt.any() && now - path.largest_arrival < 2 * path.rtt.round())
      path.ack_due = now + repeat_after(path, now);
    path.unacked = 0;
    path.ack_delay = 0;
    path.ack_bytes = 0;
    path.granted_sent = path.granted;
    ++counters.acks_sent;
    return true;
  }
  if (path.ping_now || path.pong_now) {
    const bool pong = path.pong_now;
    (pong ? path.pong_now : path.ping_now) = false;
    // Pings have the longest datagram's length until one is answered, so that a path that does not
    // carry it shows before the first step.
    const size_t plain = wire::kPingBytes + (path.limit.reduced() ? wire::kLimitBytes : 0);
    const size_t bytes = pong ? wire::kPingBytes : path.connected ? plain : path.limit.bytes();
    if (path.first_ping == 0) path.first_ping = now;
    write_ping(path, now, pong, bytes, train);
    return true;
  }
  if (!failure && !path.gone) {
    if (const uint32_t bytes = path.limit.ping(now, wire::stamp_of(now))) {
      write_ping(path, now, false, bytes, train);
      train.whole = true;
      return true;
    }
  }
  if (path.errors_left && now >= path.next_farewell) {
    --path.errors_left;
    path.next_farewell = now + kFarewellInterval;
    const size_t length = std::min<size_t>(failure.text.size(), kLongestReport);
    const size_t bytes = wire::kCommonBytes + 5 + length;
    uint8_t* at = begin_control(train, path.peer, bytes);
    wire::write_common(at, common(wire::Kind::error));
    at = wire::put(at + wire::kCommonBytes, failure.rank);
    at = wire::put(at, failure.cause);
    std::memcpy(at, failure.text.data(), length);
    end_control(train, bytes, control_dscp);
    return true;
  }
  return transmit_farewell(path, now, train);
}

// The id that a PING reports: the op that starts next in one lane. Lanes take turns.
uint64_t Endpoint::Impl::next_id(Path& path) const {
  for (size_t i = 0; i < lanes.size(); ++i) {
    path.pinged_lane = static_cast<uint16_t>((path.pinged_lane + 1u) % lanes.size());
    const uint64_t next = lanes[path.pinged_lane].next;
    if (next > 0) return id_of(next, path.pinged_lane);
  }
  return 0;
}

// Sends BYE until the peer acknowledges it, and one as the answer to each BYE that asks for it.
bool Endpoint::Impl::transmit_farewell(Path& path, Nanos now, Train& train) {
  const bool due = closing && !closed && !farewell_over(path) && now >= path.next_farewell;
  if (!due && !path.answer_bye) return false;
  path.answer_bye = false;
  if (closing) {
    ++path.byes_sent;
    const uint32_t doublings = path.byes_sent - std::min(path.byes_sent, kQuickFarewells);
    path.next_farewell = now + (kFarewellInterval << std::min(doublings, kFarewellDoublings));
  }
  const bool worker = config.endpoint < config.workers;
  wire::Bye bye{worker ? std::min(made, abandoned) : 0, closing, path.gone};
  for (const auto& [id, op] : ops)
    if (op->worker && !op->done) bye.complete_below = std::min(bye.complete_below, op->place);
  uint8_t* at = begin_control(train, path.peer, wire::kByeBytes);
  wire::write_bye(at, common(wire::Kind::bye), bye);
  end_control(train, wire::kByeBytes, control_dscp);
  return true;
}

bool Endpoint::Impl::transmit_control(Path& path, Nanos now, Train& train) {
  if (!path.control.waiting() || path.sent.full()) return false;
  const uint32_t handle = path.control.take();
  const ControlFrame& frame = path.control.at(handle);
  const size_t bytes = wire::kHeaderBytes + frame.payload.size();
  SentPacket& packet = path.sent.push();
  packet.op = frame.op;
  packet.item = handle;
  packet.kind = frame.kind;
  packet.bytes = static_cast<uint16_t>(bytes);
  uint8_t* at = begin_control(train, path.peer, bytes);
  wire::Header header{};
  header.common = common(frame.kind);
  header.packet_number = static_cast<uint32_t>(packet.number);
  header.send_time_us = us(now);
  header.op = static_cast<uint32_t>(frame.op);
  header.chunk = frame.part;
  header.backlog = static_cast<uint16_t>(std::min<uint64_t>(backlog(path), 65'535));
  wire::write_header(at, header);
  std::memcpy(at + wire::kHeaderBytes, frame.payload.data(), frame.payload.size());
  end_control(train, bytes, control_dscp, path.ecn.capable() ? kEct0 : kNotEct);
  path.control_sent.push_back(packet.number);
  sent(path, packet, now);
  if (Op* op = find(frame.op)) {
    ++op->packets_sent;
    op->bytes_sent += bytes;
  }
  return true;
}

// True when the peer may not have started this op: no packet of it, or of a later op of its lane,
// has arrived. A server has an op from the first OPEN on.
bool Endpoint::Impl::early(const Path& path, const Op& op) const {
  return config.servers == 0 && !path.has_started(op.id);
}

// The chunks that may go early on a path, in either direction.
size_t Endpoint::Impl::most_early(const Path& path) const {
  if (!long_path(path.rtt.minimum())) return kMostEarly;
  return std::max(kMostEarly, kStashInAll / (paths.size() - 1));
}

// How many more may go early. Packets that a late peer refuses would be sent again and again.
uint64_t Endpoint::Impl::early_room(const Path& path) const {
  if (config.servers) return UINT64_MAX;
  const size_t most = most_early(path);
  size_t gone = 0;
  for (const auto& [id, op] : ops)
    if (early(path, *op)) gone += op->early[path.peer];
  return most - std::min(most, gone);
}

// The chunks to send now, without those that wait for the peer to start their op.
uint64_t Endpoint::Impl::backlog(const Path& path) const {
  const bool room = early_room(path) > 0;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) total += backlog(path, *op, room);
  return total;
}

// The same for one op. `room`: chunks may go before the peer has started it.
uint64_t Endpoint::Impl::backlog(const Path& path, const Op& op, bool room) const {
  uint64_t total = 0;
  if (op.aggregator && path.peer < config.workers) total += op.back[path.peer].backlog();
  if (op.worker && !op.done)
    for (uint16_t a = 0; a < config.aggregators(); ++a)
      if (config.aggregator_endpoint(a) == path.peer)
        total += op.push[a].backlog(room || !early(path, op));
  return total;
}

// The lane of the next train to a peer. Lanes take turns, so that chunks which the peer cannot take
// yet delay no other lane.
uint16_t Endpoint::Impl::next_lane(const Path& path) const {
  const bool room = early_room(path) > 0;
  uint64_t best = UINT64_MAX;
  for (const auto& [id, op] : ops) {
    const uint64_t turn = (lane_of(id) + kLanes - path.lane - 1) % kLanes;
    if (turn < best && backlog(path, *op, room) > 0) best = turn;
  }
  return static_cast<uint16_t>((path.lane + 1 + best) % kLanes);
}

// Encodes a worker's chunk as its plan has it on the wire, into the train's part of the scratch
// memory. A chunk is encoded whenever it is sent; its values stay the same until it is decided.
const uint8_t* Endpoint::Impl::encode(const codec::Format& format, const float* values,
                                      uint32_t count, const Train& train) {
  if (encoded.empty()) encoded.resize(Train::kMaxBytes);
  uint8_t* const at = encoded.data() + train.total_bytes;
  codec::encode(format, values, count, at);
  return at;
}

bool Endpoint::Impl::transmit_data(Path& path, Nanos now, Train& train, uint32_t most) {
  uint64_t left = backlog(path);
  if (left == 0) return false;
  most = static_cast<uint32_t>(
      std::min({size_t{most}, Train::kMaxSegments, Train::kMaxBytes / config.datagram_bytes}));
  train.destination = path.peer;
  train.count = 0;
  train.total_bytes = 0;
  train.segment_bytes = 0;
  uint32_t encoded = 0;
  uint64_t room = early_room(path);
  const bool by_share = paced_by == &path || path.held;
  path.lane = next_lane(path);
  for (auto& [id, op] : ops) {
    if (lane_of(id) != path.lane) continue;
    uint16_t aggregator = UINT16_MAX;
    if (op->worker && !op->done)
      for (uint16_t a = 0; a < config.aggregators(); ++a)
        if (config.aggregator_endpoint(a) == path.peer) aggregator = a;
    const codec::Format& format = op->spec.plan.format;
    const auto full =
        static_cast<uint32_t>(wire::kHeaderBytes + format.bytes(op->grid.chunk_elements));
    // Datagrams of one train have equal lengths, and one that is sent in fragments is a train of
    // its own.
    const bool in_parts = full > path.limit.bytes();
    if (train.count && (full != train.segment_bytes || in_parts)) continue;
    const bool is_early = early(path, *op);
    while (train.count < most && !path.sent.full()) {
      const bool fresh = !is_early || room > 0;
      uint32_t chunk = 0;
      bool again = false;
      const void* payload = nullptr;
      uint16_t flags = 0;
      const uint8_t dscp = next_dscp(*op, aggregator, path.peer, fresh);
      if (train.count && dscp != train.dscp) return true;  // a train has one DSCP
      wire::Kind kind = wire::Kind::push;
      // Pushes go first, because the results of all workers wait for them.
      if (aggregator != UINT16_MAX && op->push[aggregator].next(chunk, again, fresh)) {
        const float* values = op->spec.data + op->grid.offset[chunk];
        payload = format.plain() ? static_cast<const void*>(values)
                                 : encode(format, values, op->grid.length(chunk), train);
        if (!format.plain()) encoded += op->grid.length(chunk);
        flags = class_flag(*op, chunk);
        if (op->push[aggregator].in_tail()) flags |= wire::kTail;
        if (is_early && !again) ++op->early[aggregator], room -= std::min<uint64_t>(room, 1);
      } else if (op->aggregator && path.peer < config.workers &&
                 op->back[path.peer].next(chunk, again)) {
        kind = wire::Kind::pull;
        payload = op->aggregator->result_payload(chunk);
      } else {
        break;
      }
      if (left) --left;
      const size_t payload_bytes = format.bytes(op->grid.length(chunk));
      SentPacket& packet = path.sent.push();
      packet.op = id;
      packet.item = chunk;
      packet.kind = kind;
      packet.bytes = static_cast<uint16_t>(wire::kHeaderBytes + payload_bytes);
      wire::Header header{};
      header.common = common(kind);
      header.packet_number = static_cast<uint32_t>(packet.number);
      header.send_time_us = us(now);
      header.op = static_cast<uint32_t>(id);
      header.chunk = chunk;
      header.backlog = static_cast<uint16_t>(std::min<uint64_t>(left, 65'535));
      if (left && (packet.number >= path.credit || by_share)) flags |= wire::kOutOfCredit;
      header.flags = flags;
      uint8_t* at = train.headers[train.count].data();
      wire::write_header(at, header);
      train.spans[2 * train.count] = {at, wire::kHeaderBytes};
      train.spans[2 * train.count + 1] = {payload, payload_bytes};
      if (train.count == 0) {
        train.segment_bytes = packet.bytes;
        train.dscp = dscp;
        train.ecn = path.ecn.capable() ? kEct0 : kNotEct;
      }
      train.total_bytes += packet.bytes;
      ++train.count;
      sent(path, packet, now);
      ++op->packets_sent;
      op->bytes_sent += packet.bytes;
      if (again) {
        ++op->retransmissions;
        ++counters.retransmissions;
      }
      // A shorter datagram ends a train.
      if (packet.bytes < full || encoded >= kMostEncoded || in_parts) return true;
    }
    if (train.count >= most || path.sent.full()) break;
  }
  return train.count > 0;
}

bool Endpoint::Impl::transmit(Nanos now, Train& train) {
  train.whole = false;
  if (!transmit_next(now, train)) return false;
  Path& path = *paths[train.destination];
  if (train.segment_bytes > path.limit.bytes() && !train.whole && path.connected)
    split(path, train);
  return true;
}

bool Endpoint::Impl::transmit_next(Nanos now, Train& train) {
  for (auto& p : paths)
    if (p && transmit_unreliable(*p, now, train)) return true;
  if (failure) return false;
  end_passes();
  repeat(now);
  for (auto& p : paths)
    // A peer that has left stays for a while to serve what others still need of it.
    if (p && (!p->gone || now - p->last_heard < kHeardOf) && transmit_control(*p, now, train))
      return true;

  return transmit_train(now, train);
}

// The longest of the long paths that have a backlog; rtprop is 0 when there is none.
Endpoint::Impl::LongPath Endpoint::Impl::longest_path() const {
  LongPath far;
  uint32_t destinations = 0;
  for (const auto& p : paths) {
    if (!p || p->gone || !long_path(p->rtt.minimum()) || backlog(*p) == 0) continue;
    ++destinations;
    far.path = p.get();
    far.rtprop = std::max(far.rtprop, p->rtt.minimum());
    far.round = std::max(far.round, p->rtt.smoothed());
    far.window += p->window;
  }
  far.alone = far.path && destinations == 1;
  return far;
}

// The receiver's window for the only destination, on a long path. It applies in place of the send
// window, which would have to learn this sender's share of an incast. It is the smaller the more
// the queue exceeds the target, whoever fills it.
double Endpoint::Impl::led_by(const LongPath& far) const {
  if (send_window.ramps()) return 0;
  const auto target = static_cast<double>(send_window.target());
  const auto queue = static_cast<double>(send_window.queue_delay());
  return far.window * std::min(1.0, target / std::max(queue, 1.0));
}

// Nanoseconds that a train waits for its path's part of the receiver's window, which is paced over
// a round; 0: none. It is for several long paths. A receiver's port has no queue for the bytes that
// all its senders have saved up while the credit of other receivers was used up.
Nanos Endpoint::Impl::hold(Path& path, double train_bytes, Nanos now) const {
  if (!long_path(path.rtt.minimum()) || path.window <= 0) return 0;
  const double pace = (send_window.ramps() ? kRampGain : 1.0) * breaker.factor() * path.window /
                      static_cast<double>(path.rtt.smoothed());  // bytes per ns
  const double depth = std::max(2.0 * train_bytes, pace * 1e9 * kPaceDepth);
  path.tokens = std::min(depth, path.tokens + pace * static_cast<double>(now - path.tokens_time));
  path.tokens_time = now;
  if (path.tokens > 0) return 0;
  return std::max<Nanos>(1, static_cast<Nanos>((0.5 * train_bytes - path.tokens) / pace));
}

// Sends the next train of chunks: to the destination with the largest backlog that may be sent to,
// so that all destinations of an op are served alike and end together.
bool Endpoint::Impl::transmit_train(Nanos now, Train& train) {
  const double wire_bytes = config.datagram_bytes + 42.0;
  // Pacing at BtlBw keeps the port's queue short: packets wait here, where the destination can
  // still be chosen. While the queue is short the pace is a little higher, to find a higher rate.
  const double queue = static_cast<double>(send_window.queue_delay());
  const LongPath far = longest_path();
  const auto target = static_cast<double>(send_window.target());
  const double longest = kProbeQueue * target;
  const double loss = loss_to.share(now);
  const double stretch = send_window.stretch(loss);
  const bool heavy = loss >= kHeavyLoss;
  if (heavy && last_led > 0) send_window.resume(std::exchange(last_led, 0));
  led = far.alone && !heavy ? led_by(far) : 0;
  if (led > 0) last_led = led;
  const double stretched = std::max(led, stretch * send_window.bytes());
  double gain = 1.0 + kProbeGain * std::clamp(1.0 - queue / longest, 0.0, 0.75);
  if (far.rtprop)
    gain = std::min(gain, 1.0 + kProbeRoom * target / static_cast<double>(far.rtprop));
  double pace = 0;
  if (config.pacing && btlbw() > 0)
    pace = breaker.factor() * std::max(stretch * gain * btlbw(), unproven_rate(now));
  paced_by = nullptr;
  if (far.rtprop && config.pacing) {
    // On a long path a window is spread over a round; as one burst it would overflow queues on the
    // path.
    const double round = (send_window.ramps() ? kRampGain : 1.0) * breaker.factor() * 1e9 /
                         static_cast<double>(far.round);
    if (far.alone || send_window.ramps()) pace = std::max(pace, stretched * round);
    if (far.alone) pace = std::min(pace, far.window * round);
    if (far.alone && stretched < far.window) send_window.limited();
    if (far.alone && stretched >= far.window) paced_by = far.path;
  }
  auto quantum = std::max(
      static_cast<uint32_t>(send_window.bytes() / wire_bytes / kTrainsPerWindow), kShortestTrain);
  if (far.rtprop)
    quantum = std::min(quantum, std::max(kShortestTrain, static_cast<uint32_t>(pace * kPaceDepth /
                                                                               2 / wire_bytes)));
  if (pace > 0) {
    const double depth = std::max(2.0 * quantum * wire_bytes, pace * kPaceDepth);
    tokens = std::min(depth, tokens + pace * static_cast<double>(now - tokens_time) * 1e-9);
  } else {
    tokens = 0;  // bytes sent before a rate was known are no debt
  }
  tokens_time = now;
  pace_until = 0;

  Path* best = nullptr;
  uint64_t best_left = 0;
  uint64_t best_allowed = 0;
  uint32_t destinations = 0;
  Nanos held = kNever;
  const bool apart = far.rtprop && !far.alone && config.pacing;
  const double space = room(now);
  const uint64_t window = space > 0 ? static_cast<uint64_t>(space / wire_bytes) + 1 : 0;
  const auto count = static_cast<uint16_t>(paths.size());
  for (uint16_t i = 0; i < count; ++i) {
    Path* path = paths[(next_path + i) % count].get();
    if (!path || path->gone || path->sent.full()) continue;
    const uint64_t left = backlog(*path);
    if (left == 0) {
      path->probes = 0;
      path->starved = false;
      continue;
    }
    ++destinations;
    if (path->probes) {  // a probe ignores the windows
      if (!transmit_data(*path, now, train, path->probes)) continue;
      tokens = std::max(tokens - train.total_bytes, std::min(tokens, -64.0 * wire_bytes));
      return true;
    }
    const uint64_t used = path->sent.next() - 1;
    const uint64_t credit = path->credit > used ? path->credit - used : 0;
    if (credit == 0) {
      ++counters.credit_stalls;
      if (!path->starved) {
        path->starved = true;
        if (path->sent.in_flight() == 0) path->probe_base = now;
      }
      continue;
    }
    if (window == 0) continue;
    if (apart) {
      if (const Nanos wait = hold(*path, quantum * wire_bytes, now)) {
        path->held = true;
        held = std::min(held, now + wait);
        continue;
      }
    }
    if (left <= best_left) continue;
    best = path;
    best_left = left;
    best_allowed = std::min({credit, window, uint64_t{quantum}});
  }
  if (window == 0) {
    ++counters.window_stalls;
    send_window.limited();
  }
  if (!best) {
    if (held != kNever) pace_until = held;
    return false;
  }
  // With one destination there is no choice, and its receiver's credit keeps the queue short; a
  // rate that was measured among many senders would only hold back the last one. A tripped circuit
  // breaker always paces: half a window is not half the rate where a queue is.
  const bool paced = pace > 0 && (destinations > 1 || far.rtprop || breaker.factor() < 1);
  if (paced && tokens <= 0) {
    pace_until = now + static_cast<Nanos>((quantum * wire_bytes * 0.5 - tokens) / pace * 1e9);
    return false;
  }
  // The backlog had chunks that were decided meanwhile, so the choice is made again.
  if (!transmit_data(*best, now, train, static_cast<uint32_t>(best_allowed)))
    return transmit_train(now, train);
  if (paced) tokens -= train.total_bytes + 42.0 * train.count;
  best->tokens = apart ? best->tokens - (train.total_bytes + 42.0 * train.count) : 0;
  best->held = false;
  next_path = static_cast<uint16_t>((best->peer + 1) % count);
  return true;
}

}  // namespace gradwire
