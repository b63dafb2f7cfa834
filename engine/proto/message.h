// Control messages longer than a datagram (OPEN, CLOSE, FOLD, COMMIT): cut into parts, each a
// reliable packet that says the whole length, put together again on the other side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "proto/bitmap.h"

namespace gradwire {

inline constexpr uint32_t kMaxMessage = 4u << 20;
inline constexpr uint32_t kPartPrefix = 4;  // u32: length of the whole message

class MessageReceiver {
 public:
  enum class Result : uint8_t { incomplete, complete, malformed };

  // One part of a message whose parts carry `part_bytes` each (the last may be shorter).
  Result part(uint32_t index, std::span<const uint8_t> payload, uint32_t part_bytes) {
    if (payload.size() < kPartPrefix || done_)
      return done_ ? Result::incomplete : Result::malformed;
    uint32_t total;
    std::memcpy(&total, payload.data(), sizeof total);
    const auto body = payload.subspan(kPartPrefix);
    if (total == 0 || total > kMaxMessage || (known_ && total != bytes_.size()))
      return Result::malformed;
    const uint64_t at = uint64_t{index} * part_bytes;
    if (at >= total || body.size() != std::min<uint64_t>(part_bytes, total - at))
      return Result::malformed;
    if (!known_) {
      known_ = true;
      bytes_.resize(total);
      parts_ = Bitmap((total + part_bytes - 1) / part_bytes);
    }
    if (!parts_.set(index)) return Result::incomplete;
    std::memcpy(bytes_.data() + at, body.data(), body.size());
    if (++count_ < parts_.size()) return Result::incomplete;
    done_ = true;
    return Result::complete;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  bool done() const { return done_; }

 private:
  bool known_ = false;
  bool done_ = false;
  size_t count_ = 0;
  Bitmap parts_;
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
