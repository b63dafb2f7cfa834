// MessageReceiver and Body are for control messages longer than a datagram (OPEN, CLOSE, FOLD,
// COMMIT). A message travels in parts, each a reliable packet that begins with the length of the
// whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/bitmap.h"
#include "wire/packet.h"

namespace gradwire {

// Bytes of one message at most; bounds what a receiver collects.
inline constexpr uint32_t kMaxMessage = 4u << 20;
inline constexpr uint32_t kPartPrefix = 4;  // u32: length of the whole message

// MessageReceiver collects the parts of one message. It takes memory for the parts that have
// arrived, whatever length they claim.
class MessageReceiver {
 public:
  enum class Result : uint8_t { incomplete, complete, malformed };
  // The memory of one part in bytes, with its entry in the map.
  static constexpr size_t cost(size_t bytes) { return bytes + 128; }

  // Takes one part of a message of at most `most` bytes. All parts carry `part_bytes`, the last may
  // be shorter.
  Result part(uint32_t index, std::span<const uint8_t> payload, uint32_t part_bytes,
              uint64_t most = kMaxMessage) {
    if (done_) return Result::incomplete;
    wire::Reader reader(payload);
    const auto total = reader.get<uint32_t>();  // 0 where there is none
    const auto body = reader.rest();
    if (total == 0 || total > most || (total_ && total != total_)) return Result::malformed;
    const uint64_t at = uint64_t{index} * part_bytes;
    if (at >= total || body.size() != std::min<uint64_t>(part_bytes, total - at))
      return Result::malformed;
    total_ = total;
    if (!parts_.try_emplace(index, body.begin(), body.end()).second) return Result::incomplete;
    held_ += cost(body.size());
    if (parts_.size() < (uint64_t{total} + part_bytes - 1) / part_bytes) return Result::incomplete;
    join();
    return Result::complete;
  }
  bool done() const { return done_; }
  // The memory of the parts in bytes, until take().
  size_t held() const { return held_; }
  // The first part once it has arrived, and the whole message once it is done.
  std::span<const uint8_t> beginning() const {
    const auto first = parts_.find(0);
    return first == parts_.end() ? std::span(bytes_) : std::span(first->second);
  }
  // Moves the whole message out; valid once, after done().
  std::vector<uint8_t> take() {
    held_ = 0;
    return std::move(bytes_);
  }

 private:
  void join() {
    done_ = true;
    bytes_.reserve(total_);
    for (const auto& [index, part] : parts_) bytes_.insert(bytes_.end(), part.begin(), part.end());
    parts_.clear();
  }

  bool done_ = false;
  uint32_t total_ = 0;
  size_t held_ = 0;
  std::map<uint32_t, std::vector<uint8_t>> parts_;  // by index, until all have arrived
  std::vector<uint8_t> bytes_;
};

// Body builds a message: little-endian values, one after the other.
class Body {
 public:
  template <class T>
  Body& put(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    wire::put(bytes_.data() + at, value);
    return *this;
  }
  Body& put_bytes(std::span<const uint8_t> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Body& put_bitmap(const Bitmap& bitmap) {
    bitmap.append_bytes(bytes_);
    return *this;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace gradwire
