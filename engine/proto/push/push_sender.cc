#include "proto/push/push_sender.h"

#include <algorithm>

#include "proto/plan/priority.h"

namespace gradwire {

bool eager_from_start(const Plan& plan) {
  return plan.control == Control::stream && plan.spend == Spend::anything &&
         plan.schedule.size() == 1 && plan.schedule[0].clock == Clock::open &&
         plan.schedule[0].delay == 0 && plan.schedule[0].fraction == ScheduleStep::kOneMinusBound;
}

std::vector<uint32_t> push_list(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                                std::span<const uint32_t> critical,
                                std::span<const uint8_t> priorities,
                                std::vector<uint32_t>* spares) {
  std::vector<uint32_t> order = send_order(plan, shard);
  if (plan.order == Order::priority) by_priority(order, priorities);
  std::vector<uint8_t> is_critical(shard.size());
  for (uint32_t c : critical)
    if (c >= shard.begin && c < shard.end) is_critical[c - shard.begin] = 1;
  std::stable_partition(order.begin(), order.end(),
                        [&](uint32_t c) { return is_critical[c - shard.begin] != 0; });
  if (!eager_from_start(plan)) return order;
  const std::vector<ShardRegion> regions = shard_regions(plan, grid, shard);
  std::vector<uint64_t> sent(regions.size());
  std::vector<uint32_t> list;
  list.reserve(order.size());
  for (uint32_t c : order) {
    const uint32_t r = grid.region[c];
    if (!is_critical[c - shard.begin] && sent[r] >= regions[r].elements - regions[r].losable) {
      if (spares) spares->push_back(c);
      continue;
    }
    sent[r] += grid.length(c);
    list.push_back(c);
  }
  return list;
}

PushSender::PushSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                       std::span<const uint32_t> critical, std::span<const uint8_t> priorities,
                       bool may_differ)
    : plan_(plan),
      grid_(grid),
      begin_(shard.begin),
      state_(shard.size(), State::done),
      critical_(shard.size()),
      ledger_(plan.regions.size()) {
  std::vector<uint32_t> spares;
  list_ = push_list(plan, grid, shard, critical, priorities, &spares);
  open_ = static_cast<uint32_t>(list_.size());
  for (uint32_t c : list_) state(c) = State::idle;
  for (uint32_t c : critical)
    if (c >= shard.begin && c < shard.end) critical_[c - shard.begin] = 1;
  if (plan.control != Control::stream) {
    passes_.emplace(shard);
    for (uint32_t c : list_) passes_->add(c);
    passes_->seal();
    return;
  }
  if (spares.empty() || !may_differ) return;
  reserve_.resize(plan.regions.size());
  behind_.resize(shard.size());
  unsent_.resize(shard.size());
  const std::vector<ShardRegion> regions = shard_regions(plan, grid, shard);
  for (uint32_t r = 0; r < regions.size(); ++r)
    reserve_[r].need = regions[r].elements - regions[r].losable;
  for (uint32_t c : list_) reserve_[grid.region[c]].underway += grid.length(c);
  for (uint32_t c : spares) {
    state(c) = State::spare;
    unsent_[c - begin_] = 1;
    keep_in_reserve(c);
  }
}

bool PushSender::peek_lost(uint32_t& chunk) {
  for (ChunkFifo* fifo : {&again_, &lost_}) {
    for (; !fifo->empty(); fifo->pop()) {
      chunk = fifo->front();
      if (state(chunk) == State::queued) return true;
    }
  }
  return false;
}

bool PushSender::pop_lost(uint32_t& chunk) {
  if (!peek_lost(chunk)) return false;
  (again_.empty() ? lost_ : again_).pop();
  --queued_;
  return true;
}

bool PushSender::next(uint32_t& chunk, bool& again, bool fresh) {
  if (passes_) return fresh && passes_->next(chunk, again);
  if (open_ == 0) return false;
  if (holes_first() && queued_ && pop_lost(chunk)) {
    state(chunk) = State::flight;
    again = unsent_.empty() || !unsent_[chunk - begin_];
    if (!again) unsent_[chunk - begin_] = 0;
    return true;
  }
  while (fresh && cursor_ < list_.size()) {
    const uint32_t c = list_[cursor_++];
    if (state(c) != State::idle) continue;
    state(c) = State::flight;
    chunk = c;
    again = false;
    return true;
  }
  if (pop_lost(chunk)) {
    state(chunk) = State::flight;
    again = true;
    return true;
  }
  return false;
}

bool PushSender::peek(uint32_t& chunk, bool fresh) {
  if (open_ == 0) return false;
  while (cursor_ < list_.size() && state(list_[cursor_]) != State::idle) ++cursor_;
  fresh = fresh && cursor_ < list_.size();
  if (queued_ && (holes_first() || !fresh)) return peek_lost(chunk);
  if (fresh) chunk = list_[cursor_];
  return fresh;
}

void PushSender::settle(uint32_t chunk, State to) {
  State& s = state(chunk);
  if (s == State::acked || s == State::done) return;
  if (s == State::queued) --queued_;
  if (s != State::spare) --open_;
  if (s == State::doubted) reserve_[grid_.region[chunk]].underway += grid_.length(chunk);
  s = to;
}

void PushSender::acked(uint32_t chunk) {
  if (passes_) return;
  const State before = state(chunk);
  if (before == State::acked || before == State::done) return;
  settle(chunk, State::acked);
  ledger_[grid_.region[chunk]].received += grid_.length(chunk);
  if (plan_.spend == Spend::lost && queued_) forgive_queued();
}

// Spend lost: F forgiven, R received and this chunk's l elements must keep F + l <= p (R + F + l).
bool PushSender::room(uint32_t chunk) const {
  if (critical_[chunk - begin_]) return false;
  const uint32_t r = grid_.region[chunk];
  const Ledger& ledger = ledger_[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  return static_cast<double>(spent) <=
         plan_.regions[r].bound * static_cast<double>(ledger.received + spent) + 1e-9;
}

void PushSender::forgive_queued() {
  while (!lost_.empty()) {
    const uint32_t c = lost_.front();
    if (state(c) != State::queued) {
      lost_.pop();
      continue;
    }
    if (!room(c)) break;
    lost_.pop();
    ledger_[grid_.region[c]].forgiven += grid_.length(c);
    settle(c, State::done);
    forgiven_.push_back(c);
  }
}

void PushSender::lost(uint32_t chunk, Again why) {
  if (passes_ || state(chunk) != State::flight) return;
  if (why == Again::lost) losing_ = true;
  if (why == Again::repeat && losing_ && !reserve_.empty() && !critical_[chunk - begin_])
    return doubt(chunk);
  const bool forgivable = why == Again::lost && plan_.spend == Spend::lost;
  queue(chunk, forgivable);
  if (forgivable) forgive_queued();
}

void PushSender::queue(uint32_t chunk, bool forgivable) {
  state(chunk) = State::queued;
  ++queued_;
  (forgivable ? lost_ : again_).push(chunk);
}

void PushSender::keep_in_reserve(uint32_t chunk) {
  Reserve& reserve = reserve_[grid_.region[chunk]];
  behind_[chunk - begin_] = kNone;
  (reserve.head == kNone ? reserve.head : behind_[reserve.tail - begin_]) = chunk;
  reserve.tail = chunk;
}

// Puts other chunks of the region in place of one that may be lost. A chunk that was never sent, or
// was sent longer ago, is worth more than another copy. Chunks take turns like this until so much
// of the region is acknowledged that it has closed.
void PushSender::doubt(uint32_t chunk) {
  Reserve& reserve = reserve_[grid_.region[chunk]];
  state(chunk) = State::doubted;
  reserve.underway -= grid_.length(chunk);
  keep_in_reserve(chunk);
  while (reserve.underway < reserve.need && reserve.head != kNone) {
    const uint32_t c = reserve.head;
    reserve.head = behind_[c - begin_];
    const State s = state(c);
    if (s != State::spare && s != State::doubted) continue;  // settled meanwhile
    if (s == State::spare) ++open_;
    reserve.underway += grid_.length(c);
    queue(c, false);
  }
}

void PushSender::stop_region(uint32_t region) {
  if (region >= ledger_.size() || ledger_[region].stopped) return;
  ledger_[region].stopped = true;
  for (uint32_t c = begin_; c < begin_ + state_.size(); ++c)
    if (grid_.region[c] == region) settle(c, State::done);
}

void PushSender::decided(uint32_t chunk) {
  if (passes_) passes_->decided(chunk);
  settle(chunk, State::done);
}

void PushSender::finish() {
  if (passes_) passes_->finish();
  for (uint32_t c = begin_; c < begin_ + state_.size(); ++c) settle(c, State::done);
}

std::vector<uint32_t> PushSender::take_forgiven() {
  std::vector<uint32_t> out;
  out.swap(forgiven_);
  return out;
}

}  // namespace gradwire
