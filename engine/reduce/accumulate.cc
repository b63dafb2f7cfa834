#include "reduce/accumulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codec/topk.h"
#include "codec/vectorised.h"

namespace gradwire::reduce {

// Elements that are summed at a time: a chunk of most datagrams.
constexpr size_t kBlock = 512;
// Contributions that are summed at once.
constexpr size_t kFew = 4;

GRADWIRE_VECTORISED void add(float* __restrict sum, const void* in, size_t count) {
  const LooseFloat* __restrict values = static_cast<const LooseFloat*>(in);
  for (size_t i = 0; i < count; ++i) sum[i] += values[i];
}

GRADWIRE_VECTORISED void add_pair(float* __restrict sum, const void* a, const void* b,
                                  size_t count) {
  const LooseFloat* left = static_cast<const LooseFloat*>(a);
  const LooseFloat* right = static_cast<const LooseFloat*>(b);
  for (size_t i = 0; i < count; ++i) sum[i] = left[i] + right[i];
}

// Sums that are read and written once: out = (parts[0] + parts[1] + …) * factor, of four at most.
GRADWIRE_VECTORISED static void add_few(float* out, std::span<const void* const> parts,
                                        float factor, size_t count) {
  const auto part = [parts](size_t i) {
    return static_cast<const LooseFloat*>(parts[std::min(i, parts.size() - 1)]);
  };
  const LooseFloat* const a = part(0);
  const LooseFloat* const b = part(1);
  const LooseFloat* const c = part(2);
  const LooseFloat* const d = part(3);
  if (parts.size() == 1) {
    GRADWIRE_INDEPENDENT
    for (size_t i = 0; i < count; ++i) out[i] = a[i] * factor;
  } else if (parts.size() == 2) {
    GRADWIRE_INDEPENDENT
    for (size_t i = 0; i < count; ++i) out[i] = (a[i] + b[i]) * factor;
  } else if (parts.size() == 3) {
    GRADWIRE_INDEPENDENT
    for (size_t i = 0; i < count; ++i) out[i] = (a[i] + b[i] + c[i]) * factor;
  } else {
    GRADWIRE_INDEPENDENT
    for (size_t i = 0; i < count; ++i) out[i] = (a[i] + b[i] + c[i] + d[i]) * factor;
  }
}

void add_run(float* out, std::span<const void* const> parts, float factor, size_t count) {
  if (parts.size() <= kFew) return add_few(out, parts, factor, count);
  std::array<float, kBlock> sum;
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t block = std::min(kBlock, count - at);
    std::array<const void*, kFew> few;
    size_t had = 0;
    for (size_t i = 0; i < parts.size();) {
      for (; had < kFew && i < parts.size(); ++i)
        few[had++] = static_cast<const uint8_t*>(parts[i]) + codec::f32_bytes(at);
      const bool last = i == parts.size();
      add_few(last ? out + at : sum.data(), {few.data(), had}, last ? factor : 1.0f, block);
      few[0] = sum.data();
      had = 1;
    }
  }
}

GRADWIRE_VECTORISED void subtract(float* __restrict sum, const float* __restrict in, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] -= in[i];
}

void add(const codec::Format& format, float* sum, const uint8_t* payload, uint32_t count,
         float* scratch) {
  if (format.plain()) {
    add(sum, payload, count);
  } else if (format.encoding == codec::Encoding::topk) {
    codec::add_topk(sum, payload, count, format.entries(count));
  } else {
    codec::decode(format, payload, count, scratch);
    add(sum, scratch, count);
  }
}

GRADWIRE_VECTORISED void scale(float* values, float factor, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] *= factor;
}

bool all_finite(const float* values, size_t count) {
  // A value with all exponent bits set is infinite or NaN.
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

// Partial sums, added in one order, so that the result is the same with vectors of any width.
constexpr size_t kLanes = 16;

GRADWIRE_VECTORISED float mean_magnitude(const float* values, size_t count) {
  float lanes[kLanes] = {};
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += std::fabs(values[at + lane]);
  }
  for (size_t lane = 0; at + lane < count; ++lane) lanes[lane] += std::fabs(values[at + lane]);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  const float mean = sum / static_cast<float>(count);
  return std::isfinite(mean) ? mean : std::numeric_limits<float>::infinity();
}

GRADWIRE_VECTORISED double square_sum(const float* values, size_t count) {
  double lanes[kLanes] = {};
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[at + lane];
      lanes[lane] += value * value;
    }
  }
  for (size_t lane = 0; at + lane < count; ++lane) {
    const double value = values[at + lane];
    lanes[lane] += value * value;
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

GRADWIRE_VECTORISED void write_scaled(float* __restrict out, const float* __restrict in,
                                      float factor, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

}  // namespace gradwire::reduce
