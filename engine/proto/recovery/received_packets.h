// Which packet numbers of one path arrived: duplicates are recognised, the ACK's bitmap is cut from
// here. Flat and of fixed size: what is older than the window counts as seen.
#pragma once

#include <array>
#include <cstdint>

#include "wire/packet.h"

namespace gradwire {

class ReceivedPackets {
 public:
  static constexpr uint64_t kWindow = 65'536;

  uint64_t largest() const { return largest_; }

  bool seen(uint64_t number) const {
    if (number > largest_) return false;
    if (largest_ - number >= kWindow) return true;
    return test(number);
  }

  // True when a gap has opened (number is beyond the next one expected). One that was refused is
  // no gap, is not acknowledged, and counts as new should it come again.
  bool insert(uint64_t number, bool refused = false) {
    bool gap = false;
    if (number > largest_) {
      gap = number > largest_ + 1;
      const uint64_t first = largest_ + 1;
      if (number - first >= kWindow) {
        words_.fill(0);
      } else {
        clear(first, number);
      }
      largest_ = number;
    }
    if (!refused) words_[(number % kWindow) / 64] |= uint64_t{1} << (number % 64);
    return gap;
  }

  // Bit i of the result: largest - i arrived.
  void fill(wire::Ack& ack, uint16_t words) const {
    for (uint16_t w = 0; w < words; ++w) {
      uint64_t bits = 0;
      for (uint64_t i = 0; i < 64; ++i) {
        const uint64_t back = uint64_t{w} * 64 + i;
        if (back >= largest_) break;
        if (test(largest_ - back)) bits |= uint64_t{1} << i;
      }
      ack.bitmap[w] = bits;
    }
    ack.words = words;
  }

 private:
  bool test(uint64_t n) const { return (words_[(n % kWindow) / 64] >> (n % 64)) & 1; }
  void clear(uint64_t first, uint64_t last) {
    for (uint64_t n = first; n <= last;) {
      uint64_t& word = words_[(n % kWindow) / 64];
      if (n % 64 == 0 && n + 63 <= last) {
        word = 0;
        n += 64;
      } else {
        word &= ~(uint64_t{1} << (n % 64));
        ++n;
      }
    }
  }

  uint64_t largest_ = 0;  // packet numbers start at 1
  std::array<uint64_t, kWindow / 64> words_{};
};

}  // namespace gradwire
