// ControlFrames holds the reliable control packets of one path until they are acknowledged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/packet.h"

namespace gradwire {

// ControlFrame is a reliable control packet, kept until it is acknowledged.
struct ControlFrame {
  uint64_t op = 0;
  wire::Kind kind = wire::Kind::open;
  uint32_t part = 0;
  std::vector<uint8_t> payload;
};

// ControlFrames keeps the frames of one path. A packet in flight refers to its frame by a handle,
// which becomes invalid when the frame is acknowledged.
class ControlFrames {
 public:
  void push(ControlFrame frame) {
    while (!frames_.try_emplace(next_, std::move(frame)).second) ++next_;
    queue_.push_back(next_++);
  }
  // The number of frames that are not acknowledged.
  size_t open() const { return frames_.size(); }
  bool waiting() {
    while (!queue_.empty() && !live(queue_.front())) queue_.pop_front();
    return !queue_.empty();
  }
  uint32_t take() {
    const uint32_t handle = queue_.front();
    queue_.pop_front();
    return handle;
  }
  bool live(uint32_t handle) const { return frames_.contains(handle); }
  const ControlFrame& at(uint32_t handle) const { return frames_.at(handle); }
  void again(uint32_t handle) {
    if (live(handle)) queue_.push_back(handle);
  }
  void release(uint32_t handle) { frames_.erase(handle); }

 private:
  std::unordered_map<uint32_t, ControlFrame> frames_;  // by handle
  uint32_t next_ = 0;           // a number that was used long ago may come again
  std::deque<uint32_t> queue_;  // handles
};

}  // namespace gradwire
