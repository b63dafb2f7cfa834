// SentPackets are the packets sent on one path, in rings indexed by packet number. Those that went
// together share one record. Packets are kept until they are overwritten, and the rings grow with
// what is in flight.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/bit_ring.h"
#include "proto/base/time.h"
#include "wire/packet.h"

namespace gradwire {

struct SentPacket {
  uint64_t number = 0;
  uint64_t op = 0;
  Nanos time = 0;
  uint32_t item = 0;  // chunk id, or handle of a control frame
  uint16_t bytes = 0;
  wire::Kind kind = wire::Kind::push;
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
  // What a packet may be: open until it is acknowledged, in flight, or declared lost. One that is
  // open and neither was sent again, and its own fate is unknown.
  enum Is : size_t { kOpen, kFlight, kLost, kStates };

  uint64_t next() const { return next_; }
  // The lowest packet in flight, and the one after another; next() without one.
  uint64_t lowest() const { return lowest_; }
  uint64_t after(uint64_t number) const { return bits_[kFlight].next(number + 1, next_); }
  uint64_t in_flight() const { return in_flight_; }
  // True while a packet that was sent is in flight.
  bool flies(uint64_t number) const { return number >= lowest_ && bits_[kFlight].test(number); }
  // The packets that can be added.
  uint64_t room() const { return kMost - 1 - std::min(next_ - lowest_, kMost - 1); }

  // Adds packets that go together, and differ in number and item only: as many as a word has bits
  // at most. `first`: the first of them.
  void push(const SentPacket& first, std::span<const uint32_t> items) {
    const uint64_t last = next_ + items.size() - 1;
    // A packet that was sent again is kept, because its ACK may still arrive.
    while (last - lowest_ >= mask_ ||
           (slots_.size() < kMost / 2 &&
            in(kOpen, last) & ~in(kLost, last) & BitRing::ones(items.size())))
      grow();
    trains_[++train_ & mask_] = first;
    bits_[kOpen].set(next_, last);
    bits_[kFlight].set(next_, last);
    bits_[kLost].clear(next_, last);
    in_flight_ += items.size();
    for (const uint32_t item : items) slots_[next_++ & mask_] = {train_, item};
  }

  // The lowest number that has not been overwritten.
  uint64_t oldest() const { return next_ > slots_.size() ? next_ - slots_.size() : 1; }
  // The first of the packets that went with one that has not been overwritten.
  const SentPacket& train(uint64_t number) const { return trains_[slot(number).train & mask_]; }
  uint32_t item(uint64_t number) const { return slot(number).item; }

  // Those of 64 packets that are so: bit i stands for number - i. Numbers below oldest() may
  // appear. An ACK names the same packets again and again; those that are open are its new ones.
  uint64_t in(Is state, uint64_t number) const { return bits_[state].down_from(number); }

  // Open packets among 64 are acknowledged; advance() is due after the last of them.
  void acknowledge(uint64_t number, uint64_t bits) {
    in_flight_ -= std::popcount(bits & in(kFlight, number));
    bits_[kOpen].clear_down_from(number, bits);
    bits_[kFlight].clear_down_from(number, bits);
  }
  void advance() { lowest_ = bits_[kFlight].next(lowest_, next_); }
  // A packet leaves flight without an acknowledgement.
  SentPacket give_up(uint64_t number, bool lost) {
    --in_flight_;
    bits_[kFlight].clear(number, number);
    if (lost) bits_[kLost].set(number, number);
    advance();
    SentPacket packet = train(number);
    packet.number = number;
    packet.item = item(number);
    return packet;
  }

 private:
  // Packets at first; a power of two, like kMost, for indexing by a mask.
  static constexpr uint64_t kFirst = 1'024;
  struct Slot {
    uint32_t train = 0;
    uint32_t item = 0;
  };

  const Slot& slot(uint64_t number) const { return slots_[number & mask_]; }
  void grow() {
    const SentPackets old = *this;
    mask_ = 2 * mask_ + 1;
    trains_.assign(mask_ + 1, {});
    slots_.assign(mask_ + 1, {});
    bits_.assign(kStates, BitRing(mask_ + 1));
    for (uint64_t n = old.oldest(); n < next_; ++n) {
      slots_[n & mask_] = old.slot(n);
      trains_[slot(n).train & mask_] = old.train(n);
      for (size_t is = 0; is < kStates; ++is)
        if (old.bits_[is].test(n)) bits_[is].set(n, n);
    }
  }

  std::vector<SentPacket> trains_ = std::vector<SentPacket>(kFirst);
  std::vector<Slot> slots_ = std::vector<Slot>(kFirst);
  std::vector<BitRing> bits_ = std::vector<BitRing>(kStates, BitRing(kFirst));
  uint64_t mask_ = kFirst - 1;  // the rings' size less one
  uint32_t train_ = 0;          // of the last packet
  uint64_t next_ = 1;
  uint64_t lowest_ = 1;
  uint64_t in_flight_ = 0;
};

}  // namespace gradwire
