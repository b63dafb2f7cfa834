// Puts datagrams together again that came in parts, because their path carries no longer ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace gradwire {

class Reassembly {
 public:
  // The whole datagram of this number once its last part is here, else nothing. It lives until the
  // next call. `total`: its length; `most`: what that may be.
  std::span<const uint8_t> add(uint32_t number, uint32_t total, uint32_t offset,
                               std::span<const uint8_t> part, uint32_t most) {
    if (total > most || part.empty() || offset >= total || part.size() > total - offset) return {};
    if (wholes_.empty()) wholes_.resize(kAtOnce);
    Whole& whole = wholes_[number % kAtOnce];
    if (whole.number != number || whole.bytes.size() != total) {
      whole.number = number;
      whole.bytes.assign(total, 0);
      whole.known.assign(total, false);
      whole.left = total;
    }
    for (size_t i = 0; i < part.size(); ++i) {
      if (whole.known[offset + i]) continue;
      whole.known[offset + i] = true;
      whole.bytes[offset + i] = part[i];
      if (--whole.left == 0) return whole.bytes;
    }
    return {};
  }

 private:
  static constexpr size_t kAtOnce = 64;  // newer ones take the place of older ones
  struct Whole {
    uint32_t number = 0;
    uint32_t left = 0;
    std::vector<uint8_t> bytes;
    std::vector<bool> known;
  };
  std::vector<Whole> wholes_;
};

}  // namespace gradwire
