// Elements is a worker's bucket in memory: floats, or numbers of two bytes that are the payloads of
// the plan's encoding (half or bf16) as they lie there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"

namespace gradwire::codec {

struct Elements {
  uint8_t* bytes = nullptr;
  bool narrow = false;  // two bytes each

  size_t width() const { return narrow ? 2 : kF32Bytes; }
  uint8_t* at(uint64_t element) const { return bytes + width() * element; }
  // Of elements that are not narrow.
  const float* floats(uint64_t element) const {
    return reinterpret_cast<const float*>(at(element));
  }
  // True where a chunk's payload is the memory of its elements.
  bool are_payloads(const Format& format) const { return format.plain() || narrow; }
};

}  // namespace gradwire::codec
