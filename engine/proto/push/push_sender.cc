#include "proto/push/push_sender.h"

#include "proto/push/passes.h"
#include "proto/push/spare_push.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard, PushList list,
                                              bool may_differ) {
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, list.sent);
  if (may_differ && !list.spares.empty())
    return std::make_unique<SparePush>(plan, grid, shard, list);
  return std::make_unique<StreamPush>(plan, grid, shard, std::move(list));
}

}  // namespace gradwire
