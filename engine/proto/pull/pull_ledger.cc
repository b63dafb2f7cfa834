#include "proto/pull/pull_ledger.h"

#include <cmath>
#include <utility>

namespace gradwire {

uint64_t pull_losable(const Plan& plan, uint32_t region, uint64_t elements) {
  // A region with bound 0 is critical on the way back too. Under an exact push, bounds do not
  // matter.
  if (plan.regions[region].bound == 0.0 && !plan.exact()) return 0;
  return static_cast<uint64_t>(std::floor(plan.pull_bound * static_cast<double>(elements) + 1e-9));
}

PullLedger::PullLedger(const Plan& plan, const Grid& grid, const Grid::Shard& shard)
    : plan_(plan),
      grid_(grid),
      shard_(shard),
      arrived_(shard.size()),
      needed_(shard.size()),
      regions_(plan.regions.size()),
      closed_(shard.size() == 0) {
  for (uint32_t c = shard.begin; c < shard.end; ++c)
    open_ += std::exchange(regions_[grid.region[c]].enough, false);
}

void PullLedger::arrived(uint32_t chunk) {
  const uint32_t local = chunk - shard_.begin;
  if (!arrived_.set(local)) return;
  Region& region = regions_[grid_.region[chunk]];
  region.arrived += grid_.length(chunk);
  if (!closed_) return;
  if (needed_.test(local)) --region.needed;
  judge(grid_.region[chunk]);
}

void PullLedger::on_close(const Bitmap& results, const Bitmap& needed) {
  if (closed_) return;
  closed_ = true;
  results_ = results;
  needed_ = needed;
  for (uint32_t c = shard_.begin; c < shard_.end; ++c) {
    const uint32_t local = c - shard_.begin;
    Region& region = regions_[grid_.region[c]];
    if (results_.test(local)) region.results += grid_.length(c);
    if (needed_.test(local) && !arrived_.test(local)) ++region.needed;
  }
  for (uint32_t r = 0; r < regions_.size(); ++r) {
    if (regions_[r].enough) continue;
    regions_[r].losable = pull_losable(plan_, r, regions_[r].results);
    judge(r);
  }
}

void PullLedger::judge(uint32_t index) {
  Region& region = regions_[index];
  if (region.enough || region.needed) return;
  if (region.arrived + region.losable < region.results) return;
  region.enough = true;
  --open_;
}

Bitmap PullLedger::missing() const {
  Bitmap out(shard_.size());
  for (uint32_t c = shard_.begin; c < shard_.end; ++c) {
    const uint32_t local = c - shard_.begin;
    if (results_.test(local) && !arrived_.test(local) && !regions_[grid_.region[c]].enough)
      out.set(local);
  }
  return out;
}

}  // namespace gradwire
