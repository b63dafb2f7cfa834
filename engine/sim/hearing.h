// Hearing keeps how long the wire alone kept hosts from hearing each other: a silence in which it
// lost many datagrams is no fault of the endpoints.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/base/time.h"

namespace gradwire::sim {

class Hearing {
 public:
  explicit Hearing(size_t hosts = 0) : hosts_(hosts), ways_(hosts * hosts) {}

  void arrived(uint16_t from, uint16_t to, Nanos now) {
    way(from, to) = {now, 0, longest(from, to)};
  }
  void lost(uint16_t from, uint16_t to, Nanos now) {
    ++way(from, to).lost;
    note(from, to, now);
    note(to, from, now);
  }
  // The longest time in which `to` heard nothing of `from` while the wire lost what they sent.
  Nanos longest(uint16_t from, uint16_t to) const { return ways_[from * hosts_ + to].longest; }

 private:
  // Datagrams of both ways that are lost in a silence which the wire explains. Pings that go more
  // often to a silent peer are more.
  static constexpr uint32_t kMany = 20;

  struct Way {
    Nanos heard = 0;
    uint32_t lost = 0;  // since then
    Nanos longest = 0;
  };
  Way& way(uint16_t from, uint16_t to) { return ways_[from * hosts_ + to]; }
  void note(uint16_t from, uint16_t to, Nanos now) {
    Way& one = way(from, to);
    if (one.lost == 0 || one.lost + way(to, from).lost < kMany) return;
    one.longest = std::max(one.longest, now - one.heard);
  }

  size_t hosts_;
  std::vector<Way> ways_;
};

}  // namespace gradwire::sim
