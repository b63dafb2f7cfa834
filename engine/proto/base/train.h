// Train is what an endpoint gives to its driver to send.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "wire/packet.h"

namespace gradwire {

// Train is a run of datagrams for one destination. All have `segment_bytes` but the last, which may
// be shorter. Header and payload of datagram i are spans[2 i] and spans[2 i + 1]; a payload may be
// empty. Headers lie in the train's own memory. The driver may append tags, which no length counts.
struct Train {
  // Datagrams of a train: UDP_SEGMENT takes at most 64 in one call.
  static constexpr size_t kMaxSegments = 64;
  // Bytes of a train with its tags: one call takes less than 64 KiB.
  static constexpr size_t kMaxBytes = 65'500;
  struct Span {
    const void* data;
    size_t size;
  };
  uint16_t destination = 0;
  uint32_t count = 0;
  uint32_t segment_bytes = 0;
  uint32_t total_bytes = 0;
  uint8_t dscp = 0;
  uint8_t ecn = 0;     // the two bits below the DSCP
  bool whole = false;  // a ping that tests a length; never split into fragments
  uint32_t tag_bytes = 0;
  std::array<Span, 2 * kMaxSegments> spans;
  alignas(8) std::array<std::array<uint8_t, 32>, kMaxSegments> headers;
  std::array<std::array<uint8_t, wire::kTagBytes>, kMaxSegments> tags;
  std::vector<uint8_t> control;  // memory of control payloads
};

}  // namespace gradwire
