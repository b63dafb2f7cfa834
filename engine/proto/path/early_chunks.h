// EarlyChunks counts the chunks that have gone to a peer before it was known to have started their
// op.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

namespace gradwire {

class EarlyChunks {
 public:
  // How many more may go where `most` may. Packets that a late peer refuses would be sent again and
  // again.
  uint64_t room(size_t most) const { return most - std::min(most, all_); }
  void add(uint64_t op, size_t chunks) {
    by_op_[op].chunks += chunks;
    all_ += chunks;
  }
  // The peer has no room for packets of this op, which wait until it has started.
  void refuse(uint64_t op) { by_op_[op].refused = true; }
  bool refused(uint64_t op) const {
    const auto found = by_op_.find(op);
    return found != by_op_.end() && found->second.refused;
  }
  // The peer has started the op, or the op is over.
  void forget(uint64_t op) {
    const auto found = by_op_.find(op);
    if (found == by_op_.end()) return;
    all_ -= found->second.chunks;
    by_op_.erase(found);
  }

 private:
  struct Early {
    size_t chunks = 0;
    bool refused = false;
  };
  std::map<uint64_t, Early> by_op_;
  size_t all_ = 0;
};

}  // namespace gradwire
