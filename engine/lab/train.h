// A frame from a TAP device is one packet, or a train that segmentation offload keeps whole. A
// virtio-net header before it tells these apart (Virtual I/O Device spec 1.2, section 5.1.6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gradwire::lab {

// Bytes of that header.
inline constexpr size_t kVnetHeaderBytes = 10;

// Shape is a frame's packets, and their bytes on the wire with Ethernet headers.
struct Shape {
  uint32_t packets = 1;
  uint32_t wire_bytes = 0;
};

// `headed`: a virtio-net header precedes the frame.
Shape shape_of(std::span<const uint8_t> frame, bool headed);

// Cuts `count` packets from a headed train, from number `first` on, as the network stack would have
// sent them; count >= 1, first + count <= shape_of(frame).packets.
std::vector<uint8_t> cut(std::span<const uint8_t> frame, uint32_t first, uint32_t count);

// Marks a frame CE if it is ECT(0) or ECT(1) (RFC 3168 §5), IPv4 or IPv6; a train with all its
// packets. False when it is Not-ECT. A frame that has CE keeps it.
bool mark_congestion(std::span<uint8_t> frame, bool headed);

}  // namespace gradwire::lab
