#include "codec/half.h"

#include <algorithm>
#include <cstring>

#include "codec/bits.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADWIRE_F16C __attribute__((target("avx2,f16c")))
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace gradwire::codec {

namespace {

using LooseHalf = uint16_t __attribute__((aligned(1), may_alias));

// The largest magnitude goes to [2^14, 2^15), as high as rounding permits.
constexpr int kTopExponent = 14;
constexpr int kLeastShift = kTopExponent - 127;
constexpr int kMostShift = 126;  // 2^shift and 2^-shift are normal floats

// Limits as bits of floats. The second is 2^15 less one step: at the smallest shift, 2^15 would
// decode to 2^128.
constexpr auto kMostHalf = std::bit_cast<uint32_t>(65'504.0f);
constexpr auto kMostAtTheTop = std::bit_cast<uint32_t>(32'752.0f);
// Without a limit: 2^16 and what rounds to it have the bits of infinity.
constexpr auto kNoLimit = std::bit_cast<uint32_t>(65'536.0f);

// The magnitude of an infinite half, shifted to the place of a float's.
constexpr uint32_t kInfinityOfHalf = 0x7c00u << 13;

struct Shift {
  int16_t shift;
  uint32_t limit;
};

Shift choose_shift(const float* values, uint32_t count) {
  const uint32_t largest = largest_finite(values, count);
  const int exponent = static_cast<int>(largest >> 23) - 127;  // subnormals are below the clamp
  const int shift = std::clamp(kTopExponent - exponent, kLeastShift, kMostShift);
  return {static_cast<int16_t>(shift), shift == kLeastShift ? kMostAtTheTop : kMostHalf};
}

// Rounds to nearest even; finite values stay within the limit.
inline uint16_t to_half(float value, uint32_t limit) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t a = std::min(magnitude, limit);
  // Normal: the exponent is rebiased and 13 bits are rounded away.
  const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Subnormal: adding 0.5 makes the float adder round at 2^-24.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  // Masks choose the result: the compiler does not vectorise conditions here.
  const uint32_t is_small = a < 0x38800000u ? ~0u : 0u;
  const uint32_t is_finite = magnitude < kInfinity ? ~0u : 0u;
  const uint32_t is_nan = magnitude > kInfinity ? ~0u : 0u;
  const uint32_t finite = (small & is_small) | (normal & ~is_small);
  const uint32_t special = 0x7c00u | (0x200u & is_nan);
  return static_cast<uint16_t>((finite & is_finite) | (special & ~is_finite) |
                               ((bits & kSignBit) >> 16));
}

inline float from_half(uint16_t half, float factor) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // The factor 2^112 corrects the bias, of subnormals too, and is exact.
  const float finite = std::bit_cast<float>(rest) * 0x1p112f * factor;
  const uint32_t quiet = rest > kInfinityOfHalf ? 0x00400000u : 0u;  // as the processor's do
  const uint32_t special = kInfinity | (rest & 0x007fffffu) | quiet;
  return std::bit_cast<float>(
      ((half & 0x7c00u) == 0x7c00u ? special : std::bit_cast<uint32_t>(finite)) | sign);
}

#if defined(GRADWIRE_F16C)
// The processor's conversions are faster than to_half() and from_half(), and yield the same bits
// where subnormal floats are not flushed. Both convert blocks of eight and return the number of
// elements that they have converted.

bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __builtin_cpu_supports("avx2");
}
const bool kHasF16c = has_f16c();

GRADWIRE_F16C uint32_t pack_blocks(const float* values, uint32_t count, float factor,
                                   uint32_t limit, uint8_t* out) {
  const __m256 scale = _mm256_set1_ps(factor);
  const __m256 most = _mm256_set1_ps(std::bit_cast<float>(limit));
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 infinity = _mm256_set1_ps(std::bit_cast<float>(kInfinity));
  const __m256 quiet = _mm256_set1_ps(std::bit_cast<float>(kInfinity | 0x00400000u));
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(values + i), scale);
    const __m256 magnitude = _mm256_andnot_ps(sign, value);
    const __m256 is_finite = _mm256_cmp_ps(magnitude, infinity, _CMP_LT_OQ);
    const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256 special = _mm256_blendv_ps(infinity, quiet, is_nan);
    const __m256 bounded = _mm256_blendv_ps(special, _mm256_min_ps(magnitude, most), is_finite);
    const __m256 result = _mm256_or_ps(bounded, _mm256_and_ps(sign, value));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + size_t{2} * i),
                     _mm256_cvtps_ph(result, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

GRADWIRE_F16C uint32_t unpack_blocks(const uint8_t* in, uint32_t count, float factor, float* out) {
  const __m256 scale = _mm256_set1_ps(factor);
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + size_t{2} * i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(halves), scale));
  }
  return i;
}
#else
constexpr bool kHasF16c = false;
uint32_t pack_blocks(const float*, uint32_t, float, uint32_t, uint8_t*) {
  return 0;
}
uint32_t unpack_blocks(const uint8_t*, uint32_t, float, float*) {
  return 0;
}
#endif

}  // namespace

GRADWIRE_VECTORISED static void pack_rest(const float* values, uint32_t count, float factor,
                                          uint32_t limit, LooseHalf* out) {
  for (uint32_t i = 0; i < count; ++i) out[i] = to_half(values[i] * factor, limit);
}

GRADWIRE_VECTORISED static void unpack_rest(const LooseHalf* in, uint32_t count, float factor,
                                            float* out) {
  for (uint32_t i = 0; i < count; ++i) out[i] = from_half(in[i], factor);
}

static void pack_halves(const float* values, uint32_t count, float factor, uint32_t limit,
                        uint8_t* bytes) {
  const uint32_t done = kHasF16c ? pack_blocks(values, count, factor, limit, bytes) : 0;
  pack_rest(values + done, count - done, factor, limit, reinterpret_cast<LooseHalf*>(bytes) + done);
}

static void unpack_halves(const uint8_t* bytes, uint32_t count, float factor, float* out) {
  const uint32_t done = kHasF16c ? unpack_blocks(bytes, count, factor, out) : 0;
  unpack_rest(reinterpret_cast<const LooseHalf*>(bytes) + done, count - done, factor, out + done);
}

void encode_f16(const float* values, uint32_t count, uint8_t* out) {
  const Shift chosen = choose_shift(values, count);
  std::memcpy(out, &chosen.shift, sizeof chosen.shift);
  pack_halves(values, count, power_of_two(chosen.shift), chosen.limit, out + kF16Prefix);
}

bool valid_f16(const uint8_t* payload) {
  int16_t shift;
  std::memcpy(&shift, payload, sizeof shift);
  return shift >= kLeastShift && shift <= kMostShift;
}

void decode_f16(const uint8_t* payload, uint32_t count, float* out) {
  int16_t shift;
  std::memcpy(&shift, payload, sizeof shift);
  unpack_halves(payload + kF16Prefix, count, power_of_two(-shift), out);
}

GRADWIRE_VECTORISED void encode_bf16(const float* values, uint32_t count, uint8_t* bytes) {
  LooseHalf* out = reinterpret_cast<LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
    const uint32_t is_finite = magnitude < kInfinity ? ~0u : 0u;
    const uint32_t is_nan = magnitude > kInfinity ? ~0u : 0u;
    const uint32_t special = 0x7f80u | (0x40u & is_nan);
    out[i] = static_cast<uint16_t>((rounded & is_finite) | (special & ~is_finite) |
                                   ((bits & kSignBit) >> 16));
  }
}

GRADWIRE_VECTORISED void decode_bf16(const uint8_t* bytes, uint32_t count, float* out) {
  const LooseHalf* in = reinterpret_cast<const LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i)
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(in[i]) << 16);
}

void encode_half(const float* values, uint32_t count, uint8_t* out) {
  pack_halves(values, count, 1.0f, kNoLimit, out);
}

void decode_half(const uint8_t* payload, uint32_t count, float* out) {
  unpack_halves(payload, count, 1.0f, out);
}

}  // namespace gradwire::codec
