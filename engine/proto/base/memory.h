// Memory counts what an endpoint holds for its peers and decides what its limit still admits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "proto/base/buffer.h"
#include "proto/base/kept.h"

namespace gradwire {

// All counts are in bytes. The need of an op at its aggregator is reserved before anything of it is
// allocated; contributions that arrive ahead of their turn share what the ops leave.
//
// An eighth of the limit is kept for packets and messages of ops that have not started here. These
// stay until their op starts, whereas ops and contributions end by themselves; without a limit of
// their own they could keep that op out. A second op of a lane, and contributions, leave another
// eighth free for the first ops of other lanes, which may have to run at the same time.
struct Memory {
  uint64_t limit = 0;
  uint64_t ops = 0;      // reserved by ops
  uint64_t waiting = 0;  // contributions ahead of their turn
  uint64_t early = 0;    // packets and messages of ops that have not started here
  // The buffer of the datagram at hand, where it may be held.
  Buffer* arriving = nullptr;
  // Memory of ops that are over, each within `most_kept()`, beside the limit.
  Kept<float> sums = {};
  Kept<uint8_t> results = {};

  uint64_t most_kept() const { return std::min<uint64_t>(limit / 8, 64 << 20); }
  void keep(Zeroed<float> sum, Zeroed<uint8_t> payloads) noexcept {
    sums.give(std::move(sum), most_kept());
    results.give(std::move(payloads), most_kept());
  }

  uint64_t held() const { return ops + waiting + early; }
  uint64_t most_early() const { return limit / 8; }
  uint64_t most_of_ops() const { return limit - most_early(); }
  bool has_early(uint64_t bytes) const { return early + bytes <= most_early(); }
  uint64_t most_of_several() const { return limit / 8 * 3; }
  bool has_waiting(uint64_t bytes) const {
    return waiting + bytes <= most_of_several() && ops + waiting + bytes <= most_of_ops();
  }
  // The buffer in which these bytes have arrived and may wait; null: they have to be copied.
  Buffer* buffer_of(std::span<const uint8_t> bytes) const {
    return arriving && arriving->contains(bytes) ? arriving : nullptr;
  }
  // True when an op that needs `bytes` fits. `first`: no other op of its lane is under way, so it
  // may take all that is free. `own`: the part of `early` that belongs to this op and becomes its
  // own.
  bool has_op(uint64_t bytes, bool first, uint64_t own) const {
    return (first || ops + bytes <= most_of_several()) && ops + waiting + bytes <= most_of_ops() &&
           held() - own + bytes <= limit;
  }
  // The smallest limit under which an op of this need fits.
  static uint64_t least_limit(uint64_t bytes) { return bytes + (bytes + 6) / 7; }
};

// Reserved is the reservation of one op; it ends with the object.
class Reserved {
 public:
  Reserved(Memory& memory, uint64_t bytes) : memory_(memory), bytes_(bytes) {
    memory_.ops += bytes_;
  }
  ~Reserved() { memory_.ops -= bytes_; }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

 private:
  Memory& memory_;
  uint64_t bytes_;
};

}  // namespace gradwire
