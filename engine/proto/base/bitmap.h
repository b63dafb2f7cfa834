// Bitmap is a set of small integers below a fixed size, one bit each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/base/zeroed.h"

namespace gradwire {

class Bitmap {
 public:
  Bitmap() = default;
  explicit Bitmap(size_t size) : size_(size), words_((size + 63) / 64) {}

  bool test(size_t i) const { return (words_[i / 64] >> (i % 64)) & 1; }
  // Sets the bit; true when it was clear before.
  bool set(size_t i) {
    const uint64_t bit = uint64_t{1} << (i % 64);
    const bool fresh = !(words_[i / 64] & bit);
    words_[i / 64] |= bit;
    return fresh;
  }
  bool any() const {
    return std::ranges::any_of(words_, [](uint64_t word) { return word != 0; });
  }
  size_t size() const { return size_; }

  size_t byte_size() const { return (size_ + 7) / 8; }
  void append_bytes(std::vector<uint8_t>& out) const {
    for (size_t i = 0; i < byte_size(); ++i)
      out.push_back(static_cast<uint8_t>(words_[i / 8] >> (8 * (i % 8))));
  }
  // Reads what append_bytes() wrote. Bits beyond size() in the last byte are ignored.
  void assign_bytes(const uint8_t* bytes) {
    for (uint64_t& word : words_) word = 0;
    for (size_t i = 0; i < size_; ++i)
      if ((bytes[i / 8] >> (i % 8)) & 1) set(i);
  }

 private:
  size_t size_ = 0;
  Zeroed<uint64_t> words_;
};

}  // namespace gradwire
