#include "proto/pull/pull_sender.h"

#include <utility>

#include "proto/push/passes.h"

namespace gradwire {

std::unique_ptr<ChunkSender> make_pull_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              const std::vector<uint32_t>& finished) {
  static const std::vector<uint32_t> kNoResults;
  if (plan.pull == Pull::none) return std::make_unique<StreamPull>(shard, kNoResults);
  if (plan.pull != Pull::lossy) return std::make_unique<StreamPull>(shard, finished);
  if (plan.control == Control::probe) return std::make_unique<PassSender>(shard, &finished);
  return std::make_unique<LossyPull>(plan, grid, shard, finished);
}

uint32_t StreamPull::backlog(bool) const {
  return static_cast<uint32_t>(finished_.size() - cursor_ + lost_.size());
}

bool StreamPull::peek_lost(uint32_t& chunk) {
  for (; !lost_.empty(); lost_.pop()) {
    chunk = lost_.front();
    if (state_[chunk - begin_] == State::queued) return true;
  }
  return false;
}

bool StreamPull::peek_fresh(uint32_t& chunk) {
  for (; cursor_ < finished_.size(); ++cursor_) {
    chunk = finished_[cursor_];
    if (state_[chunk - begin_] == State::idle) return true;
  }
  return false;
}

bool StreamPull::peek(uint32_t& chunk, bool) {
  return peek_lost(chunk) || peek_fresh(chunk);
}

bool StreamPull::next(uint32_t& chunk, bool& again, bool fresh) {
  if (!peek(chunk, fresh)) return false;
  again = state_[chunk - begin_] == State::queued;
  if (again) {
    lost_.pop();
  } else {
    ++cursor_;
  }
  state_[chunk - begin_] = State::flight;
  return true;
}

void StreamPull::lost(uint32_t chunk, Again) {
  if (!in_flight(chunk)) return;
  state_[chunk - begin_] = State::queued;
  lost_.push(chunk);
}

void StreamPull::end(uint32_t chunk, State how) {
  State& s = state_[chunk - begin_];
  if (s == State::forgotten) return;
  over_ += s != State::acked;
  s = how;
}

LossyPull::LossyPull(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                     const std::vector<uint32_t>& finished)
    : StreamPull(shard, finished), grid_(grid), end_(shard.end), open_(plan.regions.size()) {
  for (uint32_t c = shard.begin; c < shard.end; ++c)
    regions_left_ += !std::exchange(open_[grid.region[c]], 1);
}

// The worker may never need a lost result, so fresh ones go first.
bool LossyPull::peek(uint32_t& chunk, bool) {
  return peek_fresh(chunk) || peek_lost(chunk);
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
