// ChunkFifo is a queue of chunk ids whose memory follows what waits in it, not all that ever did.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire {

class ChunkFifo {
 public:
  bool empty() const { return head_ == items_.size(); }
  size_t size() const { return items_.size() - head_; }
  uint32_t front() const { return items_[head_]; }
  void push(uint32_t chunk) { items_.push_back(chunk); }
  void pop() {
    ++head_;
    // Popped entries go once they are half of the vector: each entry is moved at most once on
    // average.
    if (2 * head_ < items_.size()) return;
    items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }

 private:
  std::vector<uint32_t> items_;
  size_t head_ = 0;
};

}  // namespace gradwire
