// ControlFrames holds the reliable control packets of one path until they are acknowledged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
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

// ControlFrames keeps the frames of one path in slots. A packet in flight refers to its frame by a
// handle (slot and generation), which becomes invalid when the frame is acknowledged. Frames beyond
// the last slot wait for one.
class ControlFrames {
 public:
  void push(ControlFrame frame) {
    if (free_.empty() && slots_.size() == kMostSlots) {
      without_slot_.push_back(std::move(frame));
      return;
    }
    uint32_t slot;
    if (free_.empty()) {
      slot = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    slots_[slot].frame = std::move(frame);
    slots_[slot].live = true;
    queue_.push_back(handle(slot));
  }
  // The number of frames that are not acknowledged.
  size_t open() const { return slots_.size() - free_.size() + without_slot_.size(); }
  bool waiting() {
    while (!queue_.empty() && !live(queue_.front())) queue_.pop_front();
    return !queue_.empty();
  }
  uint32_t take() {
    const uint32_t handle = queue_.front();
    queue_.pop_front();
    return handle;
  }
  bool live(uint32_t handle) const {
    const uint32_t slot = handle & 0xffff;
    return slot < slots_.size() && slots_[slot].live && slots_[slot].generation == handle >> 16;
  }
  const ControlFrame& at(uint32_t handle) const { return slots_[handle & 0xffff].frame; }
  void again(uint32_t handle) {
    if (live(handle)) queue_.push_back(handle);
  }
  void release(uint32_t handle) {
    Slot& slot = slots_[handle & 0xffff];
    slot.live = false;
    slot.generation = (slot.generation + 1) & 0xffff;
    slot.frame.payload.clear();
    free_.push_back(handle & 0xffff);
    if (without_slot_.empty()) return;
    ControlFrame next = std::move(without_slot_.front());
    without_slot_.pop_front();
    push(std::move(next));
  }

 private:
  // A handle has 16 bits for the slot.
  static constexpr size_t kMostSlots = 1u << 16;
  struct Slot {
    ControlFrame frame;
    uint32_t generation = 0;
    bool live = false;
  };
  uint32_t handle(uint32_t slot) const { return slot | slots_[slot].generation << 16; }
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> queue_;  // handles
  std::deque<ControlFrame> without_slot_;
};

}  // namespace gradwire
