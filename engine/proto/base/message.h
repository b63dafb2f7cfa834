// Control messages longer than a datagram (OPEN, CLOSE, FOLD, COMMIT): cut into parts, each a
// reliable packet that says the whole length, put together again on the other side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/bitmap.h"

namespace gradwire {

inline constexpr uint32_t kMaxMessage = 4u << 20;
inline constexpr uint32_t kPartPrefix = 4;  // u32: length of the whole message

// Holds the parts that have come, however long the message is said to be.
class MessageReceiver {
 public:
  enum class Result : uint8_t { incomplete, complete, malformed };
  // What a part takes, its place in the books included.
  static constexpr size_t cost(size_t bytes) { return bytes + 128; }

  // One part of a message of `most` bytes at the most, whose parts carry `part_bytes` each (the
  // last may be shorter).
  Result part(uint32_t index, std::span<const uint8_t> payload, uint32_t part_bytes,
              uint64_t most = kMaxMessage) {
    if (payload.size() < kPartPrefix || done_)
      return done_ ? Result::incomplete : Result::malformed;
    uint32_t total;
    std::memcpy(&total, payload.data(), sizeof total);
    const auto body = payload.subspan(kPartPrefix);
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
  // What it takes.
  size_t held() const { return held_; }
  // Its first part, if that has come; all of it once it is done.
  std::span<const uint8_t> beginning() const {
    const auto first = parts_.find(0);
    return first == parts_.end() ? std::span(bytes_) : std::span(first->second);
  }
  // All of it, once it is done, and once only.
  std::vector<uint8_t> take() {
    held_ = 0;
    return std::move(bytes_);
  }

 private:
  void join() {
    done_ = true;
    bytes_ = std::move(parts_[0]);
    parts_.erase(0);
    bytes_.reserve(total_);
    for (const auto& [index, part] : parts_) bytes_.insert(bytes_.end(), part.begin(), part.end());
    parts_.clear();
  }

  bool done_ = false;
  uint32_t total_ = 0;
  size_t held_ = 0;
  std::map<uint32_t, std::vector<uint8_t>> parts_;  // by index, until all have come
  std::vector<uint8_t> bytes_;
};

// Append-only little-endian writer for message bodies.
class Body {
 public:
  template <class T>
  Body& put(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
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
