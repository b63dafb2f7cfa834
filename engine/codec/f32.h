// The f32 codec: a chunk's payload is its elements, little-endian, and nothing else.
#pragma once

#include <cstddef>

namespace gradwire::codec {

inline constexpr size_t kF32Bytes = 4;

inline constexpr size_t f32_bytes(size_t elements) {
  return elements * kF32Bytes;
}

}  // namespace gradwire::codec
