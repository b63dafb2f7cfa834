// What was sent on one path and is not settled yet: a ring indexed by packet number, O(1)
// throughout. It grows with what a long path has in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/time.h"
#include "wire/packet.h"

namespace gradwire {

struct SentPacket {
  // probed: sent again by a tail probe, which says nothing about its fate
  enum class State : uint8_t { none, flight, acked, lost, probed };
  uint64_t number = 0;
  uint64_t op = 0;
  Nanos time = 0;
  uint32_t item = 0;  // chunk id, or slot of a control frame
  uint16_t bytes = 0;
  wire::Kind kind = wire::Kind::push;
  State state = State::none;
  bool ect = false;  // sent as ECT(0)
};

class SentPackets {
 public:
  static constexpr uint64_t kMost = 131'072;  // in flight: 40 ms at 40 Gbit/s

  SentPackets() : ring_(kFirst) {}

  uint64_t next() const { return next_; }
  uint64_t lowest() const { return lowest_; }  // nothing below is in flight
  uint64_t in_flight() const { return in_flight_; }
  bool full() const { return next_ - lowest_ >= kMost - 1; }

  SentPacket& push() {
    // Word of what was sent again early is still to come.
    if (next_ - lowest_ >= ring_.size() - 1 ||
        (at(next_).state == SentPacket::State::probed && ring_.size() < kMost / 2))
      grow();
    SentPacket& p = at(next_);
    p.number = next_++;
    p.state = SentPacket::State::flight;
    ++in_flight_;
    return p;
  }

  uint64_t history() const { return ring_.size(); }

  // Null when that number was never sent or is too old to be known.
  SentPacket* find(uint64_t number) {
    SentPacket& p = at(number);
    return p.number == number && p.state != SentPacket::State::none ? &p : nullptr;
  }

  void settle(SentPacket& p, SentPacket::State state) {
    if (p.state == SentPacket::State::flight) --in_flight_;
    p.state = state;
    while (lowest_ < next_ && at(lowest_).state != SentPacket::State::flight) ++lowest_;
  }

 private:
  static constexpr uint64_t kFirst = 8'192;  // a power of two, as kMost

  SentPacket& at(uint64_t number) { return ring_[number & (ring_.size() - 1)]; }
  void grow() {
    std::vector<SentPacket> larger(2 * ring_.size());
    for (const SentPacket& p : ring_) larger[p.number & (larger.size() - 1)] = p;
    ring_ = std::move(larger);
  }

  std::vector<SentPacket> ring_;
  uint64_t next_ = 1;
  uint64_t lowest_ = 1;
  uint64_t in_flight_ = 0;
};

}  // namespace gradwire
