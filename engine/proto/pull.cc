#include "proto/pull.h"

#include <utility>

namespace gradwire {

bool PullSender::next(uint32_t& chunk, bool& again) {
  while (lost_head_ < lost_.size()) {
    const uint32_t c = lost_[lost_head_++];
    if (lost_head_ == lost_.size()) {
      lost_.clear();
      lost_head_ = 0;
    }
    State& s = state_[c - begin_];
    if (s != State::queued) continue;
    s = State::flight;
    chunk = c;
    again = true;
    return true;
  }
  while (cursor_ < finished_->size()) {
    const uint32_t c = (*finished_)[cursor_++];
    State& s = state_[c - begin_];
    if (s != State::idle) continue;
    s = State::flight;
    chunk = c;
    again = false;
    return true;
  }
  return false;
}

bool PullSender::peek(uint32_t& chunk) {
  for (size_t i = lost_head_; i < lost_.size(); ++i) {
    if (state_[lost_[i] - begin_] != State::queued) continue;
    chunk = lost_[i];
    return true;
  }
  for (size_t i = cursor_; i < finished_->size(); ++i) {
    if (state_[(*finished_)[i] - begin_] != State::idle) continue;
    chunk = (*finished_)[i];
    return true;
  }
  return false;
}

void PullSender::acked(uint32_t chunk) {
  State& s = state_[chunk - begin_];
  if (s == State::acked || s == State::forgotten) return;
  s = State::acked;
  ++acked_;
}

void PullSender::lost(uint32_t chunk) {
  State& s = state_[chunk - begin_];
  if (s != State::flight) return;
  s = State::queued;
  lost_.push_back(chunk);
}

void PullSender::forget(uint32_t chunk) {
  State& s = state_[chunk - begin_];
  if (s == State::acked) --acked_;
  s = State::forgotten;
}

std::vector<uint32_t> PullSender::lost_chunks() const {
  std::vector<uint32_t> out;
  for (size_t i = lost_head_; i < lost_.size(); ++i)
    if (state_[lost_[i] - begin_] == State::queued) out.push_back(lost_[i]);
  return out;
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
