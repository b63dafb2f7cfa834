#include "proto/push/stream_push.h"

namespace gradwire {

StreamPush::StreamPush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, PushList list)
    : plan_(plan),
      grid_(grid),
      begin_(shard.begin),
      list_(std::move(list.sent)),
      critical_(std::move(list.critical)),
      open_(static_cast<uint32_t>(list_.size())),
      state_(shard.size(), State::done),
      ledger_(plan.regions.size()) {
  for (uint32_t c : list_) state(c) = State::idle;
}

uint32_t StreamPush::backlog(bool fresh) const {
  if (open_ == 0) return 0;
  return fresh ? static_cast<uint32_t>(list_.size() - cursor_) + queued_ : queued_;
}

bool StreamPush::peek_lost(uint32_t& chunk) {
  for (ChunkFifo* fifo : {&again_, &lost_}) {
    for (; !fifo->empty(); fifo->pop()) {
      chunk = fifo->front();
      if (state(chunk) == State::queued) return true;
    }
  }
  return false;
}

bool StreamPush::peek_fresh(uint32_t& chunk) {
  while (cursor_ < list_.size() && state(list_[cursor_]) != State::idle) ++cursor_;
  if (cursor_ == list_.size()) return false;
  chunk = list_[cursor_];
  return true;
}

bool StreamPush::peek(uint32_t& chunk, bool fresh) {
  if (open_ == 0) return false;
  if (holes_first() && queued_ && peek_lost(chunk)) return true;
  return (fresh && peek_fresh(chunk)) || (queued_ && peek_lost(chunk));
}

bool StreamPush::next(uint32_t& chunk, bool& again, bool fresh) {
  if (!peek(chunk, fresh)) return false;
  again = state(chunk) == State::queued;
  if (again) {
    (again_.empty() ? lost_ : again_).pop();
    --queued_;
  } else {
    ++cursor_;
  }
  state(chunk) = State::flight;
  return true;
}

void StreamPush::settle(uint32_t chunk, State to) {
  State& s = state(chunk);
  if (s == State::acked || s == State::done) return;
  if (s == State::queued) --queued_;
  --open_;
  s = to;
}

void StreamPush::acked(uint32_t chunk) {
  const State before = state(chunk);
  if (before == State::acked || before == State::done) return;
  settle(chunk, State::acked);
  if (plan_.spend != Spend::lost) return;
  ledger_[grid_.region[chunk]].received += grid_.length(chunk);
  if (queued_) forgive_queued();
}

// Spend lost: F forgiven, R received and this chunk's l elements must keep F + l <= p (R + F + l).
bool StreamPush::room(uint32_t chunk) const {
  if (critical_[chunk - begin_]) return false;
  const uint32_t r = grid_.region[chunk];
  const Ledger& ledger = ledger_[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  return static_cast<double>(spent) <=
         plan_.regions[r].bound * static_cast<double>(ledger.received + spent) + 1e-9;
}

void StreamPush::forgive_queued() {
  for (; !lost_.empty(); lost_.pop()) {
    const uint32_t c = lost_.front();
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

void StreamPush::queue(uint32_t chunk, bool forgivable) {
  state(chunk) = State::queued;
  ++queued_;
  (forgivable ? lost_ : again_).push(chunk);
}

bool StreamPush::stop_region(uint32_t region) {
  if (region >= ledger_.size() || plan_.spend == Spend::nothing ||
      plan_.regions[region].bound == 0.0)
    return false;
  if (std::exchange(ledger_[region].stopped, true)) return true;
  const auto end = begin_ + static_cast<uint32_t>(state_.size());
  const Grid::Shard part = grid_.part({begin_, end}, region);
  for (uint32_t c = part.begin; c < part.end; ++c) settle(c, State::done);
  return true;
}

void StreamPush::finish() {
  for (uint32_t c = begin_; c < begin_ + state_.size(); ++c) settle(c, State::done);
}

}  // namespace gradwire
