// Recovery and Acknowledger by lists of events. Packets leave flight once, an ACK of what was never
// sent changes nothing, whatever waits has a time at which it goes on, and that time is near.
#include <map>
#include <numeric>
#include <vector>

#include "fuzz/input.h"
#include "proto/recovery/acknowledger.h"
#include "proto/recovery/recovery.h"

namespace gradwire::fuzz {
namespace {

// The longest step of time: a host that was suspended.
constexpr Nanos kLongestStep = 600 * kSecond;
// The longest first time-out, and how many of it the longest later one lasts.
constexpr Nanos kLongestFirst = 8 * kSecond;
constexpr Nanos kMostOfFirst = 16;

class Case {
 public:
  explicit Case(Input& input) : input_(input) {}

  void run() {
    while (!input_.done()) {
      step();
      check();
    }
  }

 private:
  void step() {
    switch (input_.below(12)) {
      case 0:
      case 1:
      case 2:
        return send();
      case 3:
      case 4:
        return pass(Nanos{input_.get<uint16_t>()} * kMicrosecond);
      case 5:
        return ack(wire::Ack{}, true);
      case 6:
        return ack(wire::Ack{}, false);
      case 7:
        return jump();
      case 8:
        recovery_.starve(now_);
        return;
      case 9:
        recovery_.feed();
        return;
      case 10:
        return repeat();
      default:
        recovery_.give_up_longer(input_.below(1500), lost_);
        return leave();
    }
  }

  // Packets that go together. The other end has them, or they were lost.
  void send() {
    if (recovery_.full()) return;
    std::vector<uint32_t> items(std::min<uint64_t>(1 + input_.below(16), recovery_.room()));
    std::iota(items.begin(), items.end(), static_cast<uint32_t>(recovery_.next()));
    SentPacket packet;
    packet.kind = input_.below(4) ? wire::Kind::push : wire::Kind::open;
    packet.bytes = static_cast<uint16_t>(256 + input_.below(1200));
    packet.recovers = input_.below(8) != 0;
    recovery_.send(packet, items, now_);
    for (const uint32_t number : items) {
      flight_[number] = packet.bytes;
      if (input_.below(4)) acks_.record(number, 1, input_.below(16) == 0, now_);
    }
  }

  // Time passes, and what is due is done.
  void pass(Nanos step) {
    now_ += step;
    if (recovery_.loss_due() <= now_) recovery_.detect_losses(now_, lost_);
    leave();
    if (!recovery_.waiting()) return;
    const Nanos due = recovery_.next_timeout(heard_, now_);
    const Nanos first = recovery_.rtt.probe_timeout();
    expect(first <= kLongestFirst, "a first time-out is short");
    expect(due <= now_ + kMostOfFirst * first, "what waits goes on in time");
    if (due > now_) return;
    const bool any = recovery_.in_flight() > 0;
    const bool more = input_.flip();
    expect(recovery_.on_timeout(heard_, more, now_, lost_), "a time-out is taken");
    expect(recovery_.probes() > 0, "a time-out sends something");
    if (any) expect(!lost_.empty(), "a time-out sends what is in flight");
    leave();
  }

  void jump() { pass(static_cast<Nanos>(input_.get<uint64_t>() % kLongestStep)); }

  void ack(wire::Ack ack, bool honest) {
    heard_ = now_;
    acks_.fill(ack, input_.below(4096), wire::kAckMaxWords, now_);
    if (!honest) {
      ack.largest = input_.number(static_cast<uint32_t>(recovery_.next() - 1));
      ack.refused = input_.number(ack.refused);
      ack.delay_us = input_.number(ack.delay_us);
      ack.words = static_cast<uint8_t>(input_.below(wire::kAckMaxWords + 1));
      for (uint16_t w = 0; w < ack.words; ++w) ack.bitmap[w] = input_.number(ack.bitmap[w]);
    }
    const uint64_t lowest = recovery_.lowest();
    const uint64_t largest = recovery_.largest_acked();
    acked_.clear();
    if (!recovery_.on_ack(ack, now_, acked_)) {
      expect(!honest, "an honest ACK is taken");
      expect(acked_.items.empty() && recovery_.lowest() == lowest &&
                 recovery_.largest_acked() == largest,
             "an ACK of what was never sent changes nothing");
      return;
    }
    uint64_t left = 0;
    for (const uint32_t number : acked_.items) {
      expect(number < recovery_.next(), "what is acknowledged was sent");
      expect(!settled_[number], "a packet is acknowledged once");
      settled_[number] = true;
      if (const auto found = flight_.find(number); found != flight_.end()) {
        left += found->second;
        flight_.erase(found);
      }
    }
    expect(left == acked_.in_flight, "an ACK tells what leaves flight");
    if (acked_.bytes) recovery_.detect_losses(now_, lost_);
    leave();
  }

  void repeat() {
    Repeats after({}, 0, false, false, false);
    after.control = Nanos{input_.get<uint16_t>()} * kMicrosecond;
    after.data = after.control + Nanos{input_.get<uint16_t>()} * kMicrosecond;
    copies_.sent(input_.below(64));
    copies_.refill(1e4, now_);
    const Nanos next = recovery_.repeat(after, copies_, now_, lost_);
    expect(next > now_, "a repeat is in the future");
    leave();
  }

  void leave() {
    for (const Recovery::Lost& each : lost_)
      expect(flight_.erase(each.packet.number) == 1, "a packet leaves flight once");
    lost_.clear();
  }

  void check() {
    expect(recovery_.in_flight() == flight_.size(), "each packet in flight is known");
    expect(recovery_.lowest() <= recovery_.next(), "no packet in flight is above all");
    if (!flight_.empty())
      expect(flight_.begin()->first == recovery_.lowest(), "the lowest is in flight");
    expect(recovery_.rtt.probe_timeout() > 0, "a time-out is positive");
    expect(recovery_.largest_acked() < recovery_.next(), "what is acknowledged was sent");
  }

  Input& input_;
  Nanos now_ = kSecond;
  Nanos heard_ = 0;
  Recovery recovery_;
  Acknowledger acks_;  // of the other end
  Copies copies_;
  Recovery::Acked acked_;
  std::vector<Recovery::Lost> lost_;
  std::map<uint64_t, uint32_t> flight_;  // number -> bytes
  std::map<uint64_t, bool> settled_;
};

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::Input input(data, size);
  gradwire::fuzz::Case(input).run();
  return 0;
}
