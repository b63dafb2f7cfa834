// ReplayWindow knows which of the latest numbers have come (RFC 6479). What is older than all that
// it knows counts as come.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace gradwire::seal {

class ReplayWindow {
 public:
  // Numbers below the highest that may still come: more than overtake each other on a fast path.
  static constexpr uint64_t kNumbers = 32'768 - 64;

  uint64_t highest() const { return highest_; }
  bool fresh(uint64_t number) const {
    if (number > highest_) return true;
    return number + kNumbers > highest_ && !(word(number) >> number % 64 & 1);
  }
  void record(uint64_t number) {
    if (number > highest_) {
      const uint64_t words = std::min<uint64_t>(number / 64 - highest_ / 64, words_.size());
      for (uint64_t i = 1; i <= words; ++i) words_[(highest_ / 64 + i) % words_.size()] = 0;
      highest_ = number;
    }
    words_[number / 64 % words_.size()] |= uint64_t{1} << number % 64;
  }

 private:
  uint64_t word(uint64_t number) const { return words_[number / 64 % words_.size()]; }

  std::array<uint64_t, (kNumbers + 64) / 64> words_{};
  uint64_t highest_ = 0;
};

}  // namespace gradwire::seal
