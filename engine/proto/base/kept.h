// Kept is memory of ops that are over, for the next op of the same size. Fresh memory costs its
// clearing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <new>
#include <utility>

#include "proto/base/zeroed.h"

namespace gradwire {

template <class T>
class Kept {
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
  // Keeps memory for `take`. `most`: bytes in all; the oldest goes.
  void give(Zeroed<T> memory, uint64_t most) noexcept {
    const size_t bytes = memory.size() * sizeof(T);
    if (bytes < kLeast || bytes > most) return;
    try {
      kept_.push_back(std::move(memory));
    } catch (const std::bad_alloc&) {
      return;
    }
    held_ += bytes;
    for (; held_ > most; kept_.pop_front()) held_ -= kept_.front().size() * sizeof(T);
  }

 private:
  static constexpr size_t kLeast = 256 << 10;  // bytes; the allocator keeps smaller memory itself

  std::deque<Zeroed<T>> kept_;
  uint64_t held_ = 0;  // bytes
};

}  // namespace gradwire
