// OpTable has the ops of one endpoint that are under way, the lanes that they belong to, and when
// something is due for one of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "proto/base/config.h"
#include "proto/base/timeline.h"
#include "proto/op/op.h"
#include "proto/plan/lanes.h"
#include "wire/packet.h"

namespace gradwire {

class OpTable {
 public:
  using Ops = std::map<uint64_t, std::unique_ptr<Op>>;

  explicit OpTable(const EndpointConfig& config) : works_(config.endpoint < config.workers) {}

  // ---- ops under way, in the order of their ids
  const Ops& all() const { return ops_; }
  Op& add(std::unique_ptr<Op> op);
  // Most packets are of the same op as the one before.
  Op* find(uint64_t id) { return last_found_ && last_found_->id == id ? last_found_ : look_up(id); }
  // The op, if it is the one found last.
  Op* last_found(uint64_t id) {
    return last_found_ && last_found_->id == id ? last_found_ : nullptr;
  }
  // Ops under control "probe".
  uint32_t in_passes() const { return in_passes_; }
  // The most packets that a peer can still want to send for them.
  uint64_t most_wanted(uint16_t peer) const {
    uint64_t total = 0;
    for (const auto& [id, op] : ops_) total += op->most_wanted(peer);
    return total;
  }
  // Why nothing waits to be sent.
  Timeline::What hindrance() const {
    if (ops_.empty()) return Timeline::What::nothing;
    for (const auto& [id, op] : ops_)
      if (op->lacks_sums()) return Timeline::What::sum;
    return Timeline::What::done;
  }
  // Ends an op without a result.
  void remove(uint64_t id);

  // ---- lanes
  const std::vector<Lane>& lanes() const { return lanes_; }
  // The op's lane; an empty one where none of its ops has been made.
  const Lane& lane(uint64_t id) const;
  Lane& lane(uint64_t id);
  // The id of an op of which the low bits have arrived.
  uint64_t full_id(uint32_t low) const;
  // The number that the next packets of the op's lane most likely have; expands truncated ids.
  uint64_t expected(uint64_t id) const { return works_ ? lane(id).next : lane(id).done_below; }
  bool finished(uint64_t id) const { return lane(id).finished(number_of(id)); }
  // True for an op that no correct peer could have started yet; it bounds what is kept for peers.
  bool far_ahead(uint64_t id) const { return number_of(id) >= expected(id) + kAhead; }
  // Servers: the next op to admit in this op's lane.
  uint64_t next_admitted(uint64_t id) const;

  // ---- what is due
  // Something of an op has changed: its timers, or that it may be drained.
  void changed(Op& op);
  // The first time at which an op's deadline or sum is due.
  Nanos earliest() const { return timers_.empty() ? kNever : timers_.begin()->first; }
  // Takes the drained ones out of those that have changed. `leave(op)` is called before each ends.
  template <class Leave>
  void free_drained(Leave&& leave) {
    for (const uint64_t id : std::exchange(changed_, {})) {
      const auto it = ops_.find(id);
      if (it == ops_.end()) continue;
      it->second->listed = false;
      if (!it->second->drained()) continue;
      leave(*it->second);
      lane(id).finish(number_of(id));
      remove(id);
    }
  }

 private:
  // Ops by which a peer may be ahead in its lane.
  static constexpr uint64_t kAhead = 1024;
  Op* look_up(uint64_t id);

  bool works_;  // a worker, no server
  Ops ops_;
  Op* last_found_ = nullptr;
  std::vector<Lane> lanes_;
  std::set<std::pair<Nanos, uint64_t>> timers_;  // with the ids
  std::vector<uint64_t> changed_;                // ids
  uint32_t in_passes_ = 0;
};

}  // namespace gradwire
