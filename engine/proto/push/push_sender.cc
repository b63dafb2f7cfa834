#include "proto/push/push_sender.h"

#include "proto/push/passes.h"
#include "proto/push/spare_push.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              std::span<const uint32_t> critical,
                                              std::span<const uint8_t> priorities,
                                              bool may_differ) {
  PushList list(plan, grid, shard, critical, priorities);
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, list.sent);
  if (may_differ && !list.spares.empty())
    return std::make_unique<SparePush>(plan, grid, shard, list);
  return std::make_unique<StreamPush>(plan, grid, shard, std::move(list));
}

}  // namespace gradwire
