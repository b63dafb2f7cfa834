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
// empty. Before each header lies room for a tag, which no span counts and the driver may send.
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
  bool tagged = false;
  std::array<Span, 2 * kMaxSegments> spans;
  alignas(8) std::array<std::array<uint8_t, wire::kTagBytes + 32>, kMaxSegments> headers;
  std::vector<uint8_t> control;  // memory of control payloads

  // Its packets belong to an op; they are no ACK, ping or farewell.
  bool of_op() const {
    return wire::is_reliable(
        static_cast<wire::Kind>(static_cast<const uint8_t*>(spans[0].data)[1]));
  }
  // The header that the next datagram may have.
  uint8_t* next_header() { return headers[count].data() + wire::kTagBytes; }
};

}  // namespace gradwire
