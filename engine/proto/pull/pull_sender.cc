#include "proto/pull/pull_sender.h"

#include <utility>

#include "proto/push/passes.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_pull_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              const std::vector<uint32_t>& finished) {
  static const std::vector<uint32_t> kNoResults;
  if (plan.pull == Pull::none) return std::make_unique<StreamPull>(grid, shard, kNoResults);
  if (plan.pull != Pull::lossy) return std::make_unique<StreamPull>(grid, shard, finished);
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, &finished);
  return std::make_unique<LossyPull>(plan, grid, shard, finished);
}

LossyPull::LossyPull(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                     const std::vector<uint32_t>& finished)
    : StreamPull(grid, shard, finished, false), end_(shard.end), open_(plan.regions.size()) {
  for (uint32_t c = shard.begin; c < shard.end; ++c)
    regions_left_ += !std::exchange(open_[grid.region[c]], 1);
}

bool LossyPull::stop_region(uint32_t region) {
  if (region >= open_.size()) return false;
  if (!std::exchange(open_[region], 0)) return true;
  --regions_left_;
  const Grid::Shard part = grid_.part({begin_, end_}, region);
  for (uint32_t c = part.begin; c < part.end; ++c) forget(c);
  return true;
}

}  // namespace gradwire
