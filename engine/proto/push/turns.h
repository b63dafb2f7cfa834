// Turns keeps contributions to exact sums until it is their turn: a chunk is summed in the order of
// ranks, so that the result is the same to the bit whenever they arrive. They wait where they were
// received if that may be held, else in a copy.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/memory.h"
#include "proto/base/zeroed.h"

namespace gradwire {

class Turns {
 public:
  Turns(uint32_t chunks, Memory& memory)
      : memory_(memory), turn_(chunks), head_(chunks), waiting_(1) {}
  ~Turns() {
    memory_.waiting -= bytes_;
    for (Waiting& entry : waiting_)
      if (entry.buffer) --entry.buffer->holders;
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // The memory of a copied contribution, with its entry and its allocation, in bytes.
  static constexpr uint64_t cost(uint64_t bytes) { return bytes + 64; }

  // The rank whose contribution to this chunk is next.
  uint16_t turn(uint32_t chunk) const { return turn_[chunk]; }
  // That rank's contribution is in the sum; returns the next rank.
  uint16_t pass(uint32_t chunk) { return ++turn_[chunk]; }
  // True when this contribution may wait where it is.
  bool stays(std::span<const uint8_t> payload) const { return memory_.buffer_of(payload); }
  // True when memory allows this contribution to wait.
  bool has_room(std::span<const uint8_t> payload) const {
    return stays(payload) || memory_.has_waiting(cost(payload.size()));
  }
  void keep(uint32_t chunk, uint16_t rank, std::span<const uint8_t> payload) {
    uint32_t slot = free_;
    if (slot == kNone) {
      slot = static_cast<uint32_t>(waiting_.size());
      waiting_.emplace_back();
    } else {
      free_ = waiting_[slot].next;
    }
    Waiting& entry = waiting_[slot];
    entry.rank = rank;
    entry.next = std::exchange(head_[chunk], slot);
    entry.buffer = memory_.buffer_of(payload);
    entry.at = payload.data();
    if (entry.buffer) {
      ++entry.buffer->holders;
      return;
    }
    entry.bytes.assign(payload.begin(), payload.end());
    entry.at = entry.bytes.data();
    count(cost(payload.size()));
  }
  // Takes the waiting contribution of a rank, which lives until release(); null when it has not
  // arrived.
  const uint8_t* take(uint32_t chunk, uint16_t rank) {
    uint32_t* link = &head_[chunk];
    while (*link != kNone && waiting_[*link].rank != rank) link = &waiting_[*link].next;
    if (*link == kNone) return nullptr;
    const uint32_t slot = *link;
    taken_.push_back(slot);
    *link = waiting_[slot].next;
    return waiting_[slot].at;
  }
  // Those taken are in the sum.
  void release() {
    for (const uint32_t slot : taken_) {
      Waiting& entry = waiting_[slot];
      entry.next = std::exchange(free_, slot);
      if (Buffer* const buffer = std::exchange(entry.buffer, nullptr)) {
        --buffer->holders;
        continue;
      }
      count(-cost(entry.bytes.size()));
      if (slot > kMostSpare) entry.bytes = {};
    }
    taken_.clear();
  }

 private:
  // No entry of waiting_.
  static constexpr uint32_t kNone = 0;
  // Entries that keep the memory of their last contribution for the next one.
  static constexpr size_t kMostSpare = 64;
  struct Waiting {
    uint32_t next;
    uint16_t rank;
    Buffer* buffer;  // where it stays; null: it is copied
    const uint8_t* at;
    std::vector<uint8_t> bytes;  // the copy
  };
  void count(uint64_t bytes) {
    bytes_ += bytes;
    memory_.waiting += bytes;
  }

  Memory& memory_;
  Zeroed<uint16_t> turn_;         // by chunk of the shard
  Zeroed<uint32_t> head_;         // by chunk: its list in waiting_
  std::vector<Waiting> waiting_;  // entry 0 stands for none
  std::vector<uint32_t> taken_;   // entries, until release()
  uint32_t free_ = kNone;
  uint64_t bytes_ = 0;  // this op's part of memory_.waiting
};

}  // namespace gradwire
