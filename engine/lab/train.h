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

// Marks a frame "congestion experienced" if it may be (RFC 3168, section 5): ECT(0) or ECT(1), IPv4
// or IPv6; of a train, all packets. False if it may not; one that is marked already stays so.
bool mark_congestion(std::span<uint8_t> frame, bool headed);

}  // namespace gradwire::lab
