// Agenda keeps the time at which each of a number of things is due, and finds the first. It is a
// tournament tree: setting a time and finding what is due take logarithmic time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "proto/base/time.h"

namespace gradwire {

class Agenda {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  explicit Agenda(size_t size = 1) : leaves_(std::bit_ceil(std::max<size_t>(1, size))) {
    tree_.assign(2 * leaves_, kNever);
  }

  void set(size_t index, Nanos due) {
    size_t at = leaves_ + index;
    if (tree_[at] == due) return;
    tree_[at] = due;
    while (at > 1) {
      at /= 2;
      const Nanos least = std::min(tree_[2 * at], tree_[2 * at + 1]);
      if (tree_[at] == least) return;
      tree_[at] = least;
    }
  }
  Nanos earliest() const { return tree_[1]; }
  // The lowest index from `from` on that is due at `now`, or kNone.
  size_t due(Nanos now, size_t from = 0) const {
    if (from >= leaves_) return kNone;
    size_t at = leaves_ + from;
    // Up, to the first subtree on the right that has something due …
    while (tree_[at] > now) {
      while (at % 2 == 1) {
        at /= 2;
        if (at <= 1) return kNone;
      }
      ++at;
    }
    // … and down in it.
    while (at < leaves_) at = tree_[2 * at] <= now ? 2 * at : 2 * at + 1;
    return at - leaves_;
  }

 private:
  size_t leaves_;
  std::vector<Nanos> tree_;  // by node: the earliest time below it
};

}  // namespace gradwire
