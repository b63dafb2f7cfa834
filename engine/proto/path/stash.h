// Stash holds the packets of ops that have not started here, by op and in order of arrival.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/memory.h"

namespace gradwire {

class Stash {
 public:
  using Datagram = std::vector<uint8_t>;
  // Packets are stashed while memory allows: so many of each path in any case, and so many of all
  // paths together.
  static constexpr size_t kMost = 512;
  static constexpr size_t kInAll = 8192;
  // The bytes that a datagram holds, with the allocation.
  static size_t cost(size_t bytes) { return bytes + 64; }
  // Packets of all ops.
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Keeps a packet; false when there is no room. `all`: the packets in all stashes together.
  bool add(uint64_t op, std::span<const uint8_t> datagram, size_t& all, Memory& memory) {
    const size_t bytes = cost(datagram.size());
    no_room_ = (size_ >= kMost && all >= kInAll) || !memory.has_early(bytes);
    if (no_room_) return false;
    memory.early += bytes;
    by_op_[op].emplace_back(datagram.begin(), datagram.end());
    ++size_;
    ++all;
    return true;
  }
  // Takes out the packets of an op that starts.
  std::vector<Datagram> take(uint64_t op, size_t& all, Memory& memory) {
    no_room_ = false;
    auto found = by_op_.extract(op);
    if (found.empty()) return {};
    for (const Datagram& each : found.mapped()) memory.early -= cost(each.size());
    size_ -= found.mapped().size();
    all -= found.mapped().size();
    return std::move(found.mapped());
  }
  // A packet was refused, and no op has started since.
  bool no_room() const { return no_room_; }

 private:
  std::map<uint64_t, std::vector<Datagram>> by_op_;
  size_t size_ = 0;
  bool no_room_ = false;
};

}  // namespace gradwire
