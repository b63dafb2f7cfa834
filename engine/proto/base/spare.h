// Spare keeps memory that an op is done with for the next op of the same size. Fresh memory costs
// its clearing, which took a fifth of the time of large sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>

#include "proto/base/zeroed.h"

namespace gradwire {

template <class T>
class Spare {
 public:
  // Memory of this size, with old values in it.
  Zeroed<T> take(size_t count) {
    const auto fits = std::ranges::find(kept_, count, &Zeroed<T>::size);
    if (fits == kept_.end()) return Zeroed<T>(count);
    Zeroed<T> found = std::move(*fits);
    kept_.erase(fits);
    held_ -= count * sizeof(T);
    return found;
  }
  void give(Zeroed<T> memory) {
    const size_t bytes = memory.size() * sizeof(T);
    if (bytes < kLeast || bytes > kMost) return;
    held_ += bytes;
    kept_.push_back(std::move(memory));
    for (; held_ > kMost; kept_.pop_front()) held_ -= kept_.front().size() * sizeof(T);
  }

 private:
  static constexpr size_t kLeast = 256 << 10;  // bytes; the allocator keeps smaller memory itself
  static constexpr size_t kMost = 64 << 20;    // bytes in all; the oldest goes

  std::deque<Zeroed<T>> kept_;
  size_t held_ = 0;  // bytes
};

// The memory of sums and of encoded results.
struct SpareSums {
  Spare<float> sums;
  Spare<uint8_t> results;
};

}  // namespace gradwire
