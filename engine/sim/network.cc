// Fabric: how a datagram travels from one endpoint through the switch to another.
#include <algorithm>

#include "proto/base/overhead.h"
#include "proto/congestion/ecn.h"
#include "sim/fabric.h"
#include "wire/packet.h"

namespace gradwire::sim {

uint32_t Fabric::new_unit() {
  const uint32_t unit = unused_unit();
  units_[unit].ecn = kNotEct;
  units_[unit].corrupt = units_[unit].forged = false;
  return unit;
}

uint32_t Fabric::unused_unit() {
  if (free_units_.empty()) {
    units_.emplace_back();
    return static_cast<uint32_t>(units_.size() - 1);
  }
  const uint32_t unit = free_units_.back();
  free_units_.pop_back();
  return unit;
}

uint32_t Fabric::copy_unit(uint32_t from) {
  const uint32_t unit = new_unit();
  units_[unit] = units_[from];
  units_[unit].trace = kUntraced;
  return unit;
}

void Fabric::free_unit(uint32_t unit) {
  units_[unit].bytes.clear();
  free_units_.push_back(unit);
}

void Fabric::launch(uint16_t host, const Train& train) {
  check_train(host, train);
  if (!violations_.empty()) return;
  uint32_t unit = 0;
  for (uint32_t i = 0; i < train.count; ++i) {
    const bool fresh = i == 0 || !options_.whole_trains;
    if (fresh) {
      unit = new_unit();
      Unit& u = units_[unit];
      u.source = host;
      u.destination = train.destination;
      u.segment = train.segment_bytes;
      u.packets = 0;
      u.ecn = train.ecn;
      u.bytes.clear();
    }
    Unit& u = units_[unit];
    const size_t begin = u.bytes.size();
    for (size_t half = 0; half < 2; ++half) {
      const Train::Span& span = train.spans[2 * size_t{i} + half];
      const auto* data = static_cast<const uint8_t*>(span.data);
      if (span.size != 0) u.bytes.insert(u.bytes.end(), data, data + span.size);
    }
    ++u.packets;
    const auto datagram = std::span<const uint8_t>(u.bytes).subspan(begin);
    check_datagram(host, train.destination, datagram);
    hash(static_cast<uint64_t>(now_));
    hash(datagram.first(std::min<size_t>(datagram.size(), 64)));
    const uint32_t trace = record(u, datagram, train.dscp);
    if (fresh) u.trace = trace;
    if (!options_.whole_trains || i + 1 == train.count) {
      cross(unit, host, Direction::up);
    }
  }
}

// Passes a unit through one link: queue, wire, and on to the next station.
void Fabric::cross(uint32_t unit, uint16_t host, Direction direction) {
  const bool up = direction == Direction::up;
  Link& link = up ? *hosts_[host].up : *hosts_[host].down;
  const Event::Kind next = up ? Event::Kind::at_switch : Event::Kind::at_host;
  const LinkOptions& options = link.options();
  const uint32_t packets = units_[unit].packets;
  const uint64_t wire_bytes = units_[unit].bytes.size() + uint64_t{packets} * options_.overhead;
  const uint8_t ecn = link.mark(now_, units_[unit].ecn, packets);
  const bool black_hole = options.drop_ect && units_[unit].ecn != kNotEct;
  units_[unit].ecn = ecn;
  const Nanos left = link.enqueue(now_, wire_bytes, packets, false);
  if (left == kNever) {
    hosts_[units_[unit].source].dropped_ports += packets;
    set_fate(units_[unit], TraceEntry::Fate::queue);
    free_unit(unit);
    return;
  }
  Nanos at = left + options.delay;
  if (options.garbage > 0.0 && link.random.chance(options.garbage)) send_garbage(unit, link, at);
  const bool too_long = options.longest && units_[unit].segment > options.longest;
  if (too_long) link.counters.dropped_long += packets;
  const bool lost = link.lose(packets);
  if (lost) hearing_.lost(units_[unit].source, units_[unit].destination, now_);
  if (lost || black_hole || too_long) {
    set_fate(units_[unit], TraceEntry::Fate::loss);
    free_unit(unit);
    return;
  }
  const auto late = [&] {
    return static_cast<Nanos>(link.random.uniform() * static_cast<double>(options.reorder_delay));
  };
  if (link.random.chance(options.duplicate)) {
    link.counters.duplicated += packets;
    push(at + late(), next, copy_unit(unit));
  }
  if (link.random.chance(options.reorder)) {
    link.counters.reordered += packets;
    at += late();
  }
  if (link.random.chance(options.flip)) {
    std::vector<uint8_t>& bytes = units_[unit].bytes;
    for (uint64_t flips = 1 + link.random.below(4); flips > 0; --flips) {
      bytes[link.random.below(bytes.size())] ^= static_cast<uint8_t>(1 << link.random.below(8));
    }
  }
  if (link.random.chance(options.corrupt)) {
    link.counters.corrupted += packets;
    units_[unit].corrupt = true;
  }
  push(at, next, unit, static_cast<uint16_t>(2 * host + up));
}

// Sends a datagram that no endpoint may accept, made from one that it would accept.
void Fabric::send_garbage(uint32_t unit, Link& link, Nanos at) {
  ++link.counters.garbage;
  const uint32_t fake = copy_unit(unit);
  std::vector<uint8_t>& bytes = units_[fake].bytes;
  bytes.resize(std::min<size_t>(bytes.size(), units_[fake].segment));
  units_[fake].packets = 1;
  units_[fake].corrupt = false;
  units_[fake].forged = true;
  switch (link.random.below(6)) {
    case 0:  // cut short, in its header
      bytes.resize(link.random.below(wire::kCommonBytes + 4));
      break;
    case 1:  // longer than allowed
      bytes[1] = static_cast<uint8_t>(wire::Kind::push);
      bytes.resize(options_.endpoint.datagram_bytes + 1 + link.random.below(64), 0xa5);
      break;
    case 2:  // of another session and protocol version
      bytes[0] ^= static_cast<uint8_t>(1 + link.random.below(255));
      [[fallthrough]];
    case 3:  // of another session
      bytes[4 + link.random.below(4)] ^= static_cast<uint8_t>(1 + link.random.below(255));
      if (const auto head = wire::read_common(bytes);
          head && head->session == options_.endpoint.session)
        bytes[7] ^= 0x80;  // it came from an earlier one
      break;
    case 4:  // with another source
      bytes[2 + link.random.below(2)] ^= static_cast<uint8_t>(1 + link.random.below(255));
      break;
    default:  // noise
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(link.random.next());
      break;
  }
  units_[fake].segment = static_cast<uint32_t>(std::max<size_t>(bytes.size(), 1));
  push(at, Event::Kind::at_host, fake);
}

void Fabric::at_switch(uint32_t unit) {
  if (!reachable(units_[unit].source, units_[unit].destination)) {
    set_fate(units_[unit], TraceEntry::Fate::unreachable);
    free_unit(unit);
    return;
  }
  cross(unit, units_[unit].destination, Direction::down);
}

void Fabric::at_host(uint32_t unit) {
  const uint16_t index = units_[unit].destination;
  Host& host = hosts_[index];
  const size_t bytes = units_[unit].bytes.size();
  if (!reachable(units_[unit].source, index)) {
    set_fate(units_[unit], TraceEntry::Fate::unreachable);
    free_unit(unit);
    return;
  }
  if (units_[unit].corrupt) {
    hearing_.lost(units_[unit].source, index, now_);
    set_fate(units_[unit], TraceEntry::Fate::loss);
    free_unit(unit);
    return;
  }
  if (host.ring_bytes + bytes > options_.endpoint.receive_buffer) {
    host.dropped_socket += units_[unit].packets;
    set_fate(units_[unit], TraceEntry::Fate::queue);
    free_unit(unit);
    return;
  }
  set_fate(units_[unit], TraceEntry::Fate::delivered);
  if (!units_[unit].forged) hearing_.arrived(units_[unit].source, index, now_);
  host.ring_bytes += bytes;
  host.ring.push_back({unit, now_});
  if (host.wake_due || host.paused) return;
  if (options_.host_delay == 0 && options_.host_jitter == 0) {
    step(index);
    return;
  }
  host.wake_due = true;
  push(now_ + lateness(), Event::Kind::wake, index);
}

void Fabric::cross_packet(uint32_t index) {
  Cross& cross = cross_[index];
  const CrossTraffic& traffic = cross.traffic;
  const uint64_t bytes = uint64_t{kFullPacket} * traffic.train;
  link(cross.host, cross.direction).enqueue(now_, bytes, traffic.train, true);
  // The gaps vary, so that no sender finds the same slot of the queue each time.
  const double gap = static_cast<double>(bytes) * 1e9 / traffic.rate;
  Nanos next = now_ + 1 + static_cast<Nanos>(gap * (0.5 + random_.uniform()));
  if (next >= cross.burst_end) {
    if (traffic.period == 0) return;
    next = cross.burst_end - traffic.length + traffic.period;
    cross.burst_end += traffic.period;
  }
  push(next, Event::Kind::cross, index);
}

// Sends what a flow's window allows. A drop is known when the packets queued before it have been
// acknowledged.
void Fabric::flow_packets(uint32_t index) {
  Flow& entry = flows_[index];
  TcpFlow& flow = entry.flow;
  Link& port = link(entry.host, entry.direction);
  while (flow.sends(now_)) {
    const Nanos left = port.enqueue(now_, kFullPacket, 1, true);
    const bool dropped = left == kNever;
    flow.sent(now_, dropped);
    push((dropped ? port.empty_at(now_) : left) + flow.options.round,
         dropped ? Event::Kind::flow_lost : Event::Kind::flow_acked, index);
  }
}

}  // namespace gradwire::sim
