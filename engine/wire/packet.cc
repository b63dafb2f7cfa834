#include "wire/packet.h"

#include <algorithm>

namespace gradwire::wire {

size_t write_ack(uint8_t* at, const Common& common, const Ack& ack) {
  uint8_t* const start = at;
  write_common(at, common);
  at += kCommonBytes;
  at = put(at, ack.largest);
  at = put(at, ack.refused);
  at = put(at, ack.credit);
  at = put(at, ack.delay_us);
  at = put(at, ack.queue_us);
  at = put(at, ack.share);
  at = put(at, ack.words);
  at = put(at, ack.room);
  at = put(at, ack.loss);
  at = put(at, ack.ect0);
  at = put(at, ack.ce);
  std::memcpy(at, ack.bitmap, ack.words * sizeof(uint64_t));
  return static_cast<size_t>(at - start) + ack.words * sizeof(uint64_t);
}

bool read_ack(std::span<const uint8_t> datagram, Ack& ack) {
  if (datagram.size() < kAckFixedBytes) return false;
  Reader reader(datagram.subspan(kCommonBytes));
  ack.largest = reader.get<uint32_t>();
  ack.refused = reader.get<uint32_t>();
  ack.credit = reader.get<uint32_t>();
  ack.delay_us = reader.get<uint32_t>();
  ack.queue_us = reader.get<uint32_t>();
  ack.share = reader.get<uint32_t>();
  ack.words = reader.get<uint8_t>();
  ack.room = reader.get<uint8_t>();
  ack.loss = reader.get<uint16_t>();
  ack.ect0 = reader.get<uint32_t>();
  ack.ce = reader.get<uint32_t>();
  if (ack.words > kAckMaxWords || std::max(ack.delay_us, ack.queue_us) > kAckMostUs) return false;
  auto bits = reader.take(ack.words * sizeof(uint64_t));
  if (!reader.ok()) return false;
  std::memcpy(ack.bitmap, bits.data(), bits.size());
  return true;
}

uint8_t* write_bye(uint8_t* at, const Common& common, const Bye& bye) {
  write_common(at, common);
  at = put(at + kCommonBytes, static_cast<uint8_t>(bye.leaves));
  at = put(at, static_cast<uint8_t>(bye.heard));
  return put(put(at, bye.lanes), bye.first);
}

std::optional<Bye> read_bye(std::span<const uint8_t> datagram) {
  if (datagram.size() < kByeBytes) return std::nullopt;
  Reader reader(datagram.subspan(kCommonBytes));
  const bool leaves = reader.get<uint8_t>() != 0;
  const bool heard = reader.get<uint8_t>() != 0;
  const auto lanes = reader.get<uint16_t>();
  const auto first = reader.get<uint16_t>();
  const std::span<const uint8_t> numbers = reader.rest();
  const bool whole = numbers.size() % sizeof(uint32_t) == 0;
  if (!whole || first + numbers.size() / sizeof(uint32_t) > lanes) return std::nullopt;
  return Bye{leaves, heard, lanes, first, numbers};
}

void write_ping(uint8_t* at, const Common& common, const Ping& ping) {
  write_common(at, common);
  put(at + kCommonBytes, ping.stamp | uint64_t{ping.begun} << kStampBits);
}

std::optional<Ping> read_ping(std::span<const uint8_t> datagram) {
  if (datagram.size() < kPingBytes) return std::nullopt;
  Reader reader(datagram.subspan(kCommonBytes));
  const auto both = reader.get<uint64_t>();
  return Ping{both & ((uint64_t{1} << kStampBits) - 1), static_cast<uint32_t>(both >> kStampBits)};
}

void write_fragment(uint8_t* at, const Common& common, const Fragment& fragment) {
  write_common(at, common);
  at = put(at + kCommonBytes, fragment.number);
  at = put(at, fragment.total);
  at = put(at, fragment.index);
  put(at, fragment.count);
}

std::optional<Fragment> read_fragment(std::span<const uint8_t> datagram) {
  if (datagram.size() <= kFragmentBytes) return std::nullopt;
  Reader reader(datagram.subspan(kCommonBytes));
  const auto number = reader.get<uint32_t>();
  const auto total = reader.get<uint16_t>();
  const auto index = reader.get<uint8_t>();
  const auto count = reader.get<uint8_t>();
  if (count == 0) return std::nullopt;
  return Fragment{number, total, index, count};
}

void write_pass(uint8_t* at, const Pass& pass) {
  put(put(at, pass.way), pass.number);
}

std::optional<Pass> read_pass(std::span<const uint8_t> payload) {
  Reader reader(payload);
  const auto way = reader.get<uint32_t>();
  const auto number = reader.get<uint32_t>();
  if (!reader.ok() || way > 1) return std::nullopt;
  return Pass{static_cast<Way>(way), number};
}

}  // namespace gradwire::wire
