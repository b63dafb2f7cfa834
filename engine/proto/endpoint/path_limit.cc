// Paths that carry shorter datagrams than agreed: longer ones go in fragments, and later ops agree
// on a length that all paths carry.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// The interval of pings in such a trial, at the start, when many peers may be late.
constexpr Nanos kTrialInterval = 50 * kMillisecond;
}  // namespace

void Endpoint::Impl::limit(Path& path, uint32_t bytes, Nanos now) {
  if (path.limit.lower(bytes, now)) lowered(path, now);
}

void Endpoint::Impl::raised(Path& path) {
  counters.now.path_limit = longest_datagram();
  path.life.ping_now = true;  // the PING no longer carries the old length
}

void Endpoint::Impl::lowered(Path& path, Nanos now) {
  counters.now.path_limit = longest_datagram();
  if (path.limit.bytes() < wire::kMinDatagram) {
    fail({"the path to " + name(path.peer) + " carries datagrams of " +
              std::to_string(path.limit.bytes()) + " bytes at the most, of the " +
              std::to_string(config.datagram_bytes) + " agreed (datagram=); at least " +
              std::to_string(wire::kMinDatagram) + " are needed: raise the MTU of its interfaces",
          path.peer, Cause::mtu},
         now);
    return;
  }
  path.life.ping_now = true;  // the PING carries the new length
  path.recovery.give_up_longer(path.limit.bytes(), scratch.lost);
  packets_lost(path, now);
}

void Endpoint::Impl::check_limit(Path& path, Nanos now) {
  if (path.farewell.gone) return;
  if (!path.life.connected) {
    if (path.life.first_ping && now - path.life.first_ping > kTrialAfter)
      path.limit.try_out(now, kTrialInterval);
    return;
  }
  if (path.limit.suspect(now, path.recovery.rtt.round())) emit(Event::Type::suspect, path.peer);
}

uint32_t Endpoint::Impl::longest_datagram() const {
  uint32_t longest = config.datagram_bytes;
  for (const auto& p : paths)
    if (p) longest = std::min(longest, p->limit.both_ways());
  return longest;
}

// Splits the only datagram of the train into fragments that its path carries.
void Endpoint::Impl::split(Path& path, Train& train) {
  std::vector<uint8_t> whole;
  whole.reserve(train.total_bytes);
  for (size_t half = 0; half < 2; ++half) {
    const auto* data = static_cast<const uint8_t*>(train.spans[half].data);
    whole.insert(whole.end(), data, data + train.spans[half].size);
  }
  train.control = std::move(whole);
  const auto total = static_cast<uint32_t>(train.control.size());
  const uint32_t most = path.limit.bytes() - static_cast<uint32_t>(wire::kFragmentBytes);
  const uint32_t number = ++path.fragments.sent;
  train.count = 0;
  train.total_bytes = 0;
  for (uint32_t at = 0; at < total; at += most) {
    const uint32_t bytes = std::min(most, total - at);
    uint8_t* const header = train.headers[train.count].data();
    wire::write_fragment(header, common(wire::Kind::fragment),
                         {number, static_cast<uint16_t>(total), static_cast<uint16_t>(at)});
    train.spans[2 * train.count] = {header, wire::kFragmentBytes};
    train.spans[2 * train.count + 1] = {train.control.data() + at, bytes};
    train.total_bytes += static_cast<uint32_t>(wire::kFragmentBytes) + bytes;
    ++train.count;
  }
  train.segment_bytes = path.limit.bytes();
  ++counters.fragmented;
}

void Endpoint::Impl::on_fragment(Path& path, std::span<const uint8_t> datagram, Nanos now,
                                 Nanos arrival, uint8_t ecn) {
  const auto fragment = wire::read_fragment(datagram);
  if (!fragment) {
    ++counters.malformed;
    return;
  }
  const auto whole =
      path.fragments.arriving.add(fragment->number, fragment->total, fragment->offset,
                                  datagram.subspan(wire::kFragmentBytes), config.datagram_bytes);
  if (whole.empty()) return;
  const auto head = wire::read_common(whole);
  if (!head || head->version != wire::kVersion || head->session != config.session ||
      head->source != path.peer || head->kind == wire::Kind::fragment) {
    ++counters.malformed;
    return;
  }
  on_packet(path, head->kind, whole, now, arrival, ecn);
}

}  // namespace gradwire
