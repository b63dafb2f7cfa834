#include "proto/push/spare_push.h"

#include <utility>

namespace gradwire {

SparePush::SparePush(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                     const PushList& list)
    : StreamPush(plan, grid, shard, list), reserve_(plan.regions.size()), unsent_(shard.size()) {
  const std::vector<ShardRegion> regions = shard_regions(plan, grid, shard);
  for (uint32_t r = 0; r < regions.size(); ++r)
    reserve_[r].need = regions[r].elements - regions[r].losable;
  for (uint32_t c : sent_) reserve_[grid.region[c]].underway += grid.length(c);
  for (uint32_t c : list.spares) {
    unsent_[c - begin_] = 1;
    put_back(c);
  }
}

void SparePush::put_back(uint32_t chunk) {
  state(chunk) = State::reserved;
  reserve_[grid_.region[chunk]].waiting.push(chunk);
}

ChunkSender::Slice SparePush::next(size_t most, bool fresh) {
  Slice slice = StreamPush::next(most, fresh);
  if (slice.again && std::exchange(unsent_[slice.chunks[0] - begin_], 0)) slice.again = false;
  return slice;
}

void SparePush::lost(uint32_t chunk, Again why) {
  if (state(chunk) != State::flight) return;
  if (why == Again::lost) losing_ = true;
  if (why == Again::repeat && losing_ && !critical_.test(chunk - begin_)) return doubt(chunk);
  StreamPush::lost(chunk, why);
}

// Puts other chunks of the region in place of one that may be lost. A chunk that was never sent, or
// was sent longer ago, is worth more than another copy. Chunks take turns like this until so much
// of the region is acknowledged that it has closed.
void SparePush::doubt(uint32_t chunk) {
  Reserve& reserve = reserve_[grid_.region[chunk]];
  reserve.underway -= grid_.length(chunk);
  put_back(chunk);
  for (; reserve.underway < reserve.need && !reserve.waiting.empty(); reserve.waiting.pop()) {
    const uint32_t c = reserve.waiting.front();
    if (state(c) != State::reserved) continue;  // settled meanwhile
    due_ += unsent_[c - begin_];
    reserve.underway += grid_.length(c);
    queue(c, false);
  }
}

void SparePush::leave_reserve(uint32_t chunk) {
  if (unsent_[chunk - begin_])
    ++due_;  // it was not counted
  else
    reserve_[grid_.region[chunk]].underway += grid_.length(chunk);
}

}  // namespace gradwire
