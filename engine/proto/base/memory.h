// What an endpoint holds for its peers, within its memory limit.
#pragma once

#include <cstdint>

namespace gradwire {

// All in bytes. What an op needs where it is aggregated is reserved before anything of it is
// allocated, and contributions that wait for their turn take what the ops leave. Packets and
// messages of ops that have not started here have an eighth for themselves: ops and contributions
// end with what is under way, these do not, and could keep the next op out. Several ops of a lane,
// and contributions, leave an eighth to the first ops of other lanes, which may have to run beside.
struct Memory {
  uint64_t limit = 0;
  uint64_t ops = 0;      // reserved
  uint64_t waiting = 0;  // contributions ahead of their turn
  uint64_t early = 0;    // of ops that have not started here

  uint64_t held() const { return ops + waiting + early; }
  uint64_t most_early() const { return limit / 8; }
  uint64_t most_of_ops() const { return limit - most_early(); }
  bool has_early(uint64_t bytes) const { return early + bytes <= most_early(); }
  uint64_t most_of_several() const { return limit / 8 * 3; }
  bool has_waiting(uint64_t bytes) const {
    return waiting + bytes <= most_of_several() && ops + waiting + bytes <= most_of_ops();
  }
  // `first`: none of its lane is under way, and it may take all that is free. `own`: what is early
  // of it, and its own then.
  bool has_op(uint64_t bytes, bool first, uint64_t own) const {
    return (first || ops + bytes <= most_of_several()) && ops + waiting + bytes <= most_of_ops() &&
           held() - own + bytes <= limit;
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

}  // namespace gradwire
