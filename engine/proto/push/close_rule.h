// CloseRule decides when a region of a worker's push may end with chunks missing (Plan::schedule).
// It keeps each worker's clocks; what has arrived is its caller's.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "proto/base/time.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"

namespace gradwire {

class CloseRule {
 public:
  CloseRule(const Plan& plan, const Grid& grid, const Grid::Shard& shard, uint16_t workers);

  // True for plans whose regions close by count and clock at all.
  bool applies() const { return applies_; }
  const ShardRegion& region(uint32_t region) const { return regions_[region]; }
  uint32_t regions() const { return static_cast<uint32_t>(regions_.size()); }

  // Whose regions may close once a clock has started, which it does once. Its time runs for all
  // regions of this worker, also for those in which nothing arrives any more; if it is the last
  // worker to start, for all.
  enum class Concerns : uint8_t { nobody, worker, all };
  Concerns start(Clock clock, uint16_t worker, Nanos now);

  // True when a worker's region may close with so many elements counted. Sets the timer to the time
  // when that may change.
  bool may_close(uint16_t worker, uint32_t region, uint64_t counted, Nanos now);
  Nanos next_timer() const { return timer_; }
  void clear_timer() { timer_ = kNever; }

 private:
  Nanos time(Clock clock, uint16_t worker) const {
    return clocks_[worker][static_cast<size_t>(clock)];
  }
  double fraction(uint16_t worker, Nanos now);
  uint64_t need(uint32_t region, double fraction) const;

  const Plan& plan_;
  bool applies_;
  std::vector<ShardRegion> regions_;
  std::vector<uint64_t> least_need_;  // by region: elements below which no schedule step closes it
  std::vector<std::array<Nanos, 3>> clocks_;  // by worker: when each clock started
  Nanos timer_ = kNever;
};

}  // namespace gradwire
