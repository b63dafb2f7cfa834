#include "sim/tcp_flow.h"

#include <algorithm>

#include "proto/base/overhead.h"

namespace gradwire::sim {

void TcpFlow::sent(Nanos now, bool dropped) {
  ++counters.packets;
  ++in_flight_;
  if (!dropped) return;
  ++counters.dropped;
  dropped_.push_back(now);
}

void TcpFlow::acked() {
  --in_flight_;
  counters.delivered_bytes += kFullPacket;
  window_ += window_ < threshold_ ? 1.0 : 1.0 / window_;
}

// All losses of one flight are one signal (RFC 6582).
void TcpFlow::lost(Nanos now) {
  --in_flight_;
  const Nanos sent = dropped_.front();
  dropped_.pop_front();
  if (sent <= cut_) return;
  cut_ = now;
  window_ = threshold_ = std::max(2.0, window_ / 2);
}

}  // namespace gradwire::sim
