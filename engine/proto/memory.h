// What an endpoint holds for its peers, within its memory limit.
#pragma once

#include <cstdint>

#include "proto/plan.h"

namespace gradwire {

struct EndpointConfig;

// All in bytes. What an op needs where it is aggregated is reserved before anything of it is
// allocated, and contributions that wait for their turn take what the ops leave. Packets and
// messages of ops that have not started here have an eighth for themselves: ops and contributions
// end with what is under way, these do not, and could keep the next op out.
struct Memory {
  uint64_t limit = 0;
  uint64_t ops = 0;      // reserved
  uint64_t waiting = 0;  // contributions ahead of their turn
  uint64_t early = 0;    // of ops that have not started here

  uint64_t held() const { return ops + waiting + early; }
  uint64_t most_early() const { return limit / 8; }
  uint64_t most_of_ops() const { return limit - most_early(); }
  bool has_early(uint64_t bytes) const { return early + bytes <= most_early(); }
  bool has_waiting(uint64_t bytes) const { return ops + waiting + bytes <= most_of_ops(); }
  // One op may take all, several together half, so that contributions find room.
  bool has_op(uint64_t bytes) const {
    return ops == 0 ? bytes <= most_of_ops()
                    : ops + bytes <= most_of_ops() / 2 && has_waiting(bytes);
  }
  // The least limit under which an op that needs this fits.
  static uint64_t least_limit(uint64_t bytes) { return bytes + (bytes + 6) / 7; }
};

// An op's reservation.
class Reserved {
 public:
  Reserved() = default;
  Reserved(Memory& memory, uint64_t bytes) : memory_(&memory), bytes_(bytes) {
    memory.ops += bytes;
  }
  ~Reserved() {
    if (memory_) memory_->ops -= bytes_;
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

 private:
  Memory* memory_ = nullptr;
  uint64_t bytes_ = 0;
};

// What an op of this plan needs at this endpoint: its sums, results, books and messages, as much as
// they may become. Nothing where it is not aggregated.
uint64_t memory_of(const Plan& plan, const EndpointConfig& config);

// The longest message of an op whose shards have at most this many chunks: OPEN, or CLOSE.
uint64_t longest_message(const Plan& plan, uint64_t chunks, uint64_t plan_bytes);

}  // namespace gradwire
