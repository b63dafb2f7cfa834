// What a frame from a TAP device is on the wire: one packet, or a train that segmentation offload
// keeps whole, with the virtio-net header that says so before it (Virtual I/O Device spec 1.2,
// section 5.1.6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gradwire::lab {

inline constexpr size_t kVnetHeaderBytes = 10;

// `wire_bytes`: of all packets, Ethernet headers counted.
struct Shape {
  uint32_t packets = 1;
  uint32_t wire_bytes = 0;
};

// `headed`: whether a virtio-net header goes before the frame.
Shape shape_of(std::span<const uint8_t> frame, bool headed);

// A train of `count` of the packets of a headed train, from number `first` on, as the network stack
// would have sent it; count >= 1, first + count <= shape_of(frame).packets.
std::vector<uint8_t> cut(std::span<const uint8_t> frame, uint32_t first, uint32_t count);

}  // namespace gradwire::lab
