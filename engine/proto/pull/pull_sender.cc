#include "proto/pull/pull_sender.h"

#include "proto/push/passes.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_pull_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              const std::vector<uint32_t>& finished) {
  static const std::vector<uint32_t> kNoResults;
  if (plan.pull == Pull::none) return std::make_unique<StreamPull>(grid, shard, kNoResults);
  if (plan.pull != Pull::lossy) return std::make_unique<StreamPull>(grid, shard, finished);
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, &finished);
  return std::make_unique<LossyPull>(grid, shard, finished);
}

}  // namespace gradwire
