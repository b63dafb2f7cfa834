// ReceivedPackets records which packet numbers of one path have arrived, to recognise duplicates
// and to fill the ACK's bitmap. It has a fixed size: numbers older than its window count as seen.
#pragma once

#include <array>
#include <cstdint>

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
    return test(number);
  }

  // Records an arrival; true when numbers are missing before it. A refused packet leaves no gap, is
  // not acknowledged, and counts as new when it arrives again.
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

  // Writes the ACK's bitmap: bit i is set when largest - i has arrived.
  void fill(wire::Ack& ack, uint16_t words) const {
    for (uint16_t w = 0; w < words; ++w) {
      const uint64_t back = uint64_t{w} * 64;
      ack.bitmap[w] = back < largest_ ? reversed(up_to(largest_ - back)) : 0;
    }
    ack.words = words;
  }

 private:
  bool test(uint64_t n) const { return (words_[(n % kWindow) / 64] >> (n % 64)) & 1; }
  // The 64 numbers up to n, which has the highest bit.
  uint64_t up_to(uint64_t n) const {
    const uint64_t last = words_[(n % kWindow) / 64];
    const uint64_t above = 63 - n % 64;  // bits of `last` that are above n
    if (above == 0) return last;
    const uint64_t before = n < 64 ? 0 : words_[((n - 64) % kWindow) / 64];
    return last << above | before >> (64 - above);
  }
  static uint64_t reversed(uint64_t bits) {
    const auto swap = [&](int by, uint64_t low) { bits = (bits >> by & low) | (bits & low) << by; };
    swap(1, 0x5555555555555555u);
    swap(2, 0x3333333333333333u);
    swap(4, 0x0f0f0f0f0f0f0f0fu);
    return __builtin_bswap64(bits);
  }
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
