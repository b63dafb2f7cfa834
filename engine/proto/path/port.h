// Port is what all paths of one endpoint share: the windows of its host's port, and how the
// endpoint stands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "proto/base/config.h"
#include "proto/base/counters.h"
#include "proto/base/memory.h"
#include "proto/base/train.h"
#include "proto/congestion/send_controller.h"
#include "proto/credit/receive_controller.h"
#include "proto/recovery/recovery.h"
#include "wire/packet.h"

namespace gradwire {

struct Port {
  explicit Port(const EndpointConfig& c)
      : config(c),
        sender(c.wire_bytes(), c.delay_target, c.pacing, c.endpoints(), c.engines),
        receiver({c.endpoints(), c.peers_of(c.endpoint), c.workers, c.wire_bytes(),
                  kUnreadShare * c.receive_buffer / c.engines, c.delay_target,
                  c.endpoint >= c.workers, c.engines}),
        dscp(c.dscp) {
    memory.limit = c.memory_limit;
  }

  const EndpointConfig config;
  SendController sender;
  ReceiveController receiver;
  Memory memory;       // of all ops, and of packets of ops that have not started here
  size_t stashed = 0;  // such packets
  Counters counters;
  uint8_t dscp;  // of control packets: that of the first class in the newest op's plan
  // How the endpoint stands.
  bool failed = false;
  bool leaving = false;
  bool left = false;  // it has left: nothing is sent any more
  // Memory that is used again and again.
  Recovery::Acked acked;
  std::vector<Recovery::Lost> lost;

  // What arrives shows what this port carries as well, unless losses show that less leaves it.
  double btlbw() const {
    const double sent = sender.window().rate();
    if (sent > 0 && sender.window().room() <= kOwnRate) return sent;
    return std::max(sent, receiver.window().rate());
  }
  // The packets that a train holds.
  uint32_t longest_train() const {
    return static_cast<uint32_t>(std::min(
        Train::kMaxSegments, Train::kMaxBytes / (config.datagram_bytes + wire::kTagBytes)));
  }
  wire::Common header(wire::Kind kind) const {
    return {wire::kVersion, kind, config.endpoint, config.session};
  }

 private:
  // The room up to which losses limit what leaves this port.
  static constexpr double kOwnRate = 0.5;
  // The share of the socket's receive buffer that a window may fill, since packets also wait there
  // while this host is busy.
  static constexpr double kUnreadShare = 0.5;
};

}  // namespace gradwire
