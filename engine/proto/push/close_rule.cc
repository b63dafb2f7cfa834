// The close rule decides when a region of a worker's push may end with chunks missing
// (Plan::schedule).
#include <algorithm>
#include <cmath>

#include "proto/push/aggregator.h"

namespace gradwire {

Nanos Aggregator::clock_time(Clock clock, const Worker& worker) const {
  switch (clock) {
    case Clock::open:
      return worker.open_time;
    case Clock::first_arrival:
      return worker.first_arrival;
    case Clock::tail:
      return worker.tail;
  }
  return kNever;
}

// The fraction at which the worker's regions may close now: that of the last schedule step whose
// time has come, and 1 before any. `next` is lowered to the time when that changes.
double Aggregator::fraction(const Worker& worker, Nanos now, Nanos& next) const {
  double active = 1.0;
  for (const ScheduleStep& step : plan_.schedule) {
    Nanos start = clock_time(step.clock, worker);
    if (step.scope == Scope::all)
      for (const Worker& w : worker_) start = std::max(start, clock_time(step.clock, w));
    if (start == kNever) continue;
    const Nanos due = start + step.delay;
    if (due <= now) {
      active = step.fraction;
    } else {
      next = std::min(next, due);
    }
  }
  return active;
}

uint64_t Aggregator::need(uint32_t region, double fraction) const {
  const ShardRegion& part = regions_[region];
  if (fraction == ScheduleStep::kOneMinusBound) return part.elements - part.losable;
  return static_cast<uint64_t>(std::ceil(fraction * static_cast<double>(part.elements) - 1e-9));
}

void Aggregator::try_close(uint16_t worker, uint32_t region, Nanos now) {
  Worker& w = worker_[worker];
  RegionLedger& ledger = w.regions[region];
  if (ledger.closed || !w.opened || ledger.critical_left) return;
  if (ledger.counted < least_need_[region]) return;
  const ShardRegion& part = regions_[region];
  if (part.chunks == 0 || plan_.regions[region].bound == 0.0) return;
  if (ledger.counted < part.elements) {
    const double f = fraction(w, now, timer_);
    if (ledger.counted < need(region, f)) return;
    stops_.push_back({worker, region});
    w.stopped = true;
  }
  ledger.closed = true;
  for (uint32_t c = region_chunks_[region].begin; c < region_chunks_[region].end; ++c)
    decide(worker, c - shard_.begin);
}

void Aggregator::try_close(uint16_t worker, Nanos now) {
  if (worker_[worker].undecided == 0) return;
  for (uint32_t r = 0; r < regions_.size(); ++r) try_close(worker, r, now);
}

void Aggregator::close_all(Nanos now) {
  timer_ = kNever;
  for (uint16_t w = 0; w < workers_; ++w) try_close(w, now);
}

// Handles the start of a worker's clock. Its time now runs for all regions of this worker, also for
// those in which nothing arrives any more. If it is the last worker to start, time runs for all
// workers.
void Aggregator::started(Clock clock, uint16_t worker, Nanos now) {
  bool own = false;
  bool all = false;
  for (const ScheduleStep& step : plan_.schedule)
    if (step.clock == clock) (step.scope == Scope::all ? all : own) = true;
  for (const Worker& w : worker_) all = all && clock_time(clock, w) != kNever;
  if (all) {
    close_all(now);
  } else if (own) {
    try_close(worker, now);
  }
}

void Aggregator::on_timer(Nanos now) {
  if (scheduled_ && now >= timer_) close_all(now);
}

}  // namespace gradwire
