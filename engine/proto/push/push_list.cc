#include "proto/push/push_list.h"

#include <algorithm>
#include <utility>

namespace gradwire {

bool eager_from_start(const Plan& plan) {
  return plan.control == Control::stream && plan.spend == Spend::anything &&
         plan.schedule.size() == 1 && plan.schedule[0].clock == Clock::open &&
         plan.schedule[0].delay == 0 && plan.schedule[0].fraction == ScheduleStep::kOneMinusBound;
}

PushList::PushList(const Plan& plan, const Grid& grid, const Grid::Shard& shard, Bitmap ones,
                   std::span<const uint8_t> priorities)
    : sent(send_order(plan, shard)), critical(std::move(ones)) {
  if (!priorities.empty())
    std::ranges::stable_sort(sent, {}, [priorities](uint32_t c) { return priorities[c]; });
  std::ranges::stable_partition(sent, [&](uint32_t c) { return critical.test(c - shard.begin); });
  if (!eager_from_start(plan)) return;
  const std::vector<ShardRegion> regions = shard_regions(plan, grid, shard);
  std::vector<uint64_t> elements(regions.size());
  for (uint32_t c : std::exchange(sent, {})) {
    const uint32_t r = grid.region[c];
    if (!critical.test(c - shard.begin) &&
        elements[r] >= regions[r].elements - regions[r].losable) {
      spares.push_back(c);
      continue;
    }
    elements[r] += grid.length(c);
    sent.push_back(c);
  }
}

}  // namespace gradwire
