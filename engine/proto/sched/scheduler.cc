#include "proto/sched/scheduler.h"

#include <algorithm>
#include <utility>

namespace gradwire {

void Scheduler::set_waiting(uint16_t to, uint64_t op, Waiting waiting) {
  Queue& queue = queues_[to];
  const uint64_t key = key_of(op);
  const auto at = std::ranges::lower_bound(queue.entries, key, {}, &Entry::key);
  const bool known = at != queue.entries.end() && at->key == key;
  const Waiting before = known ? at->waiting : Waiting{};
  if (before == waiting) return;
  queue.total.ready += waiting.ready - before.ready;
  queue.total.early += waiting.early - before.early;
  if (waiting == Waiting{}) {
    queue.entries.erase(at);
  } else if (known) {
    at->waiting = waiting;
  } else {
    queue.entries.insert(at, {key, waiting});
  }
}

void Scheduler::set_destination(uint16_t to, const Destination& now) {
  const Destination& before = table_[to];
  if (now == before) return;
  waiting_ += uint32_t{now.waits()} - uint32_t{before.waits()};
  ready_ += uint32_t{now.ready()} - uint32_t{before.ready()};
  const uint64_t bit = uint64_t{1} << (to % 64);
  now.ready() ? ready_bits_[to / 64] |= bit : ready_bits_[to / 64] &= ~bit;
  table_[to] = now;
}

uint16_t Scheduler::next_lane(uint16_t to, bool room) {
  Queue& queue = queues_[to];
  const uint64_t next_key = (uint64_t{queue.lane} + 1) << (64 - kLaneBits);  // 0 after the last
  const auto after = std::ranges::lower_bound(queue.entries, next_key, {}, &Entry::key);
  const auto waits = [room](const Entry& entry) {
    return entry.waiting.ready > 0 || (room && entry.waiting.early > 0);
  };
  auto next = std::find_if(after, queue.entries.end(), waits);
  if (next == queue.entries.end()) {
    next = std::find_if(queue.entries.begin(), after, waits);
    if (next == after) return queue.lane;  // nothing waits
  }
  queue.lane = lane_of(op_of(next->key));
  if (std::exchange(queue.timed_out, false)) queue.probed = queue.lane;
  return queue.lane;
}

uint64_t Scheduler::next_op(uint16_t to, uint64_t from) const {
  const Queue& queue = queues_[to];
  const auto at = std::ranges::lower_bound(queue.entries, key_of(from), {}, &Entry::key);
  if (at == queue.entries.end() || lane_of(op_of(at->key)) != lane_of(from)) return kNoOp;
  return op_of(at->key);
}

}  // namespace gradwire
