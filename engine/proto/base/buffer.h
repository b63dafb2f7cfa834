// Buffer is memory in which datagrams have arrived. Its driver leaves its bytes as they are while
// it has holders, which read them in place.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace gradwire {

struct Buffer {
  std::span<const uint8_t> bytes;
  uint32_t holders = 0;

  bool contains(std::span<const uint8_t> part) const {
    const std::less_equal<const uint8_t*> before;
    return before(bytes.data(), part.data()) &&
           before(part.data() + part.size(), bytes.data() + bytes.size());
  }
};

}  // namespace gradwire
