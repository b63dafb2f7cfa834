// ReceivedPackets records which packet numbers of one path have arrived, to recognise duplicates
// and to fill the ACK's bitmap. It has a fixed size: numbers older than its window count as seen.
#pragma once

#include <cstdint>

#include "proto/base/bit_ring.h"
#include "wire/packet.h"

namespace gradwire {

class ReceivedPackets {
 public:
  // Packet numbers that are remembered; older ones count as seen.
  static constexpr uint64_t kWindow = 65'536;

  uint64_t largest() const { return largest_; }

  bool seen(uint64_t number) const {
    if (number > largest_) return false;
    if (largest_ - number >= kWindow) return true;
    return arrived_.test(number);
  }

  // Records arrivals with consecutive numbers; true when numbers are missing before them. Refused
  // packets leave no gap, are not acknowledged, and count as new when they arrive again.
  bool insert(uint64_t first, uint64_t last, bool refused) {
    const bool gap = first > largest_ + 1;
    if (last > largest_) {
      if (last - largest_ > kWindow)
        arrived_.clear();
      else
        arrived_.clear(largest_ + 1, last);
      largest_ = last;
    }
    if (!refused) arrived_.set(first, last);
    return gap;
  }

  // Writes the ACK's bitmap: bit i is set when largest - i has arrived.
  void fill(wire::Ack& ack, uint16_t words) const {
    for (uint16_t w = 0; w < words; ++w) {
      const uint64_t back = uint64_t{w} * 64;
      ack.bitmap[w] = back < largest_ ? arrived_.down_from(largest_ - back) : 0;
    }
    ack.words = words;
  }

 private:
  uint64_t largest_ = 0;  // packet numbers start at 1
  BitRing arrived_{kWindow};
};

}  // namespace gradwire
