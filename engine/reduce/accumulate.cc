#include "reduce/accumulate.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GRADWIRE_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define GRADWIRE_VECTORISED
#endif

namespace gradwire::reduce {

namespace {
// Loads from any address; the compiler vectorises these.
using Loose = float __attribute__((aligned(1), may_alias));
}  // namespace

GRADWIRE_VECTORISED void add(float* __restrict sum, const void* in, size_t count) {
  const Loose* __restrict values = static_cast<const Loose*>(in);
  for (size_t i = 0; i < count; ++i) sum[i] += values[i];
}

GRADWIRE_VECTORISED void add_pair(float* __restrict sum, const void* a, const void* b,
                                  size_t count) {
  const Loose* left = static_cast<const Loose*>(a);
  const Loose* right = static_cast<const Loose*>(b);
  for (size_t i = 0; i < count; ++i) sum[i] = left[i] + right[i];
}

GRADWIRE_VECTORISED void scale(float* values, float factor, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] *= factor;
}

bool all_finite(const float* values, size_t count) {
  // All exponent bits set: infinity or NaN.
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

}  // namespace gradwire::reduce
