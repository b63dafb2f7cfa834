// Reassembly joins the fragments of datagrams that were longer than their path carries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

class Reassembly {
 public:
  // Adds a fragment. Returns the whole datagram `number` when this fragment completes it, else an
  // empty span; the span lives until the next call. `total`: the datagram's length; `most`: the
  // longest allowed.
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
  static constexpr size_t kAtOnce = 64;  // datagrams; a newer one takes the place of an older one
  struct Whole {
    uint32_t number = 0;
    uint32_t left = 0;
    std::vector<uint8_t> bytes;
    std::vector<bool> known;
  };
  std::vector<Whole> wholes_;
};

}  // namespace gradwire
