// EcnSeen and EcnPath implement explicit congestion notification of one path (RFC 3168; counts and
// validation as in RFC 9000 §13.4). Each end counts the codepoints of arriving packets and echoes
// the counts in its ACKs.
#pragma once

#include <cstdint>

#include "proto/base/train.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// Codepoints of the two bits below the DSCP (RFC 3168 §5).
enum EcnCodepoint : uint8_t { kNotEct = 0, kEct0 = 2, kCe = 3 };

// EcnSeen counts the packets that arrived on a path, each once, for its ACKs. The counts wrap, but
// not between two ACKs: no window holds that many packets.
struct EcnSeen {
  uint32_t ect0 = 0;
  uint32_t ce = 0;
  bool marked = false;  // the last packet had CE

  // Counts packets; true when marking begins or ends, which the peer should learn at once.
  bool add(uint8_t ecn, uint64_t packets) {
    if (ecn == kEct0) ect0 += static_cast<uint32_t>(packets);
    if (ecn == kCe) ce += static_cast<uint32_t>(packets);
    const bool news = marked != (ecn == kCe);
    marked = ecn == kCe;
    return news;
  }
};

// EcnPath decides whether a path carries ECT(0), and finds which packets sent were marked.
class EcnPath {
 public:
  // True when the next packet goes as ECT(0).
  bool capable() const { return !failed_ && !doubted_; }
  bool failed() const { return failed_; }
  void off() { failed_ = true; }
  void sent(uint32_t count = 1) { sent_ += count; }
  // Counts packets on their first acknowledgement; `ect`: they were sent as ECT(0).
  void acked(bool ect, uint64_t packets = 1) {
    acked_ += ect ? packets : 0;
    not_ect_acked_ |= !ect;
    if (ect) doubted_ = false;
  }
  // Packets go Not-ECT after some probe time-outs in a row in which no ECT packet has ever been
  // acknowledged. If then a Not-ECT packet is acknowledged first, the path drops ECT packets (RFC
  // 9000 §13.4.2.1). The second condition is our own: a peer that stalls causes the same time-outs,
  // but acknowledges everything later.
  void timed_out(uint32_t in_a_row) {
    if (sent_ > 0 && acked_ == 0 && in_a_row >= kInARow) doubted_ = true;
  }
  // Counts an ECT packet that goes again. Under heavy loss repeats come before any time-out; as
  // many as a long train are not all lost by chance.
  void given_up() {
    if (acked_ == 0 && ++given_up_ >= Train::kMaxSegments) doubted_ = true;
  }
  // Validates the counts of an ACK; call it after acked() for all packets of that ACK. True when
  // new marks are reported. Unlike in the RFC, totals are compared, not one ACK's increase: an ACK
  // here omits packets long before its largest, so a later ACK may acknowledge what this one
  // counts.
  bool told(uint32_t ect0, uint32_t ce) {
    if (failed_) return false;
    // A reordered ACK has lower counts.
    const auto more = static_cast<int32_t>(ect0 - ect0_);
    const auto more_marked = static_cast<int32_t>(ce - ce_);
    if (more >= 0 && more_marked >= 0) {
      ect0_ = ect0;
      ce_ = ce;
      counted_ += static_cast<uint64_t>(more) + static_cast<uint64_t>(more_marked);
    }
    // The path clears or changes the codepoint, the peer counts packets never sent, or ECT is
    // dropped.
    failed_ = counted_ < acked_ || counted_ > sent_ || (doubted_ && not_ect_acked_);
    return !failed_ && more >= 0 && more_marked > 0;
  }

 private:
  uint64_t sent_ = 0;
  uint64_t acked_ = 0;
  uint64_t counted_ = 0;
  uint32_t given_up_ = 0;
  uint32_t ect0_ = 0;
  uint32_t ce_ = 0;
  // ECT packets may be dropped: none has been acknowledged.
  bool doubted_ = false;
  bool not_ect_acked_ = false;
  bool failed_ = false;
};

// Ecn is both directions of one path.
struct Ecn {
  EcnPath sent;
  EcnSeen seen;
  bool failure_counted = false;
};

}  // namespace gradwire
