#include "codec/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "codec/vectorised.h"

namespace gradwire::codec {

namespace {

// SplitMix64 (Steele, Lea, Flood, OOPSLA'14) yields 64 signs at a time, from the place alone.
uint64_t draw(uint64_t seed, uint64_t place) {
  uint64_t z = seed + (place + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Signs of one draw: the bits of its result.
constexpr size_t kWord = 64;

GRADWIRE_VECTORISED
void flip(float* values, size_t count, uint64_t signs) {
  for (size_t i = 0; i < count; ++i) {
    const auto sign = static_cast<uint32_t>(signs >> i & 1) << 31;
    values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[i]) ^ sign);
  }
}

void flip_signs(float* values, size_t count, uint64_t seed) {
  for (size_t at = 0; at < count; at += kWord)
    flip(values + at, std::min(kWord, count - at), draw(seed, at / kWord));
}

// Floats of an AVX2 register.
constexpr size_t kRow = 8;
constexpr size_t kTile = kRow * kRow;

// The stages within rows of eight elements, for a tile of eight rows at a time. The tile is
// transposed, so that eight elements are processed at once here too.
GRADWIRE_VECTORISED
void transform_rows(float* values, size_t count) {
  for (size_t at = 0; at < count; at += kTile) {
    float tile[kTile];
    float* const rows = values + at;
    for (size_t i = 0; i < kRow; ++i)
      for (size_t j = 0; j < kRow; ++j) tile[kRow * j + i] = rows[kRow * i + j];
    for (size_t half = 1; half < kRow; half *= 2)
      for (size_t pair = 0; pair < kRow; pair += 2 * half)
        for (size_t row = pair; row < pair + half; ++row)
          for (size_t j = 0; j < kRow; ++j) {
            const float low = tile[kRow * row + j];
            const float high = tile[kRow * (row + half) + j];
            tile[kRow * row + j] = low + high;
            tile[kRow * (row + half) + j] = low - high;
          }
    for (size_t i = 0; i < kRow; ++i)
      for (size_t j = 0; j < kRow; ++j) rows[kRow * i + j] = tile[kRow * j + i];
  }
}

// Transforms one block, a power of two, while it is in the nearest cache; two stages at a time.
GRADWIRE_VECTORISED
void transform_block(float* values, size_t block) {
  size_t half = 1;
  if (block >= kTile) {
    transform_rows(values, block);
    half = kRow;
  }
  for (; 4 * half <= block; half *= 4)
    for (size_t at = 0; at < block; at += 4 * half) {
      float* const a = values + at;
      float* const b = a + half;
      float* const c = b + half;
      float* const d = c + half;
      for (size_t i = 0; i < half; ++i) {
        const float sum = a[i] + b[i], difference = a[i] - b[i];
        const float other_sum = c[i] + d[i], other_difference = c[i] - d[i];
        a[i] = sum + other_sum;
        b[i] = difference + other_difference;
        c[i] = sum - other_sum;
        d[i] = difference - other_difference;
      }
    }
  for (; half < block; half *= 2)
    for (size_t i = 0; i < half; ++i) {
      const float sum = values[i] + values[half + i];
      values[half + i] = values[i] - values[half + i];
      values[i] = sum;
    }
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (size_t i = 0; i < block; ++i) values[i] *= scale;
}

void transform(float* values, size_t count) {
  size_t at = 0;
  for (; count - at >= kHadamardBlock; at += kHadamardBlock)
    transform_block(values + at, kHadamardBlock);
  for (size_t block = kHadamardBlock / 2; at < count; block /= 2)
    if (count - at >= block) {
      transform_block(values + at, block);
      at += block;
    }
}

}  // namespace

void hadamard_forward(float* values, size_t count, uint64_t seed) {
  flip_signs(values, count, seed);
  transform(values, count);
}

void hadamard_inverse(float* values, size_t count, uint64_t seed) {
  transform(values, count);
  flip_signs(values, count, seed);
}

}  // namespace gradwire::codec
