// Codecs turn the elements of one chunk into the payload of one datagram, and back. A payload
// decodes without any other packet; its length follows from the format and the number of elements
// alone.
//
//   f32   the elements, little-endian
//   f16   i16 shift | binary16 × n: the elements × 2^shift, which brings the largest magnitude of
//         the chunk to [2^14, 2^15): no overflow, and small gradients keep their 11 bits
//   bf16  bfloat16 × n, to nearest even
//   half  binary16 × n, to nearest even
//   int8  f32 scale | i8 × n: element / scale, scale = largest finite magnitude / 126; the codes
//         127, -127 and -128 stand for infinity, minus infinity and NaN
//   topk  u16 index × k | f32 value × k: the k largest magnitudes, indices within the chunk and
//         increasing; a chunk of more than k non-finite values has only indices 0xffff and reads
//         NaN
//
// bf16 and half round as IEEE 754 does, so what exceeds their range becomes infinite. Otherwise no
// finite element decodes to a non-finite one (but for the last case of topk), and never a
// non-finite one to a finite one. Encoding is a pure function of its input, so a retransmission has
// the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace gradwire::codec {

enum class Encoding : uint8_t { f32, f16, bf16, int8, topk, half };

inline constexpr size_t kF32Bytes = 4;
// Elements of a chunk: indices have 16 bits, and 0xffff stands for none.
inline constexpr uint32_t kMostElements = 65'535;

inline constexpr size_t f32_bytes(size_t elements) {
  return elements * kF32Bytes;
}

struct Format {
  Encoding encoding = Encoding::f32;
  double kept = 1.0;  // topk: the share of elements that travel, in (0, 1]; else 1

  bool plain() const { return encoding == Encoding::f32; }
  // The payloads are elements of a type of two bytes as they lie in memory.
  bool is_type_of_two_bytes() const {
    return encoding == Encoding::half || encoding == Encoding::bf16;
  }
  // An empty string, or what is wrong: the field, its value and what is allowed.
  std::string validate() const;
  // topk: the number of elements of a chunk that travel.
  uint32_t entries(uint32_t elements) const;
  size_t bytes(uint32_t elements) const {
    return plain() ? f32_bytes(elements) : encoded_bytes(elements);
  }
  // The most elements whose payload fits into `bytes`.
  uint32_t chunk_elements(size_t bytes) const;

 private:
  size_t encoded_bytes(uint32_t elements) const;
};

// Writes format.bytes(count) bytes.
void encode(const Format& format, const float* values, uint32_t count, uint8_t* out);
// True for payloads of a chunk of `count` elements; decode() takes no others.
bool valid_encoded(const Format& format, std::span<const uint8_t> payload, uint32_t count);
inline bool valid(const Format& format, std::span<const uint8_t> payload, uint32_t count) {
  return format.plain() ? payload.size() == f32_bytes(count)
                        : valid_encoded(format, payload, count);
}
void decode(const Format& format, const uint8_t* payload, uint32_t count, float* out);
// Replaces the values by what others decode of them. `scratch` has room for one payload.
void round_trip(const Format& format, float* values, uint32_t count, uint8_t* scratch);

}  // namespace gradwire::codec
