// SentPackets is a ring of the packets sent on one path, indexed by packet number, with O(1)
// operations. It keeps packets until they are acknowledged or overwritten, and grows with what is
// in flight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/bit_ring.h"
#include "proto/base/time.h"
#include "wire/packet.h"

namespace gradwire {

struct SentPacket {
  // probed: sent again by a probe time-out or under heavy loss; its own fate is unknown.
  enum class State : uint8_t { none, flight, acked, lost, probed };
  uint64_t number = 0;
  uint64_t op = 0;
  Nanos time = 0;
  uint32_t item = 0;  // chunk id, or handle of a control frame
  uint16_t bytes = 0;
  wire::Kind kind = wire::Kind::push;
  State state = State::none;
  bool ect = false;      // sent as ECT(0)
  bool recovers = true;  // its own loss makes it go again; in passes it does not
  bool twin = false;     // another packet with the same chunk went right after it

  // True for packets of chunks, false for control frames.
  bool data() const { return kind == wire::Kind::push || kind == wire::Kind::pull; }
};

class SentPackets {
 public:
  // Packets in flight at most; enough for 40 ms at 40 Gbit/s.
  static constexpr uint64_t kMost = 131'072;

  SentPackets() : ring_(kFirst) {}

  uint64_t next() const { return next_; }
  uint64_t lowest() const { return lowest_; }  // no packet below it is in flight
  uint64_t in_flight() const { return in_flight_; }
  // The packets that can be added.
  uint64_t room() const { return kMost - 1 - std::min(next_ - lowest_, kMost - 1); }

  // Adds packets that differ in number and item only.
  void push(SentPacket packet, std::span<const uint32_t> items) {
    packet.state = SentPacket::State::flight;
    for (const uint32_t item : items) {
      // The slot of a packet that was sent again is kept, because its ACK may still arrive.
      if (next_ - lowest_ >= mask_ ||
          (at(next_).state == SentPacket::State::probed && ring_.size() < kMost / 2))
        grow();
      SentPacket& slot = at(next_);
      slot = packet;
      slot.number = next_++;
      slot.item = item;
    }
    open_.set(next_ - items.size(), next_ - 1);
    in_flight_ += items.size();
  }

  // The lowest number that has not been overwritten.
  uint64_t oldest() const { return next_ > ring_.size() ? next_ - ring_.size() : 1; }

  // Returns null when that number was never sent or has been overwritten.
  SentPacket* find(uint64_t number) {
    SentPacket& p = at(number);
    return p.number == number && p.state != SentPacket::State::none ? &p : nullptr;
  }

  // The packets among 64 that are not acknowledged: bit i stands for number - i. An ACK names the
  // same packets again and again, and this leaves the new ones of its bitmap. Numbers below
  // oldest() may appear.
  uint64_t open(uint64_t number) const { return open_.down_from(number); }

  void become(SentPacket& p, SentPacket::State state) {
    if (p.state == SentPacket::State::flight) --in_flight_;
    if (state == SentPacket::State::acked) open_.clear(p.number);
    p.state = state;
  }
  // Finds the lowest packet in flight; it is due after packets have become something else.
  void advance() {
    while (lowest_ < next_ && at(lowest_).state != SentPacket::State::flight) ++lowest_;
  }

 private:
  // Packets at first; a power of two, like kMost, for indexing by a mask.
  static constexpr uint64_t kFirst = 1'024;

  SentPacket& at(uint64_t number) { return ring_[number & mask_]; }
  void grow() {
    std::vector<SentPacket> larger(2 * ring_.size());
    open_ = BitRing(larger.size());
    for (const SentPacket& p : ring_) {
      larger[p.number & (larger.size() - 1)] = p;
      if (p.state != SentPacket::State::acked) open_.set(p.number);
    }
    ring_ = std::move(larger);
    mask_ = ring_.size() - 1;
  }

  std::vector<SentPacket> ring_;
  BitRing open_{kFirst};        // packets that are not acknowledged
  uint64_t mask_ = kFirst - 1;  // its size less one
  uint64_t next_ = 1;
  uint64_t lowest_ = 1;
  uint64_t in_flight_ = 0;
};

}  // namespace gradwire
