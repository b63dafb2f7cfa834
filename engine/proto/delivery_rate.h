// BtlBw: the windowed maximum of delivery-rate samples over all paths of an endpoint (BBR; delivery
// rate estimation draft-cheng-iccrg-delivery-rate-estimation).
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/sent_packets.h"
#include "proto/time.h"

namespace gradwire {

class DeliveryRate {
 public:
  void on_send(SentPacket& packet, uint64_t in_flight_before, Nanos now) const {
    packet.delivered = delivered_;
    packet.delivered_time = in_flight_before == 0 ? now : delivered_time_;
  }
  void on_ack(const SentPacket& packet, Nanos now) {
    delivered_ += packet.bytes;
    delivered_time_ = now;
    newest_ = packet;
  }
  // After each ACK: one sample from the newest packet that it covered.
  void end_of_ack(Nanos now) {
    if (newest_.number == 0) return;
    const Nanos elapsed = now - newest_.delivered_time;
    const uint64_t bytes = delivered_ - newest_.delivered;
    newest_.number = 0;
    // Short intervals overstate the rate: ACKs come in clumps.
    if (elapsed < kShortest || bytes < 16 * 1024) return;
    const double rate = static_cast<double>(bytes) * 1e9 / static_cast<double>(elapsed);
    if (now - start_ > kWindow / 2) {
      previous_ = current_;
      current_ = rate;
      start_ = now;
    } else {
      current_ = std::max(current_, rate);
    }
  }
  double bytes_per_second() const { return std::max(previous_, current_); }

 private:
  static constexpr Nanos kShortest = 1 * kMillisecond;
  static constexpr Nanos kWindow = 10 * kSecond;
  uint64_t delivered_ = 0;
  Nanos delivered_time_ = 0;
  SentPacket newest_{};
  Nanos start_ = 0;
  double current_ = 0;
  double previous_ = 0;
};

}  // namespace gradwire
