// EndpointConfig is what an endpoint knows of its job from the start.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/overhead.h"
#include "proto/base/time.h"

namespace gradwire {

// The number of an endpoint that aggregates nothing.
inline constexpr uint16_t kNoAggregator = UINT16_MAX;

struct EndpointConfig {
  uint16_t endpoint = 0;  // workers first, then servers
  uint16_t workers = 1;
  uint16_t servers = 0;  // 0: route sharded
  uint32_t session = 0;
  uint32_t datagram_bytes = 1472;
  uint32_t tag_bytes = 0;  // by which the driver makes each datagram longer
  Nanos peer_timeout = 30 * kSecond;
  Nanos ping_interval = 1 * kSecond;
  Nanos delay_target = 1300 * kMicrosecond;   // the standing queue that congestion control aims at
  uint32_t receive_buffer = 1u << 20;         // usable bytes of the socket's receive buffer
  uint64_t memory_limit = uint64_t{1} << 31;  // bytes held for peers (proto/base/memory.h)
  bool pacing = true;
  uint8_t dscp = 0;             // of all datagrams whose plan gives no other
  bool ecn = true;              // acknowledged packets go as ECT(0) where the path carries it
  std::vector<uint32_t> ranks;  // the workers' names in texts; empty: 0, 1, 2, …
  // Endpoints of one process divide the chunks of each op among them, and the windows of their
  // host's port: how many there are, and which of them this is.
  uint16_t engines = 1;
  uint16_t engine = 0;

  // The bytes on the wire of a full datagram.
  uint32_t wire_bytes() const { return datagram_bytes + kOverhead; }
  uint16_t endpoints() const { return static_cast<uint16_t>(workers + servers); }
  uint16_t aggregators() const { return servers ? servers : workers; }
  bool aggregates() const { return servers == 0 || endpoint >= workers; }
  // The index of the shard that is aggregated here.
  uint16_t shard() const { return static_cast<uint16_t>(servers ? endpoint - workers : endpoint); }
  std::string name(uint16_t number) const {  // "rank 3", "server 0"
    if (number >= workers) return "server " + std::to_string(number - workers);
    return "rank " + std::to_string(ranks.empty() ? number : ranks[number]);
  }
  // The number of endpoints with which one exchanges packets.
  uint32_t peers_of(uint16_t number) const {
    if (servers == 0) return workers - 1u;
    return number < workers ? servers : workers;
  }
  // True for endpoints that exchange packets: workers with each other, or workers with servers.
  bool talks_to(uint16_t other) const {
    return servers == 0 || (endpoint < workers) != (other < workers);
  }
  // The number of an endpoint as an aggregator, or kNoAggregator.
  uint16_t aggregator_at(uint16_t number) const {
    if (servers == 0) return number;
    return number >= workers ? static_cast<uint16_t>(number - workers) : kNoAggregator;
  }
  uint16_t aggregator_endpoint(uint16_t aggregator) const {
    return static_cast<uint16_t>(servers ? workers + aggregator : aggregator);
  }
};

}  // namespace gradwire
