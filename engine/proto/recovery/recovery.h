// Recovery decides which packets of one path have arrived and which go again: by acknowledgements,
// reordering time (RFC 8985 §6.2) with a loss timer (RFC 9002 §6.1.2), probe time-outs (§6.2) and,
// under heavy loss, by repetition before an ACK can arrive.
//
// Call send() for packets, on_ack() for each ACK, detect_losses() after it and once
// loss_due() has come, on_timeout() once next_timeout() is due. What a packet carries is the
// caller's matter: it gets copies of the packets that are acknowledged or lost. on_ack() is the
// only one to sample the round-trip time, except for the caller's pings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/again.h"
#include "proto/base/time.h"
#include "proto/recovery/repetition.h"
#include "proto/recovery/rtt.h"
#include "proto/recovery/sent_packets.h"
#include "wire/packet.h"

namespace gradwire {

class Recovery {
 public:
  // Acked is what one ACK acknowledges for the first time, in descending order.
  struct Acked {
    // Packets that went together; `first` is the first that went.
    struct Run {
      SentPacket first;
      uint64_t packets;
    };
    std::vector<Run> runs;
    std::vector<uint32_t> items;  // theirs, one for each packet
    uint16_t longest = 0;         // of the packets that were not declared lost
    uint64_t bytes = 0;           // on the wire, of the packets that were not declared lost
    uint64_t in_flight = 0;       // bytes that leave flight
    uint32_t spurious = 0;        // packets that were sent again although they arrived
    void clear() {
      runs.clear();
      items.clear();
      bytes = in_flight = spurious = longest = 0;
    }
  };
  struct Lost {
    SentPacket packet;
    Again why;
  };

  Rtt rtt;
  Twins twins;  // the caller's: what goes several times at once

  // ---- packets in flight
  uint64_t next() const { return sent_.next(); }
  uint64_t lowest() const { return sent_.lowest(); }
  uint64_t in_flight() const { return sent_.in_flight(); }
  // Packets that may be sent before one of those in flight has left.
  uint64_t room() const { return sent_.room(); }
  bool full() const { return room() == 0; }
  // Adds the next packets, one for each item, whose other fields are those of `packet`. It gets the
  // number of the first.
  void send(SentPacket& packet, std::span<const uint32_t> items, Nanos now) {
    packet.number = sent_.next();
    packet.time = timer_base_ = now;
    sent_.push(packet, items);
    // Control frames need no credit, so they use up no probes.
    if (packet.data())
      probes_ -= static_cast<uint32_t>(std::min<uint64_t>(probes_, items.size()));
    else
      control_.push_back(packet.number);
    starved_ = false;
  }

  // ---- acknowledgements
  // False when the ACK acknowledges what was never sent; it then changes nothing.
  bool on_ack(const wire::Ack& ack, Nanos now, Acked& acked);
  // True when the peer sent none of the earlier ACKs after the last one: what that one says of the
  // peer's state is the latest known.
  bool latest() const { return latest_; }
  uint64_t largest_acked() const { return largest_acked_; }
  // Declares packets lost; call it after an ACK that acknowledged some, and at loss_due(). Appends
  // to `lost`.
  void detect_losses(Nanos now, std::vector<Lost>& lost);
  // When the oldest missing packet is lost unless it is acknowledged before; kNever when none is
  // missing.
  Nanos loss_due() const { return loss_due_; }
  Nanos largest_acked_sent() const { return largest_acked_sent_; }
  // True when the peer has lately reported packets for which it had no room.
  bool refused(Nanos now) const { return now - refused_time_ < rtt.probe_timeout(); }

  // ---- probe time-outs
  // True when an answer is due some time: packets are in flight, or credit is awaited.
  bool waiting() const { return in_flight() > 0 || starved_; }
  // The time of the next probe time-out. `heard`: the time of the last packet from the peer.
  Nanos next_timeout(Nanos heard, Nanos now) const;
  // Handles the time-out; false when none is due. `more`: the caller has new packets, which go in
  // place of old ones that need no recovery.
  bool on_timeout(Nanos heard, bool more, Nanos now, std::vector<Lost>& lost);
  uint32_t timeouts() const { return timeouts_; }
  // Nothing that was sent is acknowledged, and none of it was refused: what went again was lost,
  // too.
  bool unanswered() const { return timeouts_ > 1 && refused_ < lowest(); }
  // The packets that may go without credit and window, after a time-out.
  uint32_t probes() const { return probes_; }
  void end_probes() { probes_ = 0; }
  // There is something to send, and no credit for it. Credit that arrives ends this.
  void starve(Nanos now);
  void feed() { starved_ = false; }

  // ---- repetition
  // Sends packets again that are in flight for so long, the oldest first, and data as long as
  // `copies` last; each copy of data may go without credit and window. Returns when the next is
  // due.
  Nanos repeat(const Repeats& after, Copies& copies, Nanos now, std::vector<Lost>& lost);
  // Forgets which packets in flight are control frames.
  void forget_control() { control_.clear(); }
  // Gives up data in flight that the peer has refused, of ops that it is not known to have started.
  template <class Early>
  void give_up_refused(const Early& early, std::vector<Lost>& lost) {
    for (uint64_t n = sent_.lowest(); n <= refused_; n = sent_.after(n)) {
      const SentPacket& packet = sent_.train(n);
      if (packet.data() && early(packet.op)) give_up(n, Again::refused, lost);
    }
  }
  // Gives up the packets in flight that are longer than this.
  void give_up_longer(uint32_t bytes, std::vector<Lost>& lost);

 private:
  Nanos repeat_control(Nanos after, Nanos now, std::vector<Lost>& lost);
  Nanos repeat_data(Nanos after, Copies& copies, Nanos now, std::vector<Lost>& lost);
  void give_up(uint64_t number, Again why, std::vector<Lost>& lost);
  void acknowledge(uint64_t from, uint64_t bits, uint64_t before, Nanos now, Acked& acked);
  Nanos reordering_window() const;

  SentPackets sent_;
  std::vector<uint64_t> control_;  // numbers of control frames, in order; some are acknowledged
  // Of the latest ACK: the largest number, and how long before it had arrived.
  uint64_t reported_ = 0;
  uint32_t reported_delay_us_ = 0;
  bool latest_ = false;  // the last ACK is that one
  uint64_t largest_acked_ = 0;
  Nanos largest_acked_sent_ = 0;
  uint64_t refused_ = 0;           // highest number that the peer has reported as refused
  Nanos refused_time_ = -kSecond;  // when that report arrived
  // How long after packets sent later a packet was acknowledged, the most in the last seconds:
  // negative, since the longest is kept.
  WindowedMin early_;
  Nanos largest_rtt_ = 0;    // from sending the largest acknowledged packet to its ACK
  Nanos loss_due_ = kNever;  // when the oldest missing packet is lost
  Nanos timer_base_ = 0;     // start of the probe timer
  Nanos unanswered_ = 0;     // the same of the first of the time-outs in a row
  uint32_t timeouts_ = 0;    // probe time-outs in a row
  uint32_t probes_ = 0;
  bool starved_ = false;  // backlog without credit since timer_base_
};

}  // namespace gradwire
