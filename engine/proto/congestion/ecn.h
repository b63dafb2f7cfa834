// Explicit congestion notification of one path (RFC 3168; counts and validation as RFC 9000,
// section 13.4). Each end counts what came in, and echoes it in its ACKs.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gradwire {

// The two bits below a DSCP (RFC 3168, section 5).
inline constexpr uint8_t kNotEct = 0;
inline constexpr uint8_t kEct0 = 2;
inline constexpr uint8_t kCe = 3;

// Of the packets of a path that came here, each once: what its ACKs say. The counts wrap, but
// not between two ACKs: no window holds so many packets.
struct EcnSeen {
  uint32_t ect0 = 0;
  uint32_t ce = 0;
  bool marked = false;  // the last one

  // True when the peer should hear at once: marks have begun, or ended.
  bool add(uint8_t ecn) {
    ect0 += ecn == kEct0;
    ce += ecn == kCe;
    const bool news = marked != (ecn == kCe);
    marked = ecn == kCe;
    return news;
  }
};

// Whether a path carries ECT(0), and which of what went over it was marked.
class EcnPath {
 public:
  // After so many probe time-outs in a row before anything that was ECT has been acknowledged,
  // packets go Not-ECT; if one of those is acknowledged first, the path is taken for one that drops
  // ECT packets (RFC 9000, section 13.4.2.1). The second half is ours: a peer that stalls lets the
  // same time-outs pass, but then acknowledges all.
  static constexpr uint32_t kTries = 3;

  // Whether the next packet goes as ECT(0).
  bool capable() const { return !failed_ && !doubted_; }
  bool failed() const { return failed_; }
  void off() { failed_ = true; }
  void sent() { ++sent_; }
  // Of a packet, the first time that it is acknowledged; `ect`: it was sent as ECT(0).
  void acked(bool ect) {
    acked_ += ect;
    not_ect_acked_ |= !ect;
    if (ect) doubted_ = false;
  }
  void timed_out(uint32_t in_a_row) {
    if (sent_ > 0 && acked_ == 0 && in_a_row >= kTries) doubted_ = true;
  }
  // The counts of an ACK, after `acked` for all that it acknowledges. True when marks have come.
  // Totals are compared and not, as in the RFC, what one ACK adds: an ACK here says nothing of
  // packets long before its largest, so that what it counts may be acknowledged by a later one.
  bool told(uint32_t ect0, uint32_t ce) {
    if (failed_) return false;
    // An ACK that was overtaken has lower counts.
    const auto more = static_cast<int32_t>(ect0 - ect0_);
    const auto more_marked = static_cast<int32_t>(ce - ce_);
    if (more >= 0 && more_marked >= 0) {
      ect0_ = ect0;
      ce_ = ce;
      counted_ += static_cast<uint64_t>(more) + static_cast<uint64_t>(more_marked);
    }
    // Cleared or changed on the way, or said of packets that there never were; or dropped.
    failed_ = counted_ < acked_ || counted_ > sent_ || (doubted_ && not_ect_acked_);
    return !failed_ && more >= 0 && more_marked > 0;
  }

 private:
  uint64_t sent_ = 0;
  uint64_t acked_ = 0;
  uint64_t counted_ = 0;
  uint32_t ect0_ = 0;
  uint32_t ce_ = 0;
  bool doubted_ = false;
  bool not_ect_acked_ = false;
  bool failed_ = false;
};

}  // namespace gradwire
