// Trains of segmentation offload: their packets, and parts of them.
#include "lab/train.h"

#include <algorithm>
#include <cstring>

namespace gradwire::lab {
namespace {

// The virtio-net header, in the host's byte order (the device's default, "legacy").
struct VnetHeader {
  uint8_t flags;
  uint8_t type;
  uint16_t header_bytes;
  uint16_t segment_bytes;
  uint16_t checksum_start;
  uint16_t checksum_offset;
};
static_assert(sizeof(VnetHeader) == kVnetHeaderBytes);

// Types of the virtio-net header: the segmentation to do.
constexpr uint8_t kTypeNone = 0;
constexpr uint8_t kTypeTcp4 = 1;
constexpr uint8_t kTypeTcp6 = 4;
constexpr uint8_t kTypeUdp = 5;  // UDP_L4: datagrams of one size
constexpr uint8_t kTypeEcn = 0x80;

// Ethernet, IP, UDP and TCP: types, header sizes in bytes, flags.
constexpr size_t kEthernetBytes = 14;
constexpr uint16_t kIpv4 = 0x0800;
constexpr uint16_t kIpv6 = 0x86dd;
constexpr size_t kIpv4Bytes = 20;
constexpr size_t kIpv6Bytes = 40;
constexpr size_t kUdpBytes = 8;
constexpr size_t kTcpBytes = 20;  // without options
constexpr uint8_t kFin = 0x01;
constexpr uint8_t kPush = 0x08;
constexpr uint8_t kCwr = 0x80;
constexpr uint8_t kCe = 0x03;  // both bits of the ECN field (RFC 3168)
constexpr uint8_t kProtocolTcp = 6;
constexpr uint8_t kProtocolUdp = 17;

uint16_t get16(const uint8_t* at) {
  return static_cast<uint16_t>(at[0] << 8 | at[1]);
}
void put16(uint8_t* at, size_t value) {
  at[0] = static_cast<uint8_t>(value >> 8);
  at[1] = static_cast<uint8_t>(value);
}
uint32_t get32(const uint8_t* at) {
  return uint32_t{get16(at)} << 16 | get16(at + 2);
}
void put32(uint8_t* at, uint32_t value) {
  put16(at, value >> 16);
  put16(at + 2, value & 0xffff);
}

uint32_t add(uint32_t sum, const uint8_t* data, size_t bytes) {
  for (size_t i = 0; i + 1 < bytes; i += 2) sum += get16(data + i);
  return sum;
}
uint16_t fold(uint32_t sum) {
  while (sum > 0xffff) sum = (sum >> 16) + (sum & 0xffff);
  return static_cast<uint16_t>(sum);
}

// Layout is where the parts of a train are; headers == 0: the frame is no train.
struct Layout {
  VnetHeader vnet{};
  bool tcp = false;
  size_t transport = 0;  // offset of the TCP or UDP header after the virtio-net header
  size_t headers = 0;    // bytes before the payload
  size_t segment = 0;    // payload bytes of each packet but the last
  size_t payload = 0;

  uint32_t packets() const { return static_cast<uint32_t>((payload + segment - 1) / segment); }
};

// `frame`: the bytes after the virtio-net header.
Layout layout_of(const VnetHeader& vnet, std::span<const uint8_t> frame) {
  Layout out;
  out.vnet = vnet;
  const uint8_t type = vnet.type & static_cast<uint8_t>(~kTypeEcn);
  out.tcp = type == kTypeTcp4 || type == kTypeTcp6;
  if ((!out.tcp && type != kTypeUdp) || vnet.segment_bytes == 0) return out;
  if (frame.size() < kEthernetBytes + kIpv4Bytes) return out;
  const uint16_t protocol = get16(frame.data() + 12);
  if (protocol != kIpv4 && protocol != kIpv6) return out;
  const size_t ip = protocol == kIpv6 ? kIpv6Bytes : size_t{frame[kEthernetBytes] & 0x0fu} * 4;
  out.transport = vnet.checksum_start;
  if (ip < kIpv4Bytes || out.transport < kEthernetBytes + ip) return out;
  size_t bytes = kUdpBytes;
  if (out.tcp) {
    if (frame.size() < out.transport + kTcpBytes) return out;
    bytes = std::max(kTcpBytes, size_t{frame[out.transport + 12]} / 16 * 4);
  }
  const size_t headers = out.transport + bytes;
  if (headers >= frame.size() || size_t{vnet.checksum_offset} + 2 > bytes) return out;
  out.headers = headers;
  out.segment = vnet.segment_bytes;
  out.payload = frame.size() - headers;
  return out;
}

VnetHeader vnet_of(std::span<const uint8_t> frame) {
  VnetHeader vnet{};
  std::memcpy(&vnet, frame.data(), sizeof(vnet));
  return vnet;
}

// The sum over the pseudo-header, which the kernel leaves in place of the checksum (RFC 793, RFC
// 8200 §8.1). `ip`: the IP header; `bytes`: of the transport header and its payload.
uint16_t pseudo_sum(const uint8_t* ip, bool version6, bool tcp, size_t bytes) {
  const uint32_t addresses = version6 ? add(0, ip + 8, 32) : add(0, ip + 12, 8);
  return fold(addresses + static_cast<uint32_t>(bytes) + (tcp ? kProtocolTcp : kProtocolUdp));
}

}  // namespace

Shape shape_of(std::span<const uint8_t> frame, bool headed) {
  if (!headed) return {1, static_cast<uint32_t>(frame.size())};
  if (frame.size() < kVnetHeaderBytes) return {1, 0};
  const auto proper = frame.subspan(kVnetHeaderBytes);
  const auto bytes = static_cast<uint32_t>(proper.size());
  const Layout layout = layout_of(vnet_of(frame), proper);
  if (layout.headers == 0) return {1, bytes};
  const uint32_t packets = layout.packets();
  return {packets, bytes + (packets - 1) * static_cast<uint32_t>(layout.headers)};
}

std::vector<uint8_t> cut(std::span<const uint8_t> frame, uint32_t first, uint32_t count) {
  const auto whole = frame.subspan(kVnetHeaderBytes);
  Layout layout = layout_of(vnet_of(frame), whole);
  const size_t begin = first * layout.segment;
  const size_t bytes = std::min(count * layout.segment, layout.payload - begin);
  const bool last = begin + bytes == layout.payload;

  std::vector<uint8_t> out(kVnetHeaderBytes + layout.headers + bytes);
  uint8_t* const part = out.data() + kVnetHeaderBytes;
  std::memcpy(part, whole.data(), layout.headers);
  std::memcpy(part + layout.headers, whole.data() + layout.headers + begin, bytes);

  uint8_t* const ip = part + kEthernetBytes;
  uint8_t* const transport = part + layout.transport;
  const size_t transport_bytes = layout.headers - layout.transport + bytes;
  const bool version6 = get16(part + 12) == kIpv6;
  if (version6) {
    put16(ip + 4, layout.headers + bytes - kEthernetBytes - kIpv6Bytes);
  } else {
    put16(ip + 2, layout.headers + bytes - kEthernetBytes);
    put16(ip + 4, (get16(ip + 4) + first) & 0xffff);  // packets of a train have consecutive numbers
    put16(ip + 10, 0);
    put16(ip + 10, static_cast<uint16_t>(~fold(add(0, ip, size_t{ip[0] & 0x0fu} * 4))));
  }
  if (layout.tcp) {
    put32(transport + 4, get32(transport + 4) + static_cast<uint32_t>(begin));
    if (!last) transport[13] &= static_cast<uint8_t>(~(kFin | kPush));
    if (first > 0) transport[13] &= static_cast<uint8_t>(~kCwr);
  } else {
    put16(transport + 4, transport_bytes);
  }
  put16(transport + layout.vnet.checksum_offset,
        pseudo_sum(ip, version6, layout.tcp, transport_bytes));

  if (bytes <= layout.segment) {
    layout.vnet.type = kTypeNone;
    layout.vnet.segment_bytes = 0;
  }
  layout.vnet.header_bytes = static_cast<uint16_t>(layout.headers);
  std::memcpy(out.data(), &layout.vnet, sizeof(layout.vnet));
  return out;
}

bool mark_congestion(std::span<uint8_t> frame, bool headed) {
  const size_t skipped = (headed ? kVnetHeaderBytes : 0) + kEthernetBytes;
  if (frame.size() < skipped + kIpv4Bytes) return false;
  uint8_t* const ip = frame.data() + skipped;
  const uint16_t protocol = get16(ip - 2);
  if (protocol == kIpv4) {
    const size_t bytes = size_t{ip[0] & 0x0fu} * 4;
    if ((ip[1] & kCe) == 0 || bytes < kIpv4Bytes || frame.size() < skipped + bytes) return false;
    ip[1] |= kCe;
    put16(ip + 10, 0);
    put16(ip + 10, static_cast<uint16_t>(~fold(add(0, ip, bytes))));
    return true;
  }
  // The ECN field ends the traffic class, which straddles the first two bytes.
  if (protocol != kIpv6 || (ip[1] >> 4 & kCe) == 0) return false;
  ip[1] |= kCe << 4;
  return true;
}

}  // namespace gradwire::lab
