// Acknowledger decides when one path gets an ACK, and what the ACK acknowledges.
//
// Call seen() and doubtful() for each reliable packet, arrived() and record() for runs of those
// that are new and plausible, and hurry() where the peer should learn something at once. When
// due(), write the ACK with fill() and call sent().
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"
#include "proto/recovery/received_packets.h"
#include "proto/recovery/rtt.h"
#include "wire/packet.h"

namespace gradwire {

class Acknowledger {
 public:
  uint64_t largest() const { return received_.largest(); }
  bool seen(uint64_t number) const { return received_.seen(number); }
  // True for a number far above all that have arrived and that were `granted`, unless one near it
  // came before. A peer whose packets were lost for long has used many numbers, and goes on with
  // the next ones. A single such number is damaged or forged: as the largest one it would make all
  // genuine numbers old.
  bool doubtful(uint64_t number, uint64_t granted) {
    if (number <= std::max(largest(), granted) + kAhead) return false;
    const uint64_t apart = std::max(number, doubted_) - std::min(number, doubted_);
    doubted_ = number;
    return apart == 0 || apart > kAhead;
  }
  // Counts packets that have arrived, with the queueing delay that the ACK reports.
  void arrived(Nanos queue, uint64_t packets, uint64_t bytes, Nanos now) {
    if (unacked_ == 0) due_ = now + kDelay;
    unacked_ += packets;
    delay_ += static_cast<double>(queue) * static_cast<double>(bytes);
    bytes_ += bytes;
  }
  // Records new packets with consecutive numbers; true when packets are missing before them.
  // Refused packets are not acknowledged, but the highest number of them is reported.
  bool record(uint64_t first, uint64_t packets, bool refused, Nanos arrival) {
    const uint64_t last = first + packets - 1;
    if (refused) refused_ = std::max(refused_, last);
    if (last > largest()) largest_arrival_ = arrival;
    const bool gap = received_.insert(first, last, refused);
    if (gap) hurry();
    return gap;
  }
  // The ACK goes at once.
  void hurry() { now_ = true; }
  // The ACK goes once so many packets have arrived since the last one.
  void after(uint32_t packets) {
    if (unacked_ >= std::max(packets, 1U)) hurry();
  }
  // Under heavy loss ACKs are lost too, so the last one goes again for two rounds, each time after
  // `apart`.
  void repeat(Nanos apart, Nanos round, Nanos now) {
    if (since_arrival(now) < kRepeatRounds * round) at(now + apart);
  }
  Nanos next_timer() const { return now_ ? 0 : due_; }
  Nanos since_arrival(Nanos now) const { return now - largest_arrival_; }

  // True when an ACK is due. On a long path ACKs are spaced: frequent gaps would cause one per
  // packet, and report nothing sooner.
  bool due(Nanos rtprop, Nanos now) {
    if (now_) {
      const Nanos next = profile_of(rtprop).spaces_acks ? last_ + kDelay : 0;
      if (now < next) {
        now_ = false;
        at(next);
      }
    }
    return now_ || due_ <= now;
  }
  // Fills in what has arrived. The bitmap covers the last `span` packets twice, or what arrived
  // since the last ACK: a batch may hold hundreds. `most_words`: its longest length.
  void fill(wire::Ack& ack, uint64_t span, uint64_t most_words, Nanos now) {
    ack.largest = static_cast<uint32_t>(largest());
    ack.refused = static_cast<uint32_t>(refused_);
    ack.delay_us = static_cast<uint32_t>(
        std::clamp<Nanos>(since_arrival(now) / kMicrosecond, 0, wire::kAckMostUs));
    const double queue = bytes_ == 0 ? 0.0 : delay_ / static_cast<double>(bytes_) / kMicrosecond;
    ack.queue_us = static_cast<uint32_t>(std::clamp(queue, 0.0, 1.0 * wire::kAckMostUs));
    const uint64_t covered = 2 * std::max(span, largest() - reported_);
    const uint64_t words = covered / 64;
    received_.fill(ack, static_cast<uint16_t>(std::clamp<uint64_t>(words, 2, most_words)));
  }
  void sent(Nanos now) {
    last_ = now;
    reported_ = largest();
    now_ = false;
    due_ = kNever;
    unacked_ = 0;
    delay_ = 0;
    bytes_ = 0;
  }

 private:
  // The ACK goes at this time at the latest.
  void at(Nanos time) { due_ = std::min(due_, time); }

  // Rounds for which the last ACK goes again: its copies then outlast the sender's own repeats.
  static constexpr Nanos kRepeatRounds = 2;
  // The longest delay of an ACK, and the least time between two on a long path; Rtt::kMaxAckDelay
  // is above it.
  static constexpr Nanos kDelay = 800 * kMicrosecond;
  // Packets that a peer may send beyond its credit, in probes and control frames, while none of
  // them arrives.
  static constexpr uint64_t kAhead = 256;
  ReceivedPackets received_;
  uint64_t doubted_ = 0;   // the latest number that was far ahead
  uint64_t refused_ = 0;   // highest packet number refused here
  uint64_t reported_ = 0;  // largest number in the last ACK
  uint64_t unacked_ = 0;   // packets since the last ACK
  bool now_ = false;
  Nanos due_ = kNever;
  Nanos last_ = 0;
  Nanos largest_arrival_ = 0;
  double delay_ = 0;    // queueing delay times bytes, since the last ACK
  uint64_t bytes_ = 0;  // since the last ACK
};

}  // namespace gradwire
