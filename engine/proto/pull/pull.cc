#include "proto/pull/pull.h"

#include <utility>

namespace gradwire {

PullSender::PullSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                       const std::vector<uint32_t>& finished)
    : begin_(shard.begin),
      grid_(&grid),
      lossy_(plan.pull == Pull::lossy),
      finished_(&finished),
      state_(shard.size()) {
  if (!lossy_) return;
  if (plan.control == Control::probe) passes_.emplace(shard);
  region_open_.resize(plan.regions.size());
  for (uint32_t c = shard.begin; c < shard.end; ++c) {
    uint8_t& open = region_open_[grid.region[c]];
    regions_left_ += !open;
    open = 1;
  }
}

// Appends the results that became final to the first pass.
void PullSender::join() {
  while (cursor_ < finished_->size()) passes_->add((*finished_)[cursor_++]);
}

bool PullSender::pop_lost(uint32_t& chunk) {
  while (!lost_.empty()) {
    chunk = lost_.front();
    lost_.pop();
    if (state_[chunk - begin_] == State::queued) return true;
  }
  return false;
}

bool PullSender::pop_fresh(uint32_t& chunk) {
  while (cursor_ < finished_->size()) {
    const uint32_t c = (*finished_)[cursor_++];
    if (state_[c - begin_] != State::idle) continue;
    chunk = c;
    return true;
  }
  return false;
}

bool PullSender::peek(uint32_t& chunk) {
  const auto lost = [&] {
    for (const uint32_t c : lost_.items()) {
      if (state_[c - begin_] != State::queued) continue;
      chunk = c;
      return true;
    }
    return false;
  };
  const auto fresh = [&] {
    for (size_t i = cursor_; i < finished_->size(); ++i) {
      if (state_[(*finished_)[i] - begin_] != State::idle) continue;
      chunk = (*finished_)[i];
      return true;
    }
    return false;
  };
  return lossy_ ? fresh() || lost() : lost() || fresh();
}

bool PullSender::next(uint32_t& chunk, bool& again) {
  if (passes_) {
    join();
    return passes_->next(chunk, again);
  }
  // A lossy pull may never need a lost result, so fresh results go first.
  again = !lossy_ && pop_lost(chunk);
  if (!again && !pop_fresh(chunk)) {
    if (!lossy_ || !pop_lost(chunk)) return false;
    again = true;
  }
  state_[chunk - begin_] = State::flight;
  return true;
}

void PullSender::seal() {
  if (!passes_) return;
  join();
  passes_->seal();
}

void PullSender::stop_region(uint32_t region) {
  if (!region_open_[region]) return;
  region_open_[region] = 0;
  --regions_left_;
  for (uint32_t local = 0; local < state_.size(); ++local)
    if (grid_->region[begin_ + local] == region) forget(begin_ + local);
}

void PullSender::acked(uint32_t chunk) {
  State& s = state_[chunk - begin_];
  if (s == State::acked || s == State::forgotten) return;
  s = State::acked;
  ++acked_;
}

void PullSender::lost(uint32_t chunk) {
  if (passes_) return;
  State& s = state_[chunk - begin_];
  if (s != State::flight) return;
  s = State::queued;
  lost_.push(chunk);
}

void PullSender::forget(uint32_t chunk) {
  State& s = state_[chunk - begin_];
  if (s == State::acked) --acked_;
  s = State::forgotten;
}

bool PullReceiver::insert(uint32_t chunk) {
  if (!arrived_.set(chunk - begin_)) return false;
  if (wanted(chunk)) --missing_;
  return true;
}

void PullReceiver::want(Bitmap wanted) {
  wanted_ = std::move(wanted);
  narrowed_ = true;
  missing_ = 0;
  for (size_t i = 0; i < wanted_.size(); ++i)
    if (wanted_.test(i) && !arrived_.test(i)) ++missing_;
}

void PullReceiver::close(Bitmap counted, Bitmap applied) {
  if (closed_) return;
  closed_ = true;
  counted_mask_ = std::move(counted);
  if (!committed_) want(std::move(applied));
}

void PullReceiver::commit(Bitmap committed) {
  if (committed_) return;
  committed_ = true;
  want(std::move(committed));
}

}  // namespace gradwire
