#include "codec/topk.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "codec/bits.h"

namespace gradwire::codec {

namespace {

constexpr uint16_t kNoIndex = 0xffff;

using LooseIndex = uint16_t __attribute__((aligned(1), may_alias));

inline uint32_t key(float value) {
  return std::bit_cast<uint32_t>(value) & kMagnitude;
}

// Magnitudes from `least` on travel, and of those that equal it the first `ties`.
struct Threshold {
  uint32_t least;
  uint32_t ties;
};

// Counts by eleven bits of the keys, then by the next ones inside the bucket that holds the k-th.
Threshold find_threshold(const float* values, uint32_t count, uint32_t entries) {
  std::array<uint32_t, 2048> buckets;
  uint32_t known = 0;  // the upper bits of the k-th key
  uint32_t known_mask = 0;
  uint32_t need = entries;
  for (const int shift : {20, 9, 0}) {
    const uint32_t mask = shift ? 0x7ffu : 0x1ffu;
    buckets.fill(0);
    if (known_mask == 0) {
      for (uint32_t i = 0; i < count; ++i) ++buckets[key(values[i]) >> shift];
    } else {
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t k = key(values[i]);
        if ((k & known_mask) == known) ++buckets[(k >> shift) & mask];
      }
    }
    uint32_t bucket = mask;
    while (buckets[bucket] < need) need -= buckets[bucket--];
    known |= bucket << shift;
    known_mask |= mask << shift;
  }
  return {known, need};
}

}  // namespace

void encode_topk(const float* values, uint32_t count, uint32_t entries, uint8_t* out) {
  auto* indices = reinterpret_cast<LooseIndex*>(out);
  auto* chosen = reinterpret_cast<LooseFloat*>(out + sizeof(uint16_t) * entries);
  const Threshold threshold = find_threshold(values, count, entries);
  uint32_t ties = threshold.ties;
  uint32_t at = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t k = key(values[i]);
    if (k < threshold.least || (k == threshold.least && ties == 0)) {
      if (k < kInfinity) continue;
      // Left out although it is not finite: nobody may take this chunk for a finite one.
      std::fill_n(indices, entries, kNoIndex);
      std::fill_n(chosen, entries, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    if (k == threshold.least) --ties;
    indices[at] = static_cast<uint16_t>(i);
    chosen[at++] = values[i] + 0.0f;  // no negative zero
  }
}

bool valid_topk(const uint8_t* payload, uint32_t count, uint32_t entries) {
  const auto* indices = reinterpret_cast<const LooseIndex*>(payload);
  if (indices[0] == kNoIndex)
    return std::all_of(indices, indices + entries, [](uint16_t i) { return i == kNoIndex; });
  if (indices[entries - 1] >= count) return false;
  for (uint32_t i = 1; i < entries; ++i)
    if (indices[i] <= indices[i - 1]) return false;
  return true;
}

void decode_topk(const uint8_t* payload, uint32_t count, uint32_t entries, float* out) {
  std::fill_n(out, count, 0.0f);
  add_topk(out, payload, count, entries);
}

void add_topk(float* sum, const uint8_t* payload, uint32_t count, uint32_t entries) {
  const auto* indices = reinterpret_cast<const LooseIndex*>(payload);
  const auto* values = reinterpret_cast<const LooseFloat*>(payload + sizeof(uint16_t) * entries);
  if (indices[0] == kNoIndex) {
    std::fill_n(sum, count, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  for (uint32_t i = 0; i < entries; ++i) sum[indices[i]] += values[i];
}

}  // namespace gradwire::codec
