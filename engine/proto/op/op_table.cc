#include "proto/op/op_table.h"

namespace gradwire {

namespace {
const Lane kNewLane;
}  // namespace

Op& OpTable::add(std::unique_ptr<Op> op) {
  Op& added = *op;
  ops_.emplace(added.id, std::move(op));
  in_passes_ += added.probes();
  return added;
}

Op* OpTable::look_up(uint64_t id) {
  const auto it = ops_.find(id);
  if (it == ops_.end()) return nullptr;
  last_found_ = it->second.get();
  return last_found_;
}

void OpTable::remove(uint64_t id) {
  const auto it = ops_.find(id);
  const Op& op = *it->second;
  if (last_found_ == &op) last_found_ = nullptr;
  in_passes_ -= op.probes();
  timers_.erase({op.due, id});
  ops_.erase(it);
}

const Lane& OpTable::lane(uint64_t id) const {
  return lane_of(id) < lanes_.size() ? lanes_[lane_of(id)] : kNewLane;
}

Lane& OpTable::lane(uint64_t id) {
  if (lane_of(id) >= lanes_.size()) lanes_.resize(lane_of(id) + size_t{1});
  return lanes_[lane_of(id)];
}

uint64_t OpTable::full_id(uint32_t low) const {
  if (last_found_ && static_cast<uint32_t>(last_found_->id) == low) return last_found_->id;
  return wire::expand(low, id_of(expected(low), lane_of(low)));
}

uint64_t OpTable::next_admitted(uint64_t id) const {
  uint64_t next = id_of(lane(id).done_below, lane_of(id));
  while (finished(next) || ops_.contains(next)) next += kLanes;
  return next;
}

void OpTable::changed(Op& op) {
  const Nanos due = op.next_timer();
  if (due != op.due) {
    timers_.erase({op.due, op.id});
    timers_.emplace(due, op.id);
    op.due = due;
  }
  if (!std::exchange(op.listed, true)) changed_.push_back(op.id);
}

}  // namespace gradwire
