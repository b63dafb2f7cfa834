// Liveness keeps a peer's signs of life: when it was last heard, and which pings go to it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/config.h"
#include "proto/base/time.h"

namespace gradwire {

class Liveness {
 public:
  // The silence after which pings go more often, so that a peer that lives is heard soon.
  static Nanos long_silence(const EndpointConfig& config) {
    return std::min(kSilentPings * config.ping_interval, config.peer_timeout / 2);
  }

  Nanos last_heard = 0;
  bool heard = false;      // a packet has arrived
  bool connected = false;  // a ping of full length has been answered
  bool ping_now = false;
  bool pong_now = false;
  uint64_t pong_stamp = 0;
  uint16_t pinged_lane = 0;  // lane of the last PING or PONG
  Nanos last_ping = 0;
  Nanos first_ping = 0;
  Nanos called = 0;  // the first ping, or the first packet if that came later

  void note(Nanos now) {
    if (!heard) called = now;
    last_heard = now;
    heard = true;
  }
  // The time of the next ping, if nothing is heard until then. Pings follow each other quickly at
  // first, and after a long silence, which heavy loss may cause too. `failed`: this endpoint has
  // failed, and looks for no peer.
  Nanos next_ping(const EndpointConfig& config, bool failed) const {
    if (!connected) return last_ping + calling(config.ping_interval);
    const Nanos usual = last_ping + config.ping_interval;
    if (failed) return usual;
    return std::min(usual, std::max(last_heard + long_silence(config) + 1,
                                    last_ping + config.ping_interval / kUrgentPings));
  }

 private:
  // The interval until the first answer. Pings have the longest datagram's length then, and those
  // of many peers may fill a slow port, so they go the less often the longer none is answered.
  Nanos calling(Nanos interval) const {
    return std::clamp((last_ping - called) / 2, kConnectPing, std::max(kConnectPing, interval));
  }

  // The first interval of pings.
  static constexpr Nanos kConnectPing = 50 * kMillisecond;
  // Ping intervals without a packet after which a peer is pinged more often.
  static constexpr int kSilentPings = 5;
  // Pings in place of one to a silent peer: under heavy loss most pings and answers are lost.
  static constexpr int kUrgentPings = 50;
};

}  // namespace gradwire
