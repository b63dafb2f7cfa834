// Datagrams out: signs of life and acknowledgements first, then control, then trains of chunks.
#include <algorithm>
#include <utility>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {

constexpr Nanos kFarewellInterval = 10 * kMillisecond;
constexpr uint32_t kQuickFarewells = 3;     // then twice as far apart each time
constexpr uint32_t kFarewellDoublings = 2;  // at the most
constexpr double kProbeGain = 0.2;          // with an empty queue, nearly
constexpr double kProbeQueue = 0.75;        // of the target: without probing from there on
// Of the target's queue: what probing above the rate may add to it in a round of a long path.
constexpr double kProbeRoom = 0.5;
constexpr double kRampGain = 1.25;  // a ramp's round goes out in half of it
constexpr Nanos kAckSpacing = 800 * kMicrosecond;
constexpr double kTrainSeconds = 250e-6;  // of the rate, on a long path
constexpr double kPaceDepth = 0.0005;     // seconds of the rate that a late timer may catch up
// Long trains from several senders collide in a port and leave others idle.
constexpr double kTrainsPerWindow = 16;
constexpr uint32_t kShortestTrain = 4;
constexpr uint32_t kLongestTrain = 44;
// Elements encoded for one train: its packets are stamped before, and what this takes looks like a
// queue to the receiver.
constexpr uint32_t kMostEncoded = 1U << 16;
// Chunks for a peer that is not known to have started their ops: more than go before its OPEN comes
// where all start together, and fewer than it keeps in any case.
constexpr size_t kMostEarly = kStashMost / 2;
constexpr size_t kLongestReport = 800;  // bytes of a failure's text that travel

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
  if (path.probes && data) --path.probes;  // control goes without credit in any case
  repeats = std::max(repeats - 1, -kRepeatsAtOnce);
  path.starved = false;
  breaker.sent(packet.bytes, loss_to.share(now));
  ++counters.packets_sent;
  counters.bytes_sent += packet.bytes;
}

void Endpoint::Impl::write_ping(Path& path, Nanos now, bool pong, size_t bytes, Train& train) {
  uint8_t* at = begin_control(train, path.peer, bytes);
  std::fill_n(at, bytes, uint8_t{0});
  constexpr uint64_t kBegun = (uint64_t{1} << wire::kBegunBits) - 1;
  wire::write_ping(at, common(pong ? wire::Kind::pong : wire::Kind::ping),
                   {pong ? path.pong_stamp : wire::stamp_of(now),
                    static_cast<uint32_t>(next_id(path) & kBegun)});
  if (path.limit.reduced() && bytes >= wire::kPingBytes + wire::kLimitBytes)
    wire::put(at + wire::kPingBytes, static_cast<uint16_t>(path.limit.bytes()));
  end_control(train, bytes, control_dscp);
}

bool Endpoint::Impl::transmit_unreliable(Path& path, Nanos now, Train& train) {
  // A gap in every few packets makes an ACK of each; on a long path that tells nothing sooner.
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
    // Twice over, whatever the share has become: one batch may hold hundreds.
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
    // Where so much gets lost this way, ACKs may on theirs: as long as they may matter they go on.
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
    // As long as the longest datagram until one is answered: a path that does not carry them shows
    // before the first step.
    const size_t plain = wire::kPingBytes + (path.limit.reduced() ? wire::kLimitBytes : 0);
    const size_t bytes = pong ? wire::kPingBytes : path.connected ? plain : config.datagram_bytes;
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

// What a PING says of one lane, each in its turn: the op that starts next there.
uint64_t Endpoint::Impl::next_id(Path& path) const {
  for (size_t i = 0; i < lanes.size(); ++i) {
    path.pinged_lane = static_cast<uint16_t>((path.pinged_lane + 1u) % lanes.size());
    const uint64_t next = lanes[path.pinged_lane].next;
    if (next > 0) return id_of(next, path.pinged_lane);
  }
  return 0;
}

// BYE: until the peer says that it was heard, and one for each of the peer's that asks for it.
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

// A push of an op that the peer may not have started: nothing of it, or of a later one, has come. A
// server has an op from the first OPEN on.
bool Endpoint::Impl::early(const Path& path, const Op& op) const {
  return config.servers == 0 && !path.has_started(op.id);
}

// How many chunks may go early on a path, in either direction.
size_t Endpoint::Impl::most_early(const Path& path) const {
  if (!long_path(path.rtt.minimum())) return kMostEarly;
  return std::max(kMostEarly, kStashInAll / (paths.size() - 1));
}

// How many still may. What a peer refuses would look lost, and be sent again for as long as the
// peer is late.
uint64_t Endpoint::Impl::early_room(const Path& path) const {
  if (config.servers) return UINT64_MAX;
  const size_t most = most_early(path);
  size_t gone = 0;
  for (const auto& [id, op] : ops)
    if (early(path, *op)) gone += op->early[path.peer];
  return most - std::min(most, gone);
}

// What is left to send now, without what waits for the peer to start.
uint64_t Endpoint::Impl::backlog(const Path& path) const {
  const bool room = early_room(path) > 0;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) total += backlog(path, *op, room);
  return total;
}

// Of one op. room: for what goes before the peer has started it.
uint64_t Endpoint::Impl::backlog(const Path& path, const Op& op, bool room) const {
  uint64_t total = 0;
  if (op.aggregator && path.peer < config.workers) total += op.back[path.peer].backlog();
  if (op.worker && !op.done)
    for (uint16_t a = 0; a < config.aggregators(); ++a)
      if (config.aggregator_endpoint(a) == path.peer)
        total += op.push[a].backlog(room || !early(path, op));
  return total;
}

// Whose ops the next train to a peer is of: lanes take turns, so that what a peer cannot take yet
// of one of them keeps none of the others waiting.
uint16_t Endpoint::Impl::next_lane(const Path& path) const {
  const bool room = early_room(path) > 0;
  uint64_t best = UINT64_MAX;
  for (const auto& [id, op] : ops) {
    const uint64_t turn = (lane_of(id) + kLanes - path.lane - 1) % kLanes;
    if (turn < best && backlog(path, *op, room) > 0) best = turn;
  }
  return static_cast<uint16_t>((path.lane + 1 + best) % kLanes);
}

// A worker's chunk as its plan has it on the wire, in the train's own place in the scratch memory.
// Encoded anew whenever it is sent: the bucket holds the same values until the chunk is decided.
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
    // Datagrams of one train are equally long, and one that goes in parts is a train of its own.
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
      if (train.count && dscp != train.dscp) return true;  // one DSCP to a train
      wire::Kind kind = wire::Kind::push;
      // Pushes first: everybody's results wait for them.
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
    // Who has left stays for a while, for what others still need of it.
    if (p && (!p->gone || now - p->last_heard < kHeardOf) && transmit_control(*p, now, train))
      return true;

  return transmit_train(now, train);
}

// The longest of the paths that something waits for, where that is a long one.
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

// With one destination far away its receiver's window rules: a share of an incast would have to
// learn the rate of its share. Less in so far as the queue is longer than it should be, whoever's.
double Endpoint::Impl::led_by(const LongPath& far) const {
  if (send_window.ramps()) return 0;
  const auto target = static_cast<double>(send_window.target());
  const auto queue = static_cast<double>(send_window.queue_delay());
  return far.window * std::min(1.0, target / std::max(queue, 1.0));
}

// Nanoseconds that a train has to wait for its path's part of the receiver's window, which is paced
// over a round; 0: none. One of several far destinations has no queue for what all senders have
// left over while other receivers' credit is out.
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

// The next train of chunks: to whom most is left to send, of those that may be sent to, so that all
// destinations of one op are served alike and finish together.
bool Endpoint::Impl::transmit_train(Nanos now, Train& train) {
  const double wire_bytes = config.datagram_bytes + 42.0;
  // At BtlBw the port's own queue stays short and what waits, waits here, where the choice of
  // destination is still open; a little above it while the queue is short, to find more.
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
    // A window at a time, in a round: a burst of it would overflow what is on the way.
    const double round = (send_window.ramps() ? kRampGain : 1.0) * breaker.factor() * 1e9 /
                         static_cast<double>(far.round);
    if (far.alone || send_window.ramps()) pace = std::max(pace, stretched * round);
    if (far.alone) pace = std::min(pace, far.window * round);
    if (far.alone && stretched < far.window) send_window.limited();
    if (far.alone && stretched >= far.window) paced_by = far.path;
  }
  auto quantum =
      std::clamp(static_cast<uint32_t>(send_window.bytes() / wire_bytes / kTrainsPerWindow),
                 kShortestTrain, kLongestTrain);
  if (far.rtprop)
    quantum = std::min(quantum, std::max(kShortestTrain,
                                         static_cast<uint32_t>(pace * kTrainSeconds / wire_bytes)));
  if (pace > 0) {
    const double depth = std::max(2.0 * quantum * wire_bytes, pace * kPaceDepth);
    tokens = std::min(depth, tokens + pace * static_cast<double>(now - tokens_time) * 1e-9);
  } else {
    tokens = 0;  // what went before there was a rate is not a debt
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
    if (path->probes) {  // a probe goes whatever the windows say
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
  // With one destination there is nothing to choose, its receiver's credit holds the queue short,
  // and a rate that was measured among many senders would hold back whoever comes last.
  // A circuit that breaks is paced in any case: half a window where a queue was is not half a rate.
  const bool paced = pace > 0 && (destinations > 1 || far.rtprop || breaker.factor() < 1);
  if (paced && tokens <= 0) {
    pace_until = now + static_cast<Nanos>((quantum * wire_bytes * 0.5 - tokens) / pace * 1e9);
    return false;
  }
  // Chunks that were decided meanwhile counted as left, and no longer do: choose anew.
  if (!transmit_data(*best, now, train, static_cast<uint32_t>(best_allowed)))
    return transmit_train(now, train);
  if (paced) tokens -= train.total_bytes + 42.0 * train.count;
  best->tokens = apart ? best->tokens - (train.total_bytes + 42.0 * train.count) : 0;
  best->held = false;
  next_path = static_cast<uint16_t>((best->peer + 1) % count);
  return true;
}

}  // namespace gradwire
