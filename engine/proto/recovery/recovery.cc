#include "proto/recovery/recovery.h"

#include <bit>

#include "proto/base/overhead.h"

namespace gradwire {

namespace {
// The reordering window is one part of so many of RTprop before any reordering (RFC 8985 §6.2).
constexpr Nanos kReordering = 4;
// Doublings of the time-out of a peer that is heard, and of a silent one, at most.
constexpr uint32_t kHeardBackoff = 1;
constexpr uint32_t kSilentBackoff = 4;
// The time-out of a peer that is heard is one part of so many of the time without an
// acknowledgement, so the end of a burst is noticed that much later.
constexpr Nanos kPartOfWait = 8;
// Packets that one probe time-out sends again (RFC 9002 §6.2.4), where a first window is not worth
// it.
constexpr uint32_t kFewProbes = 2;
}  // namespace

bool Recovery::on_ack(const wire::Ack& ack, Nanos now, Acked& acked) {
  const uint64_t largest = wire::expand(ack.largest, sent_.next() - 1);
  if (largest >= sent_.next()) return false;
  // ACKs have no numbers of their own. The largest packet number orders them, and among those with
  // the same one the time since that packet arrived.
  latest_ = largest > reported_ || (largest == reported_ && ack.delay_us >= reported_delay_us_);
  if (latest_) {
    reported_ = largest;
    reported_delay_us_ = ack.delay_us;
  }
  const uint64_t refused = wire::expand(ack.refused, largest);
  if (refused > refused_ && refused < sent_.next()) {
    refused_ = refused;
    refused_time_ = now;
  }
  const uint64_t before = largest_acked_;
  early_.forget_old(now);
  const uint64_t known = largest + 1 - std::min(sent_.oldest(), largest + 1);
  for (uint64_t w = 0; w < ack.words && w * 64 < known; ++w) {
    const uint64_t from = largest - w * 64;
    const uint64_t bits =
        ack.bitmap[w] & sent_.in(SentPackets::kOpen, from) & BitRing::ones(known - w * 64);
    if (bits) acknowledge(from, bits, before, now, acked);
  }
  sent_.advance();
  if (largest_acked_ > before) {
    largest_rtt_ = now - largest_acked_sent_;
    if (largest_acked_ == largest)
      rtt.sample(largest_rtt_, Nanos{ack.delay_us} * kMicrosecond, now);
  }
  if (acked.bytes) {
    timeouts_ = probes_ = 0;
    timer_base_ = now;
  }
  return true;
}

// Takes the packets of `bits`, which begin at `from`. `before`: the largest number acknowledged by
// earlier ACKs.
void Recovery::acknowledge(uint64_t from, uint64_t bits, uint64_t before, Nanos now, Acked& acked) {
  // Mostly there are none, and counting is a call.
  const auto count = [](uint64_t some) { return some ? uint64_t(std::popcount(some)) : 0; };
  const auto highest = [from](uint64_t some) { return from - std::countr_zero(some); };
  const uint64_t flight = sent_.in(SentPackets::kFlight, from);
  const uint64_t lost = sent_.in(SentPackets::kLost, from);
  sent_.acknowledge(from, bits);
  while (bits) {
    const SentPacket& first = sent_.train(highest(bits));
    const uint64_t part = bits & BitRing::ones(from + 1 - first.number);
    bits &= ~part;
    uint64_t packets = 0;
    for (uint64_t left = part; left; left &= left - 1, ++packets)
      acked.items.push_back(sent_.item(highest(left)));
    const uint64_t again = count(part & ~flight);
    acked.runs.push_back({first, packets});
    acked.in_flight += (packets - again) * first.bytes;
    acked.spurious += again;
    // A packet sent later overtook one, so packets are lost only after that time (RFC 8985 §6.2).
    if (highest(std::bit_floor(part)) < before) early_.add(largest_rtt_ - (now - first.time), now);
    const uint64_t arrived = part & ~lost;
    if (!arrived) continue;
    acked.bytes += (packets - count(part & lost)) * (first.bytes + kOverhead);
    acked.longest = std::max(acked.longest, first.bytes);
    if (highest(arrived) <= largest_acked_) continue;
    largest_acked_ = highest(arrived);
    largest_acked_sent_ = first.time;
  }
}

void Recovery::give_up(uint64_t number, Again why, std::vector<Lost>& lost) {
  lost.push_back({sent_.give_up(number, why == Again::lost), why});
}

Nanos Recovery::reordering_window() const {
  const Nanos least = std::max(rtt.minimum() / kReordering, kHostDelay);
  return early_.any() ? std::clamp(-early_.get(), least, std::max(least, rtt.probe_timeout()))
                      : least;
}

// A packet is lost once a packet sent later has been acknowledged and the reordering window has
// passed. Packets that arrive in order need no window: a few later ones are enough.
void Recovery::detect_losses(Nanos now, std::vector<Lost>& lost) {
  loss_due_ = kNever;
  const Nanos window = largest_rtt_ + reordering_window();
  for (uint64_t n = sent_.lowest(); n < largest_acked_; n = sent_.after(n)) {
    const bool ordered = !early_.any() && n + kInARow <= largest_acked_;
    const Nanos due = sent_.train(n).time + window;
    if (!ordered && due > now) {
      loss_due_ = due;
      return;
    }
    // An ACK reports only the highest refused number, so packets below it count as refused, not as
    // lost.
    give_up(n, n <= refused_ ? Again::refused : Again::lost, lost);
  }
}

// The time-out doubles each time (RFC 9002 §6.2.1). While packets of the peer arrive it is neither
// dead nor cut off, and its path loses packets: then the time-out doubles once, and grows with the
// time in which nothing was acknowledged, since probes themselves may be what is lost.
Nanos Recovery::next_timeout(Nanos heard, Nanos now) const {
  const Nanos first = rtt.probe_timeout();
  const Nanos doubled = first << std::min(timeouts_, kSilentBackoff);
  if (timeouts_ == 0 || now - heard >= kHeardOf) return timer_base_ + doubled;
  return timer_base_ + std::min(doubled, std::max(first << kHeardBackoff,
                                                  (timer_base_ - unanswered_) / kPartOfWait));
}

// The oldest packets go again, or new ones beyond the credit, since the ACK that extends it may be
// lost.
bool Recovery::on_timeout(Nanos heard, bool more, Nanos now, std::vector<Lost>& lost) {
  if (!waiting()) {
    timeouts_ = 0;
    return false;
  }
  if (now < next_timeout(heard, now)) return false;
  if (timeouts_++ == 0) unanswered_ = timer_base_;
  const Nanos answer_due = timer_base_ + rtt.round();
  timer_base_ = now;
  // On a long path a time-out sends a round's first window. It does so on a short path too when
  // packets of the peer arrive but no ACKs: then the path most likely loses. When the peer has no
  // room nothing was lost, so little is sent.
  const bool full = refused_ >= sent_.lowest();
  const bool talks = timeouts_ > 1 && heard > answer_due;
  const bool worth_trying = !full && (rtt.profile().probes_window || talks);
  probes_ = worth_trying ? kFirstWindow : kFewProbes;
  uint32_t again = 0;
  for (uint64_t n = sent_.lowest(); n < sent_.next() && again < probes_; n = sent_.after(n)) {
    // A chunk that goes in passes is not sent again now; the next one of its pass takes its place.
    if (sent_.train(n).recovers || more) ++again;
    give_up(n, Again::probe, lost);
  }
  return true;
}

void Recovery::starve(Nanos now) {
  if (starved_) return;
  starved_ = true;
  if (in_flight() == 0) timer_base_ = now;
}

// A peer that had no room for packets would have none for copies.
Nanos Recovery::repeat(const Repeats& after, Copies& copies, Nanos now, std::vector<Lost>& lost) {
  if (after.control == kNever || refused(now)) {
    control_.clear();
    return kNever;
  }
  const Nanos next = repeat_control(after.control, now, lost);
  return after.data == kNever ? next : std::min(next, repeat_data(after.data, copies, now, lost));
}

Nanos Recovery::repeat_control(Nanos after, Nanos now, std::vector<Lost>& lost) {
  Nanos next = kNever;
  std::erase_if(control_, [&](uint64_t number) {
    if (!sent_.flies(number)) return true;
    const Nanos due = sent_.train(number).time + after;
    if (due > now) {
      next = std::min(next, due);
      return false;
    }
    give_up(number, Again::repeat, lost);
    return true;
  });
  return next;
}

Nanos Recovery::repeat_data(Nanos after, Copies& copies, Nanos now, std::vector<Lost>& lost) {
  for (uint64_t n = sent_.lowest(); n < sent_.next(); n = sent_.after(n)) {
    if (!sent_.train(n).recovers) continue;
    const Nanos due = std::max(sent_.train(n).time + after, copies.next(now));
    if (due > now) return due;
    give_up(n, Again::repeat, lost);
    copies.take();
    ++probes_;
  }
  return kNever;
}

void Recovery::give_up_longer(uint32_t bytes, std::vector<Lost>& lost) {
  for (uint64_t n = sent_.lowest(); n < sent_.next(); n = sent_.after(n))
    if (sent_.train(n).bytes > bytes) give_up(n, Again::probe, lost);
}

}  // namespace gradwire
