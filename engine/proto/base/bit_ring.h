// BitRing has one bit for each of so many consecutive numbers. A number shares its bit with the one
// a whole ring before it.
//
// Bits lie in descending order of numbers, as in an ACK's bitmap, so that a word of either is read
// at once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace gradwire {

class BitRing {
 public:
  // `numbers`: a power of two, 64 at least.
  explicit BitRing(uint64_t numbers) : words_(numbers / 64), mask_(numbers - 1) {}

  bool test(uint64_t n) const { return word(n) >> (~n % 64) & 1; }
  void clear() { std::fill(words_.begin(), words_.end(), 0); }
  // Sets or clears the bits of all numbers from `first` to `last`.
  void set(uint64_t first, uint64_t last) {
    for (uint64_t n = first; n <= last; n = (n | 63) + 1) word(n) |= part(n, last);
  }
  void clear(uint64_t first, uint64_t last) {
    for (uint64_t n = first; n <= last; n = (n | 63) + 1) word(n) &= ~part(n, last);
  }
  // The bits of 64 numbers: bit i is that of n - i. It is 0 for numbers below 1.
  uint64_t down_from(uint64_t n) const {
    const uint64_t above = ~n % 64;
    uint64_t bits = word(n) >> above;
    if (above) bits |= word(n - 64) << (64 - above);
    return bits & ones(n);
  }
  // Clears those of them that `bits` names.
  void clear_down_from(uint64_t n, uint64_t bits) {
    const uint64_t above = ~n % 64;
    word(n) &= ~(bits << above);
    if (above) word(n - 64) &= ~(bits >> (64 - above));
  }
  // The lowest number from `n` on whose bit is set, or `end` if that is not above it.
  uint64_t next(uint64_t n, uint64_t end) const {
    for (; n < end; n = (n | 63) + 1)
      if (const uint64_t bits = word(n) & (UINT64_MAX >> (n % 64)))
        return std::min(end, n / 64 * 64 + std::countl_zero(bits));
    return end;
  }
  // So many low bits, and all from 64 on.
  static uint64_t ones(uint64_t count) {
    return count < 64 ? (uint64_t{1} << count) - 1 : UINT64_MAX;
  }

 private:
  // The bits of the numbers from `first` to `last` that lie in the word of `first`.
  static uint64_t part(uint64_t first, uint64_t last) {
    return (UINT64_MAX >> (first % 64)) & (UINT64_MAX << (~std::min(last, first | 63) % 64));
  }
  uint64_t& word(uint64_t n) { return words_[(~n & mask_) / 64]; }
  uint64_t word(uint64_t n) const { return words_[(~n & mask_) / 64]; }

  std::vector<uint64_t> words_;
  uint64_t mask_;
};

}  // namespace gradwire
