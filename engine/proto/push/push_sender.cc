#include "proto/push/push_sender.h"

#include "proto/push/passes.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard, PushList list,
                                              bool may_differ) {
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, list.sent);
  if (may_differ && !list.spares.empty())
    return std::make_unique<SparePush>(plan, grid, shard, list);
  return std::make_unique<StreamPush>(plan, grid, shard, std::move(list));
}

namespace {
// Under spend nothing or anything a gap delays the sum, so lost chunks go before fresh ones. Under
// spend late or lost the gap may still be forgiven.
bool holes_first(Spend spend) {
  return spend == Spend::nothing || spend == Spend::anything;
}
}  // namespace

StreamPush::StreamPush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, PushList list)
    : StreamSender(grid, shard, sent_, list.sent.size(), holes_first(plan.spend)),
      plan_(plan),
      sent_(std::move(list.sent)),
      critical_(std::move(list.critical)),
      due_(sent_.size()),
      ledger_(plan.regions.size()) {
  for (uint32_t c = begin_; c < end(); ++c) state(c) = State::done;
  for (uint32_t c : sent_) state(c) = State::idle;
}

uint32_t StreamPush::backlog(bool fresh) const {
  if (settled()) return 0;
  return fresh ? static_cast<uint32_t>(unsent()) + holes_.queued : holes_.queued;
}

void StreamPush::acked(std::span<const uint32_t> chunks) {
  if (plan_.spend != Spend::lost) return StreamSender::acked(chunks);
  for (const uint32_t chunk : chunks) {
    if (over(chunk)) continue;
    settle(chunk, State::acked);
    ledger_[grid_.region[chunk]].received += grid_.length(chunk);
    if (holes_.queued) forgive_queued();
  }
}

// Spend lost: F forgiven, R received and this chunk's l elements must keep F + l <= p (R + F + l).
bool StreamPush::room(uint32_t chunk) const {
  if (critical_.test(chunk - begin_)) return false;
  const uint32_t r = grid_.region[chunk];
  const Ledger& ledger = ledger_[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  return static_cast<double>(spent) <=
         plan_.regions[r].bound * static_cast<double>(ledger.received + spent) + 1e-9;
}

void StreamPush::forgive_queued() {
  for (; !holes_.forgivable.empty(); holes_.forgivable.pop()) {
    const uint32_t c = holes_.forgivable.front();
    if (state(c) != State::queued) continue;
    if (!room(c)) break;
    ledger_[grid_.region[c]].forgiven += grid_.length(c);
    settle(c, State::done);
    forgiven_.push_back(c);
  }
}

void StreamPush::lost(uint32_t chunk, Again why) {
  if (state(chunk) != State::flight) return;
  const bool forgivable = why == Again::lost && plan_.spend == Spend::lost;
  queue(chunk, forgivable);
  if (forgivable) forgive_queued();
}

bool StreamPush::stop_region(uint32_t region) {
  if (region >= ledger_.size() || plan_.spend == Spend::nothing ||
      plan_.regions[region].bound == 0.0)
    return false;
  const Grid::Shard part = grid_.part({begin_, end()}, region);
  for (uint32_t c = part.begin; c < part.end; ++c) settle(c, State::done);
  return true;
}

void StreamPush::finish() {
  for (uint32_t c = begin_; c < end(); ++c) settle(c, State::done);
}

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
