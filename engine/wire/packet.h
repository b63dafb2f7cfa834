// Packet formats: every field little-endian, every length checked by the reader.
//
// A datagram is one packet. All packets start with the common header (8 bytes):
//   u8 version | u8 kind | u16 source endpoint | u32 session
// On its way between authenticated endpoints it has a number in place of the session, and a tag
// behind (seal/seal.h).
// Reliable packets (kind < ack) carry 20 bytes more and have a packet number of their own:
//   u32 packet number | u32 send time, us | u32 op | u32 chunk or part | u16 backlog | u16 flags
// Packet numbers and ids of ops have 64 bits and travel as their low 32 bits (RFC 9000,
// appendix A).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

namespace gradwire::wire {

// The protocol version. Every change of a packet's format or meaning raises it.
inline constexpr uint8_t kVersion = 12;
inline constexpr size_t kCommonBytes = 8;
inline constexpr size_t kHeaderBytes = 28;
inline constexpr size_t kNumberAt = 4;
inline constexpr size_t kTagBytes = 16;
// Bytes: the smallest datagram size that a job or a path may have, without a tag.
inline constexpr size_t kMinDatagram = 256;
// Bytes: the UDP payload of a jumbo frame (MTU 9,000 less 28 of IPv4 and UDP).
inline constexpr size_t kMaxDatagram = 8972;

enum class Kind : uint8_t {
  push = 1,     // worker -> aggregator: one chunk of a worker's values
  pull = 2,     // aggregator -> worker: one chunk of a result
  open = 3,     // worker -> aggregator: the plan's hash, votes, statistics, critical chunks
  forgive = 4,  // worker -> aggregator: chunks given up within the ledger's room
  stop = 5,     // aggregator -> worker: closed regions; in passes, receiver -> sender: all is here
  close = 6,    // aggregator -> worker: the exact mask, after all chunks are decided
  fold = 7,     // aggregator 0 -> worker: the folded statistics
  commit = 8,   // aggregator -> worker: the results that all workers apply
  enough = 9,   // worker -> aggregator: it needs no more results (pull lossy)
  probe = 10,   // sender -> receiver: a pass has been sent (control probe)
  bitmap = 11,  // receiver -> sender: the chunks missing after it
  ack = 16,
  ping = 17,
  pong = 18,
  error = 19,
  bye = 20,
  fragment = 21,  // a part of a datagram that is longer than its path carries
};

inline bool is_reliable(Kind kind) {
  return kind < Kind::ack;
}

struct Common {
  uint8_t version;
  Kind kind;
  uint16_t source;
  uint32_t session;
};

// Pass is what PROBE, BITMAP and STOP of passes begin with: the direction of the chunks and the
// pass. Two endpoints that aggregate for each other have passes in both directions.
inline constexpr size_t kPassBytes = 8;
enum class Way : uint32_t { push = 0, pull = 1 };
struct Pass {
  Way way;
  uint32_t number;  // from 1 on
};

// BYE is repeated until it is acknowledged, by a peer that stays or leaves. One with `heard` set is
// an acknowledgement, and needs none itself. Where a datagram has no room for all lanes, several
// follow each other.
inline constexpr size_t kByeBytes = kCommonBytes + 6;
struct Bye {
  bool leaves;     // the sender leaves; else it only acknowledges
  bool heard;      // acknowledges the receiver's BYE
  uint16_t lanes;  // that the sender has
  uint16_t first;  // the lane of the first number
  // By lane: the sender's ops of lower numbers are complete (the low 32 bits).
  std::span<const uint8_t> numbers;
};

// PING asks for a PONG with the same stamp. Any number of bytes may follow. The first two are the
// longest datagram that the path carries, if that is less than agreed at the start, else 0.
inline constexpr size_t kPingBytes = kCommonBytes + 8;
inline constexpr size_t kLimitBytes = 2;
inline constexpr int kStampBits = 40;  // bits of nanoseconds: stamps repeat after 18 minutes
inline constexpr int kBegunBits = 64 - kStampBits;
struct Ping {
  uint64_t stamp;  // the sender's clock when the PING was sent: the low 40 bits
  uint32_t begun;  // ids of its lane below it have started at the sender: the low 24 bits
};
inline uint64_t stamp_of(int64_t time) {
  return static_cast<uint64_t>(time) & ((uint64_t{1} << kStampBits) - 1);
}

// FRAGMENT carries a part of a datagram; all its fragments have one number, and one length but for
// the last, which may be shorter.
inline constexpr size_t kFragmentBytes = kCommonBytes + 8;
struct Fragment {
  uint32_t number;
  uint16_t total;  // bytes of the datagram
  uint8_t index;
  uint8_t count;  // fragments of the datagram

  uint32_t each() const { return (total + count - 1u) / count; }  // bytes
  uint32_t offset() const { return index * each(); }
};

// Flags of a reliable packet's header.
inline constexpr uint16_t kTail = 1;         // less than 1 % of this push follows
inline constexpr uint16_t kOutOfCredit = 2;  // the last credit was used and more packets wait
inline constexpr uint16_t kClassShift = 8;   // bits 8 to 10 of a push: the chunk's priority class

inline uint8_t priority_class(uint16_t flags) {
  return static_cast<uint8_t>(flags >> kClassShift & 7);
}

struct Header {
  Common common;
  uint32_t packet_number;
  uint32_t send_time_us;
  uint32_t op;
  uint32_t chunk;    // chunk id of push and pull; part index of a message
  uint16_t backlog;  // packets that the sender still has for this endpoint
  uint16_t flags;
};

// Ack acknowledges the packets largest, largest - 1, … by a bitmap (bit 0 = largest).
inline constexpr size_t kAckFixedBytes = kCommonBytes + 36;
// Words of the bitmap at most: 8,192 packets.
inline constexpr size_t kAckMaxWords = 128;
// Microseconds of an ACK's delay and queue at most: a correct peer reports no longer ones.
inline constexpr uint32_t kAckMostUs = 1'000'000;
struct Ack {
  uint32_t largest;
  uint32_t refused;   // the highest number that found no room; 0: none
  uint32_t credit;    // the highest packet number that may be sent
  uint32_t delay_us;  // from the arrival of `largest` to this ACK
  uint32_t queue_us;  // queueing delay of this path, above its minimum
  // Bytes of the receiver's window for this path. With kTurns its senders take turns, and these are
  // the bytes of a turn that may go in one delay target.
  uint32_t share;
  static constexpr uint32_t kTurns = 1u << 31;
  uint8_t words;  // words of the bitmap
  uint8_t room;   // share of the wanted queue that this port has shown to bear, of 255
  uint16_t loss;  // share of packets lost on the way here, of 65,536
  uint32_t ect0;  // packets that arrived with ECT(0) and with CE: the low 32 bits of the counts
  uint32_t ce;
  uint64_t bitmap[kAckMaxWords];
};

// Reader reads little-endian values and never beyond its span. A failed read makes ok() false for
// good.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  T get() {
    T value{};
    if (bytes_.size() - at_ < sizeof(T)) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  std::span<const uint8_t> rest() const { return bytes_.subspan(at_); }
  std::span<const uint8_t> take(size_t count) {
    if (bytes_.size() - at_ < count) {
      ok_ = false;
      return {};
    }
    auto taken = bytes_.subspan(at_, count);
    at_ += count;
    return taken;
  }
  bool ok() const { return ok_; }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

template <class T>
uint8_t* put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof(T));
  return at + sizeof(T);
}

// Common and Header lie in memory as they travel.
static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");
static_assert(sizeof(Common) == kCommonBytes && sizeof(Header) == kHeaderBytes);

inline void write_common(uint8_t* at, const Common& common) {
  put(at, common);
}
inline void write_header(uint8_t* at, const Header& header) {
  put(at, header);
}
size_t write_ack(uint8_t* at, const Common& common, const Ack& ack);

inline std::optional<Common> read_common(std::span<const uint8_t> datagram) {
  Reader reader(datagram);
  const auto common = reader.get<Common>();
  return reader.ok() ? std::optional(common) : std::nullopt;
}
inline std::optional<Header> read_header(std::span<const uint8_t> datagram) {
  // Right into the result: a second copy of what was just written waits for all writes before it.
  std::optional<Header> header;
  if (datagram.size() >= kHeaderBytes)
    std::memcpy(&header.emplace(), datagram.data(), kHeaderBytes);
  return header;
}
// Fills an ACK in place, because it is large; false when it is malformed.
bool read_ack(std::span<const uint8_t> datagram, Ack& ack);
// Writes all but the numbers; returns where they begin.
uint8_t* write_bye(uint8_t* at, const Common& common, const Bye& bye);
std::optional<Bye> read_bye(std::span<const uint8_t> datagram);
void write_ping(uint8_t* at, const Common& common, const Ping& ping);
std::optional<Ping> read_ping(std::span<const uint8_t> datagram);
void write_fragment(uint8_t* at, const Common& common, const Fragment& fragment);
std::optional<Fragment> read_fragment(std::span<const uint8_t> datagram);
void write_pass(uint8_t* at, const Pass& pass);
std::optional<Pass> read_pass(std::span<const uint8_t> payload);

// The 64-bit number nearest to `near` whose low `bits` bits are `low` (RFC 9000, appendix A.3).
inline uint64_t expand(uint32_t low, uint64_t near, int bits = 32) {
  const uint64_t span = uint64_t{1} << bits;
  const uint64_t base = (near & ~(span - 1)) | low;
  if (base + span / 2 < near) return base + span;
  if (base > near + span / 2 && base >= span) return base - span;
  return base;
}

}  // namespace gradwire::wire
