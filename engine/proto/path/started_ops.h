// StartedOps records which ops a peer is known to have started, and counts the chunks that have
// gone to it before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "proto/plan/lanes.h"

namespace gradwire {

class StartedOps {
 public:
  // True when the peer is known to have started this op or a later one of its lane.
  bool contains(uint64_t op) const { return op < next_of(op); }
  // The id below which all ids of this one's lane have started.
  uint64_t next_of(uint64_t id) const {
    return lane_of(id) < below_.size() ? below_[lane_of(id)] : 0;
  }
  // Records that all ids below this one have started in its lane; true when that is new.
  bool note_next(uint64_t id) {
    if (lane_of(id) >= below_.size()) below_.resize(lane_of(id) + size_t{1});
    uint64_t& below = below_[lane_of(id)];
    if (id <= below) return false;
    below = id;
    return true;
  }
  const std::vector<uint64_t>& by_lane() const { return below_; }

  // ---- early chunks, of ops that the peer is not known to have started
  // How many more may go where `most` may. Packets that a late peer refuses would be sent again and
  // again.
  uint64_t early_room(size_t most) const { return most - std::min(most, all_early_); }
  void add_early(uint64_t op, size_t chunks) {
    early_[op].chunks += chunks;
    all_early_ += chunks;
  }
  // The peer has no room for packets of this op, which wait until it has started.
  void refuse(uint64_t op) { early_[op].refused = true; }
  bool refused(uint64_t op) const {
    const auto found = early_.find(op);
    return found != early_.end() && found->second.refused;
  }
  // The peer has started the op, or the op is over.
  void forget_early(uint64_t op) {
    const auto found = early_.find(op);
    if (found == early_.end()) return;
    all_early_ -= found->second.chunks;
    early_.erase(found);
  }

 private:
  struct Early {
    size_t chunks = 0;
    bool refused = false;
  };
  std::vector<uint64_t> below_;
  std::map<uint64_t, Early> early_;  // by op
  size_t all_early_ = 0;
};

}  // namespace gradwire
