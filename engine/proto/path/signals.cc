// What a path sends beside chunks: ACKs, pings, ERROR and BYE, which nobody acknowledges, control
// frames, and datagrams in fragments.
#include <algorithm>
#include <cstring>

#include "proto/path/path.h"

namespace gradwire {

namespace {

// Bytes of a failure's text that travel in ERROR, and that one may have.
constexpr size_t kLongestReport = 800;
constexpr size_t kLongestError = 1024;

// Makes the train one datagram, and returns its memory.
uint8_t* begin_one(Train& train, uint16_t destination, size_t bytes, uint8_t dscp,
                   uint8_t ecn = kNotEct) {
  train.control.resize(wire::kTagBytes + bytes);
  uint8_t* const at = train.control.data() + wire::kTagBytes;
  train.destination = destination;
  train.dscp = dscp;
  train.ecn = ecn;
  train.count = 1;
  train.segment_bytes = train.total_bytes = static_cast<uint32_t>(bytes);
  train.spans[0] = {at, bytes};
  train.spans[1] = {nullptr, 0};
  return at;
}

}  // namespace

void write_error(const EndpointConfig& config, const Failure& failure, uint16_t peer,
                 Train& train) {
  constexpr size_t fixed = wire::kCommonBytes + 5;
  const size_t length =
      std::min({failure.text.size(), kLongestReport, config.datagram_bytes - fixed});
  uint8_t* at = begin_one(train, peer, fixed + length, config.dscp);
  wire::write_common(at, {wire::kVersion, wire::Kind::error, config.endpoint, config.session});
  at = wire::put(at + wire::kCommonBytes, failure.rank);
  at = wire::put(at, failure.cause);
  std::memcpy(at, failure.text.data(), length);
}

bool Path::write_signal(const std::vector<Lane>& lanes, const Failure& failure, Nanos now,
                        Train& train) {
  if (acks.due(recovery.rtt.minimum(), now)) {
    write_ack(now, train);
    return true;
  }
  if (write_ping(lanes, now, train)) return true;
  if (farewell.errors_left && now >= farewell.next) {
    farewell.error_sent(now);
    write_error(port.config, failure, peer, train);
    train.dscp = port.dscp;
    return true;
  }
  return write_bye(lanes, now, train);
}

void Path::write_ack(Nanos now, Train& train) {
  const double loss_from = arriving.loss.share(now);
  const bool heavy = loss_from > kHeavyLoss;
  wire::Ack ack;
  ack.credit = static_cast<uint32_t>(grant.granted);
  ack.loss = static_cast<uint16_t>(loss_from * 65'536.0);
  const uint64_t share = uint64_t{grant.part} * port.config.wire_bytes();
  ack.share = static_cast<uint32_t>(std::min<uint64_t>(share, wire::Ack::kTurns - 1));
  if (grant.turns) ack.share |= wire::Ack::kTurns;
  ack.room = static_cast<uint8_t>(port.receiver.window().room() * 255.0);
  ack.ect0 = ecn.seen.ect0;
  ack.ce = ecn.seen.ce;
  const uint64_t span = heavy && profile().acks_all ? acks.largest() : grant.share;
  const uint64_t most_words = std::min<uint64_t>(
      wire::kAckMaxWords, (limit.bytes() - wire::kAckFixedBytes) / sizeof(uint64_t));
  acks.fill(ack, span, most_words, now);
  const size_t bytes = wire::kAckFixedBytes + ack.words * sizeof(uint64_t);
  wire::write_ack(begin_one(train, peer, bytes, port.dscp), port.header(wire::Kind::ack), ack);
  acks.sent(now);
  const Rtt& rtt = recovery.rtt;
  if (heavy && rtt.any())
    acks.repeat(repeat_after(loss(now), rtt.smoothed(), port.sender.queued()), rtt.round(), now);
  grant.granted_sent = grant.granted;
  ++port.counters.acks_sent;
}

// ---- pings

void Path::put_ping(const std::vector<Lane>& lanes, bool pong, size_t bytes, Nanos now,
                    Train& train) {
  uint8_t* const at = begin_one(train, peer, bytes, port.dscp);
  std::fill_n(at, bytes, uint8_t{0});
  constexpr uint64_t mask = (uint64_t{1} << wire::kBegunBits) - 1;
  wire::write_ping(
      at, port.header(pong ? wire::Kind::pong : wire::Kind::ping),
      {pong ? life.pong_stamp : wire::stamp_of(now), static_cast<uint32_t>(next_id(lanes) & mask)});
  if (limit.reduced() && bytes >= wire::kPingBytes + wire::kLimitBytes)
    wire::put(at + wire::kPingBytes, static_cast<uint16_t>(limit.bytes()));
}

bool Path::write_ping(const std::vector<Lane>& lanes, Nanos now, Train& train) {
  if (life.ping_now || life.pong_now) {
    const bool pong = life.pong_now;
    (pong ? life.pong_now : life.ping_now) = false;
    // Pings have the longest datagram's length until one is answered, so that a path that does not
    // carry it shows before the first step.
    const size_t plain = wire::kPingBytes + (limit.reduced() ? wire::kLimitBytes : 0);
    const size_t bytes = pong ? wire::kPingBytes : life.connected ? plain : limit.bytes();
    if (life.first_ping == 0) life.first_ping = life.called = now;
    put_ping(lanes, pong, bytes, now, train);
    return true;
  }
  if (port.failed || farewell.gone) return false;
  const uint32_t bytes = limit.ping(now, wire::stamp_of(now));
  if (bytes == 0) return false;
  put_ping(lanes, false, bytes, now, train);
  train.whole = true;
  return true;
}

// The id that a PING reports: the op that starts next in one lane. Lanes take turns.
uint64_t Path::next_id(const std::vector<Lane>& lanes) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    life.pinged_lane = static_cast<uint16_t>((life.pinged_lane + 1u) % lanes.size());
    const uint64_t next = lanes[life.pinged_lane].next;
    if (next > 0) return id_of(next, life.pinged_lane);
  }
  return 0;
}

bool Path::on_ping(const wire::Ping& ping, std::span<const uint8_t> rest, Nanos now) {
  const auto claim = wire::Reader(rest).get<uint16_t>();
  if (claim && claim < wire::kMinDatagram) return false;
  limit.claimed(claim, now);
  // Before the first answer there is nothing to set against what the peer says.
  if (claim && !life.connected) lower_limit(claim, now);
  life.pong_now = true;
  life.pong_stamp = ping.stamp;
  // A peer that still pings has not received this endpoint's ERROR.
  if (port.failed && farewell.errors_left == 0) farewell.errors_left = 1;
  return true;
}

void Path::on_pong(const wire::Ping& ping, Nanos now) {
  const auto round = static_cast<Nanos>(wire::stamp_of(now - static_cast<Nanos>(ping.stamp)));
  if (round >= Rtt::kLongest) return;
  recovery.rtt.sample(round, 0, now);
  const uint32_t before = limit.bytes();
  if (limit.answered(ping.stamp, now, recovery.rtt.round())) {
    if (limit.bytes() < before) {
      limit_fell();
    } else {
      life.ping_now = true;  // the PING no longer carries the old length
    }
  }
  // The answered ping had the agreed length, or the length that the path has turned out to carry.
  if (life.connected || limit.on_trial()) return;
  life.connected = news.connected = true;
}

// ---- farewells

// BYE goes until the peer acknowledges it, and one answers each BYE that asks for it.
bool Path::write_bye(const std::vector<Lane>& lanes, Nanos now, Train& train) {
  const bool due = port.leaving && !port.left && !farewell_over() && now >= farewell.next;
  if (!due && !farewell.answer) return false;
  farewell.answer = false;
  // A server completes no ops, so it names no lanes.
  const bool names = port.leaving && port.config.endpoint < port.config.workers;
  const size_t all = names ? lanes.size() : 0;
  const size_t first = farewell.next_lane;
  const size_t room = (limit.bytes() - wire::kByeBytes) / sizeof(uint32_t);
  const size_t count = std::min(all - first, room);
  const size_t bytes = wire::kByeBytes + count * sizeof(uint32_t);
  uint8_t* at = begin_one(train, peer, bytes, port.dscp);
  at = wire::write_bye(
      at, port.header(wire::Kind::bye),
      {port.leaving, farewell.gone, static_cast<uint16_t>(all), static_cast<uint16_t>(first), {}});
  for (size_t lane = first; lane < first + count; ++lane)
    at = wire::put(at, static_cast<uint32_t>(lanes[lane].complete_below()));
  farewell.next_lane = first + count == all ? 0 : first + count;
  if (port.leaving && farewell.next_lane == 0) farewell.bye_sent(now);
  return true;
}

Failure Path::read_error(std::span<const uint8_t> datagram) const {
  wire::Reader reader(datagram.subspan(wire::kCommonBytes));
  const auto rank = reader.get<int32_t>();
  const auto cause = static_cast<Cause>(reader.get<uint8_t>());
  std::string text(reinterpret_cast<const char*>(reader.rest().data()), reader.rest().size());
  if (!reader.ok() || text.size() > kLongestError) return {};
  return {port.config.name(peer) + " reports: " + text, rank, cause};
}

// ---- reliable packets

void Path::sent(const Train& train, Nanos now) {
  // The last one may be shorter than the others.
  const uint32_t longest = std::max(1U, train.total_bytes / train.segment_bytes);
  limit.sent(train.segment_bytes, now, longest);
  if (train.ecn != kNotEct) ecn.sent.sent(train.count);
  port.sender.on_sent(train.total_bytes, now, train.count);
  port.counters.sent.add(train.total_bytes, train.count);
  counted.sent.add(train.total_bytes, train.count);
}

uint64_t Path::write_control(Nanos now, Train& train) {
  const uint32_t handle = control.take();
  const ControlFrame& frame = control.at(handle);
  const size_t bytes = wire::kHeaderBytes + frame.payload.size();
  SentPacket packet;
  packet.op = frame.op;
  packet.kind = frame.kind;
  packet.bytes = static_cast<uint16_t>(bytes);
  packet.ect = ecn.sent.capable();
  recovery.send(packet, {&handle, 1}, now);
  uint8_t* const at = begin_one(train, peer, bytes, port.dscp, packet.ect ? kEct0 : kNotEct);
  wire::write_header(at, header_of(packet, frame.part, standing.backlog, now));
  std::ranges::copy(frame.payload, at + wire::kHeaderBytes);
  sent(train, now);
  return frame.op;
}

wire::Header Path::header_of(const SentPacket& packet, uint32_t chunk, uint64_t backlog,
                             Nanos now) const {
  wire::Header header{};
  header.common = port.header(packet.kind);
  header.packet_number = static_cast<uint32_t>(packet.number);
  header.send_time_us = us(now);
  header.op = static_cast<uint32_t>(packet.op);
  header.chunk = chunk;
  header.backlog = static_cast<uint16_t>(std::min<uint64_t>(backlog, UINT16_MAX));
  return header;
}

// ---- fragments

// The number of a datagram's fragments. A chunk that goes again has the same one, so that fragments
// of several times make it whole: under loss hardly any time brings all. Those of another length
// would not fit.
uint32_t Path::fragments_of(std::span<const uint8_t> datagram, uint32_t length) {
  const auto header = wire::read_header(datagram);
  const bool chunk = header && header->common.kind <= wire::Kind::pull;
  const Fragments::Whole what =
      chunk ? Fragments::Whole{header->common.kind, header->op, header->chunk, length}
            : Fragments::Whole{};
  const auto known = chunk ? std::ranges::find(fragments.latest, what) : fragments.latest.end();
  if (known != fragments.latest.end()) {
    const auto slot = static_cast<uint32_t>(known - fragments.latest.begin());
    return fragments.sent - (fragments.sent - slot) % Reassembly::kAtOnce;
  }
  const uint32_t number = ++fragments.sent;
  fragments.latest.resize(Reassembly::kAtOnce);
  fragments.latest[number % Reassembly::kAtOnce] = what;
  return number;
}

void Path::split(Train& train) {
  std::vector<uint8_t> whole;
  whole.reserve(train.total_bytes);
  for (size_t half = 0; half < 2; ++half) {
    const auto* data = static_cast<const uint8_t*>(train.spans[half].data);
    whole.insert(whole.end(), data, data + train.spans[half].size);
  }
  train.control = std::move(whole);
  const auto total = static_cast<uint32_t>(train.control.size());
  constexpr auto fixed = static_cast<uint32_t>(wire::kFragmentBytes);
  const uint32_t most = limit.bytes() - fixed;
  wire::Fragment fragment{fragments_of(train.control, most), static_cast<uint16_t>(total), 0,
                          static_cast<uint8_t>((total + most - 1) / most)};
  train.count = train.total_bytes = 0;
  for (; fragment.offset() < total; ++fragment.index) {
    const uint32_t bytes = std::min(fragment.each(), total - fragment.offset());
    uint8_t* const header = train.next_header();
    wire::write_fragment(header, port.header(wire::Kind::fragment), fragment);
    train.spans[2 * train.count] = {header, fixed};
    train.spans[2 * train.count + 1] = {train.control.data() + fragment.offset(), bytes};
    train.total_bytes += fixed + bytes;
    ++train.count;
  }
  train.segment_bytes = fixed + fragment.each();
  ++port.counters.fragmented;
}

std::span<const uint8_t> Path::on_fragment(std::span<const uint8_t> datagram) {
  const auto fragment = wire::read_fragment(datagram);
  if (!fragment) {
    ++port.counters.malformed;
    return {};
  }
  const auto whole = fragments.arriving.add(*fragment, datagram.subspan(wire::kFragmentBytes),
                                            port.config.datagram_bytes);
  if (whole.empty()) return {};
  const auto head = wire::read_common(whole);
  const wire::Common own = port.header(wire::Kind::fragment);
  if (head && head->version == own.version && head->session == own.session &&
      head->source == peer && head->kind != wire::Kind::fragment)
    return whole;
  ++port.counters.malformed;
  return {};
}

}  // namespace gradwire
