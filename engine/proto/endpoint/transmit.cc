// Sending: ACKs, pings and farewells first, then control frames; trains of chunks are in trains.cc.
#include <algorithm>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {

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

void write_error(const EndpointConfig& config, const Failure& failure, uint16_t peer,
                 Train& train) {
  const size_t length = std::min<size_t>(failure.text.size(), kLongestReport);
  const size_t bytes = wire::kCommonBytes + 5 + length;
  uint8_t* at = begin_control(train, peer, bytes);
  wire::write_common(at, {wire::kVersion, wire::Kind::error, config.endpoint, config.session});
  at = wire::put(at + wire::kCommonBytes, failure.rank);
  at = wire::put(at, failure.cause);
  std::memcpy(at, failure.text.data(), length);
  end_control(train, bytes, config.dscp);
}

bool Endpoint::Impl::transmit(Nanos now, Train& train, bool urgent) {
  due.clock = now;
  train.whole = false;
  if (!transmit_next(now, train, urgent)) return false;
  Path& path = *paths[train.destination];
  touch(path);
  if (train.segment_bytes > path.limit.bytes() && !train.whole && path.life.connected)
    split(path, train);
  return true;
}

bool Endpoint::Impl::transmit_next(Nanos now, Train& train, bool urgent) {
  settle();
  for (size_t i = 0; (i = due.sends.due(now, i)) != Agenda::kNone; ++i) {
    touch(*paths[i]);
    if (transmit_unreliable(*paths[i], now, train)) return true;
  }
  if (failure || urgent) return false;
  end_passes();
  repeat(now);
  settle();
  for (size_t i = 0; (i = due.controls.due(now, i)) != Agenda::kNone; ++i) {
    Path& path = *paths[i];
    // A peer that has left stays for a while to serve what others still need of it.
    const bool there = !path.farewell.gone || now - path.life.last_heard < kHeardOf;
    if (there && transmit_control(path, now, train)) return true;
  }
  return transmit_train(now, train);
}

void Endpoint::Impl::write_ping(Path& path, Nanos now, bool pong, size_t bytes, Train& train) {
  uint8_t* at = begin_control(train, path.peer, bytes);
  std::fill_n(at, bytes, uint8_t{0});
  constexpr uint64_t mask = (uint64_t{1} << wire::kBegunBits) - 1;
  wire::write_ping(at, common(pong ? wire::Kind::pong : wire::Kind::ping),
                   {pong ? path.life.pong_stamp : wire::stamp_of(now),
                    static_cast<uint32_t>(next_id(path) & mask)});
  if (path.limit.reduced() && bytes >= wire::kPingBytes + wire::kLimitBytes)
    wire::put(at + wire::kPingBytes, static_cast<uint16_t>(path.limit.bytes()));
  end_control(train, bytes, control_dscp);
}

// Writes an ACK.
void Endpoint::Impl::write_ack(Path& path, Nanos now, Train& train) {
  const double loss = path.arriving.loss.share(now);
  const bool heavy = loss > kHeavyLoss;
  wire::Ack ack;
  ack.credit = static_cast<uint32_t>(path.grant.granted);
  ack.loss = static_cast<uint16_t>(loss * 65'536.0);
  ack.share = path.grant.part * config.wire_bytes();
  ack.ect0 = path.ecn.seen.ect0;
  ack.ce = path.ecn.seen.ce;
  const bool all = heavy && path.recovery.rtt.profile().acks_all;
  path.acks.fill(ack, all ? path.acks.largest() : path.grant.share, most_ack_words(path), now);
  uint8_t* at = begin_control(train, path.peer, wire::kAckFixedBytes + 8 * wire::kAckMaxWords);
  end_control(train, wire::write_ack(at, common(wire::Kind::ack), ack), control_dscp);
  path.acks.sent(now);
  const Rtt& rtt = path.recovery.rtt;
  if (heavy && rtt.any())
    path.acks.repeat(repeat_after(path.loss(now), rtt.smoothed(), sender.queued()), rtt.round(),
                     now);
  path.grant.granted_sent = path.grant.granted;
  ++counters.acks_sent;
}

bool Endpoint::Impl::transmit_unreliable(Path& path, Nanos now, Train& train) {
  if (path.acks.due(path.recovery.rtt.minimum(), now)) {
    write_ack(path, now, train);
    return true;
  }
  return transmit_ping(path, now, train) || transmit_error(path, now, train) ||
         transmit_farewell(path, now, train);
}

bool Endpoint::Impl::transmit_ping(Path& path, Nanos now, Train& train) {
  Liveness& life = path.life;
  if (life.ping_now || life.pong_now) {
    const bool pong = life.pong_now;
    (pong ? life.pong_now : life.ping_now) = false;
    // Pings have the longest datagram's length until one is answered, so that a path that does not
    // carry it shows before the first step.
    const size_t plain = wire::kPingBytes + (path.limit.reduced() ? wire::kLimitBytes : 0);
    const size_t bytes = pong ? wire::kPingBytes : life.connected ? plain : path.limit.bytes();
    if (life.first_ping == 0) life.first_ping = now;
    write_ping(path, now, pong, bytes, train);
    return true;
  }
  if (failure || path.farewell.gone) return false;
  const uint32_t bytes = path.limit.ping(now, wire::stamp_of(now));
  if (bytes == 0) return false;
  write_ping(path, now, false, bytes, train);
  train.whole = true;
  return true;
}

bool Endpoint::Impl::transmit_error(Path& path, Nanos now, Train& train) {
  if (path.farewell.errors_left == 0 || now < path.farewell.next) return false;
  path.farewell.error_sent(now);
  write_error(config, failure, path.peer, train);
  train.dscp = control_dscp;
  return true;
}

// The id that a PING reports: the op that starts next in one lane. Lanes take turns.
uint64_t Endpoint::Impl::next_id(Path& path) const {
  for (size_t i = 0; i < lanes.size(); ++i) {
    path.life.pinged_lane = static_cast<uint16_t>((path.life.pinged_lane + 1u) % lanes.size());
    const uint64_t next = lanes[path.life.pinged_lane].next;
    if (next > 0) return id_of(next, path.life.pinged_lane);
  }
  return 0;
}

// Sends BYE until the peer acknowledges it, and one as the answer to each BYE that asks for it.
bool Endpoint::Impl::transmit_farewell(Path& path, Nanos now, Train& train) {
  const bool due =
      leaving.begun && !leaving.over && !farewell_over(path) && now >= path.farewell.next;
  if (!due && !path.farewell.answer) return false;
  path.farewell.answer = false;
  // A server completes no ops, so it names no lanes.
  const bool names = leaving.begun && config.endpoint < config.workers;
  const size_t all = names ? lanes.size() : 0;
  const size_t first = path.farewell.next_lane;
  const size_t room = (path.limit.bytes() - wire::kByeBytes) / sizeof(uint32_t);
  const size_t count = std::min(all - first, room);
  const size_t bytes = wire::kByeBytes + count * sizeof(uint32_t);
  uint8_t* at = begin_control(train, path.peer, bytes);
  at = wire::write_bye(at, common(wire::Kind::bye),
                       {leaving.begun,
                        path.farewell.gone,
                        static_cast<uint16_t>(all),
                        static_cast<uint16_t>(first),
                        {}});
  for (size_t lane = first; lane < first + count; ++lane)
    at = wire::put(at, static_cast<uint32_t>(lanes[lane].complete_below()));
  end_control(train, bytes, control_dscp);
  path.farewell.next_lane = first + count == all ? 0 : first + count;
  if (leaving.begun && path.farewell.next_lane == 0) path.farewell.bye_sent(now);
  return true;
}

// What the headers of all reliable packets of this time have in common.
wire::Header Endpoint::Impl::header_at(Nanos now) const {
  wire::Header header{};
  header.common = common(wire::Kind::push);
  header.send_time_us = us(now);
  return header;
}

// Sets what is a packet's own. `backlog`: the chunks that still wait for its peer.
void Endpoint::Impl::set_header(wire::Header& header, const SentPacket& packet, uint32_t chunk,
                                uint64_t backlog) {
  header.common.kind = packet.kind;
  header.packet_number = static_cast<uint32_t>(packet.number);
  header.op = static_cast<uint32_t>(packet.op);
  header.chunk = chunk;
  header.backlog = static_cast<uint16_t>(std::min<uint64_t>(backlog, UINT16_MAX));
}

bool Endpoint::Impl::transmit_control(Path& path, Nanos now, Train& train) {
  if (!path.control.waiting() || path.recovery.full()) return false;
  const uint32_t handle = path.control.take();
  const ControlFrame& frame = path.control.at(handle);
  const size_t bytes = wire::kHeaderBytes + frame.payload.size();
  SentPacket& packet = path.recovery.add();
  packet.op = frame.op;
  packet.item = handle;
  packet.kind = frame.kind;
  packet.bytes = static_cast<uint16_t>(bytes);
  packet.recovers = true;
  packet.ect = path.ecn.sent.capable();
  path.recovery.on_sent(packet, now);
  uint8_t* at = begin_control(train, path.peer, bytes);
  wire::Header header = header_at(now);
  set_header(header, packet, frame.part, backlog(path));
  wire::write_header(at, header);
  std::memcpy(at + wire::kHeaderBytes, frame.payload.data(), frame.payload.size());
  end_control(train, bytes, control_dscp, packet.ect ? kEct0 : kNotEct);
  sent(path, train, now);
  if (Op* op = find(frame.op)) op->traffic.add(bytes);
  return true;
}

}  // namespace gradwire
