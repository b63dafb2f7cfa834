// StartedOps records which ops a peer is known to have started, and what went to it before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/path/early_chunks.h"
#include "proto/plan/lanes.h"

namespace gradwire {

class StartedOps {
 public:
  EarlyChunks early;  // its owner's: sent of ops that the peer is not known to have started

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

 private:
  std::vector<uint64_t> below_;
};

}  // namespace gradwire
