#include "proto/pull/committed_pull.h"

#include "proto/pull/pull_ledger.h"

namespace gradwire {

CommittedPull::CommittedPull(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                             const Aggregator& sum)
    : plan_(plan),
      grid_(grid),
      sum_(sum),
      begin_(shard.begin),
      withheld_(shard.size()),
      elements_(plan.regions.size()) {}

bool CommittedPull::lost(uint32_t chunk) {
  if (withheld(chunk)) return true;
  // Before all OPENs have arrived it is not known which chunks are critical.
  if (over_ || !sum_.all_opened()) return false;
  const uint32_t region = grid_.region[chunk];
  const uint64_t spent = elements_[region] + grid_.length(chunk);
  if (spent > pull_losable(plan_, region, sum_.region_elements(region))) return false;
  if (sum_.needed_by_all(chunk)) return false;
  elements_[region] = spent;
  withheld_.set(chunk - begin_);
  return true;
}

std::optional<Bitmap> CommittedPull::decide() {
  if (over_ || !sealed_) return std::nullopt;
  over_ = true;
  Bitmap applied(withheld_.size());
  for (const uint32_t chunk : sum_.finished())
    if (!withheld(chunk)) applied.set(chunk - begin_);
  return applied;
}

}  // namespace gradwire
