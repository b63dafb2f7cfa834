#include "codec/topk.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "codec/bits.h"
#include "codec/codec.h"

namespace gradwire::codec {

namespace {

// The index of a chunk with too many values that are not finite.
constexpr uint16_t kNoIndex = 0xffff;

using Lanes = int32_t __attribute__((vector_size(32)));
using LooseIndex = uint16_t __attribute__((aligned(1), may_alias));

inline uint32_t key(float value) {
  return std::bit_cast<uint32_t>(value) & kMagnitude;
}

// Keys above `least` travel, and the first `ties` of those equal to it.
struct Threshold {
  uint32_t least;
  uint32_t ties;
};

// Finds the entries-th largest of the keys with which visit(f) calls f. It counts keys by their
// first eleven bits, then by the next bits inside the bucket that contains it.
template <class Visit>
Threshold find_threshold(uint32_t entries, const Visit& visit) {
  std::array<uint32_t, 2048> buckets;
  uint32_t known = 0;
  uint32_t known_mask = 0;
  uint32_t need = entries;
  for (const int shift : {20, 9, 0}) {
    const uint32_t mask = shift ? 0x7ffu : 0x1ffu;
    buckets.fill(0);
    visit([&](uint32_t k) {
      if ((k & known_mask) == known) ++buckets[(k >> shift) & mask];
    });
    uint32_t bucket = mask;
    while (buckets[bucket] < need) need -= buckets[bucket--];
    known |= bucket << shift;
    known_mask |= mask << shift;
  }
  return {known, need};
}

// Blocks keeps the largest key of each run of neighbours. A key below the entries-th largest of
// these is not among the entries largest of all, so most elements are read only once.
class Blocks {
 public:
  Blocks(const float* values, uint32_t count, uint32_t entries) : count_(count) {
    if (count / kLength < 2 * entries) return;  // nearly every block would contain one
    blocks_ = count / kLength;
    find_largest(values, blocks_, largest_.data());
    least_ = find_threshold(entries, [&](const auto& f) {
               for (uint32_t b = 0; b < blocks_; ++b) f(largest_[b]);
             }).least;
  }

  // Calls f with the index of each element that may have a key of at least `key`, in order.
  template <class F>
  void visit(uint32_t key, const F& f) const {
    for (uint32_t b = 0; b < blocks_; ++b)
      if (largest_[b] >= key)
        for (uint32_t i = b * kLength; i < (b + 1) * kLength; ++i) f(i);
    for (uint32_t i = blocks_ * kLength; i < count_; ++i) f(i);
  }
  uint32_t least() const { return least_; }  // no smaller key is among the largest

 private:
  // Elements of a block: two AVX2 registers.
  static constexpr uint32_t kLength = 16;
  static void find_largest(const float* values, uint32_t blocks, uint32_t* out);

  uint32_t count_;
  uint32_t blocks_ = 0;
  uint32_t least_ = 0;
  std::array<uint32_t, kMostElements / kLength + 1> largest_;
};

GRADWIRE_VECTORISED void Blocks::find_largest(const float* values, uint32_t blocks, uint32_t* out) {
  for (uint32_t b = 0; b < blocks; ++b) {
    // Explicit vectors: the compiler would take one block per lane, and gather.
    Lanes low;
    Lanes high;
    std::memcpy(&low, values + size_t{b} * kLength, sizeof low);
    std::memcpy(&high, values + size_t{b} * kLength + kLength / 2, sizeof high);
    low &= static_cast<int32_t>(kMagnitude);
    high &= static_cast<int32_t>(kMagnitude);
    const Lanes larger = low > high ? low : high;
    const int32_t left = std::max(std::max(larger[0], larger[1]), std::max(larger[2], larger[3]));
    const int32_t right = std::max(std::max(larger[4], larger[5]), std::max(larger[6], larger[7]));
    out[b] = static_cast<uint32_t>(std::max(left, right));
  }
}

}  // namespace

void encode_topk(const float* values, uint32_t count, uint32_t entries, uint8_t* out) {
  LooseIndex* indices = reinterpret_cast<LooseIndex*>(out);
  LooseFloat* chosen = reinterpret_cast<LooseFloat*>(out + sizeof(uint16_t) * entries);
  const Blocks blocks(values, count, entries);
  const Threshold threshold = find_threshold(entries, [&](const auto& f) {
    blocks.visit(blocks.least(), [&](uint32_t i) { f(key(values[i])); });
  });
  uint32_t ties = threshold.ties;
  uint32_t at = 0;
  bool overfull = false;
  blocks.visit(std::min(threshold.least, kInfinity), [&](uint32_t i) {
    const uint32_t k = key(values[i]);
    if (k < threshold.least || (k == threshold.least && ties == 0)) {
      overfull |= k >= kInfinity;
      return;
    }
    if (k == threshold.least) --ties;
    indices[at] = static_cast<uint16_t>(i);
    chosen[at++] = values[i] + 0.0f;  // no negative zero
  });
  if (!overfull) return;
  // A value that is not finite would be left out, so the chunk must not decode to finite values.
  for (uint32_t i = 0; i < entries; ++i) {
    indices[i] = kNoIndex;
    chosen[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

bool valid_topk(const uint8_t* payload, uint32_t count, uint32_t entries) {
  const LooseIndex* indices = reinterpret_cast<const LooseIndex*>(payload);
  if (indices[0] == kNoIndex) {
    for (uint32_t i = 1; i < entries; ++i)
      if (indices[i] != kNoIndex) return false;
    return true;
  }
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
  const LooseIndex* indices = reinterpret_cast<const LooseIndex*>(payload);
  const LooseFloat* values =
      reinterpret_cast<const LooseFloat*>(payload + sizeof(uint16_t) * entries);
  if (indices[0] == kNoIndex) {
    std::fill_n(sum, count, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  for (uint32_t i = 0; i < entries; ++i) sum[indices[i]] += values[i];
}

}  // namespace gradwire::codec
