#include "proto/push/close_rule.h"

#include <algorithm>
#include <cmath>

namespace gradwire {

CloseRule::CloseRule(const Plan& plan, const Grid& grid, const Grid::Shard& shard, uint16_t workers)
    : plan_(plan),
      applies_(plan.spend == Spend::late || plan.spend == Spend::anything),
      regions_(shard_regions(plan, grid, shard)),
      clocks_(workers, {kNever, kNever, kNever}) {
  least_need_.reserve(regions_.size());
  for (uint32_t r = 0; r < regions_.size(); ++r) {
    uint64_t least = regions_[r].elements;
    for (const ScheduleStep& step : plan.schedule) least = std::min(least, need(r, step.fraction));
    least_need_.push_back(least);
  }
}

// The fraction at which the worker's regions may close now: that of the last schedule step whose
// time has come, and 1 before any.
double CloseRule::fraction(uint16_t worker, Nanos now) {
  double active = 1.0;
  for (const ScheduleStep& step : plan_.schedule) {
    Nanos start = time(step.clock, worker);
    if (step.scope == Scope::all)
      for (uint16_t w = 0; w < clocks_.size(); ++w) start = std::max(start, time(step.clock, w));
    if (start == kNever) continue;
    const Nanos due = start + step.delay;
    if (due <= now) {
      active = step.fraction;
    } else {
      timer_ = std::min(timer_, due);
    }
  }
  return active;
}

uint64_t CloseRule::need(uint32_t region, double fraction) const {
  const ShardRegion& part = regions_[region];
  if (fraction == ScheduleStep::kOneMinusBound) return part.elements - part.losable;
  return static_cast<uint64_t>(std::ceil(fraction * static_cast<double>(part.elements) - 1e-9));
}

bool CloseRule::may_close(uint16_t worker, uint32_t region, uint64_t counted, Nanos now) {
  const ShardRegion& part = regions_[region];
  if (counted < least_need_[region] || part.chunks.size() == 0 ||
      plan_.regions[region].bound == 0.0)
    return false;
  return counted >= part.elements || counted >= need(region, fraction(worker, now));
}

CloseRule::Concerns CloseRule::start(Clock clock, uint16_t worker, Nanos now) {
  if (time(clock, worker) != kNever) return Concerns::nobody;
  clocks_[worker][static_cast<size_t>(clock)] = now;
  bool own = false;
  bool all = false;
  for (const ScheduleStep& step : plan_.schedule)
    if (step.clock == clock) (step.scope == Scope::all ? all : own) = true;
  for (uint16_t w = 0; w < clocks_.size(); ++w) all = all && time(clock, w) != kNever;
  return all ? Concerns::all : own ? Concerns::worker : Concerns::nobody;
}

}  // namespace gradwire
