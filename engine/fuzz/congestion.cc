// Congestion control and credit by lists of events: whatever peers report, windows keep their
// bounds, a pace that is set lets the next train go soon, and credit never runs backwards.
#include <cmath>
#include <vector>

#include "fuzz/input.h"
#include "proto/base/overhead.h"
#include "proto/congestion/ecn.h"
#include "proto/congestion/queue_delay.h"
#include "proto/congestion/send_controller.h"
#include "proto/credit/receive_controller.h"
#include "wire/packet.h"

namespace gradwire::fuzz {
namespace {

constexpr uint32_t kWireBytes = 1472 + kOverhead;
constexpr size_t kPaths = 3;
constexpr size_t kPeers = 16;  // of a receiver whose senders may take turns
constexpr Nanos kLongestStep = 600 * kSecond;
// The longest that a pace holds back the next train.
constexpr Nanos kLongestWait = 120 * kSecond;

class Case {
 public:
  explicit Case(Input& input)
      : input_(input),
        sender_(kWireBytes, 1300 * kMicrosecond, true, kPaths),
        peers_(input_.flip() ? kPaths : kPeers),
        receiver_(setup(peers_.size())) {}

  void run() {
    while (!input_.done()) {
      step();
      check();
    }
  }

 private:
  // Of a worker, or of a server with enough workers for turns.
  static ReceiveController::Setup setup(size_t peers) {
    const auto senders = static_cast<uint32_t>(peers - 1);
    return {peers, senders, senders, kWireBytes, 5e5, 1300 * kMicrosecond, peers == kPeers};
  }
  // A time that a peer reports: plausible, or any that its field holds.
  Nanos reported() { return Nanos{input_.number<uint32_t>(input_.below(5000))} * kMicrosecond; }
  // A round-trip time, which Rtt bounds.
  Nanos measured() { return 1 + Nanos{input_.get<uint32_t>()} % Rtt::kLongest; }
  Nanos queued() { return std::min(reported(), Nanos{wire::kAckMostUs} * kMicrosecond); }

  void step() {
    switch (input_.below(10)) {
      case 0:
        now_ += Nanos{input_.get<uint16_t>()} * kMicrosecond;
        return sender_.on_timer(now_);
      case 1:
        now_ += static_cast<Nanos>(input_.get<uint64_t>() % kLongestStep);
        return sender_.on_timer(now_);
      case 2:
        return send();
      case 3:
        return leave();
      case 4:
        return ack();
      case 5:
        sender_.told(input_.below(kPaths), input_.byte() / 255.0);
        return;
      case 6:
        sender_.marked(now_ - measured(), now_);
        receiver_.marked(measured(), now_);
        return;
      case 7:
        return train();
      default:
        return arrive();
    }
  }

  void send() {
    const uint64_t bytes = 256 + input_.below(60'000);
    sender_.on_sent(bytes, now_, 1 + input_.below(40));
    in_flight_ += bytes;
  }
  void leave() {
    const uint64_t bytes = std::min<uint64_t>(in_flight_, input_.below(65'535));
    sender_.on_left(bytes);
    in_flight_ -= bytes;
    if (input_.flip()) sender_.on_lost();
    if (input_.below(8) == 0) sender_.on_spurious(input_.below(64));
  }
  void ack() {
    SendController::Report report;
    report.path = input_.below(kPaths);
    report.bytes = input_.number<uint32_t>(1500);
    report.loss = input_.get<uint16_t>() / 65'536.0;
    report.queue = queued();
    report.round = measured();
    report.rtprop = std::min(report.round, measured());
    // What is acknowledged was sent after what was acknowledged before.
    Nanos& last = acked_[report.path];
    report.last_sent = last = std::max(last, now_ - std::min(now_, measured()));
    const double windows = input_.get<uint32_t>();
    sender_.on_ack(report, [windows] { return windows; }, now_);
  }
  void train() {
    SendController::LongPaths far;
    far.count = input_.below(3);
    far.rtprop = measured();
    far.round = far.rtprop + measured();
    far.window = std::max(24 * kWireBytes, input_.number<uint32_t>(100'000));
    const double rate = sender_.window().rate();
    SendController::Turn turn;
    if (input_.flip()) {
      turn.bytes = 1.0 * kWireBytes * (1 + input_.get<uint16_t>());
      turn.rate = turn.bytes * 1e9 / static_cast<double>(1300 * kMicrosecond);
    }
    sender_.pace(far, rate, input_.flip() ? rate : 0, turn, now_);
    expect(sender_.quantum() >= 1, "a train has a packet");
    const Nanos wait = sender_.wait(now_);
    expect(wait == 0 || wait > now_, "a train goes now or later");
    if (wait) expect(wait - now_ <= kLongestWait, "a pace holds a train back for a while only");
    if (wait == 0) sender_.train_sent(1.0 * kWireBytes * std::min(sender_.quantum(), 64U));
    if (input_.below(8) == 0) sender_.probe_sent(2.0 * kWireBytes);
    if (input_.below(8) == 0) sender_.limited();
  }

  void arrive() {
    const size_t peer = input_.below(static_cast<uint32_t>(peers_.size()));
    Peer& from = peers_[peer];
    const Nanos arrival = now_ - std::min(now_, reported());
    const auto stamp = input_.number<uint32_t>(us(arrival));
    const Nanos queue = from.arriving.delay.sample(stamp, arrival, reported(), now_);
    expect(queue >= 0, "nothing queues for less than no time");
    const uint64_t number = from.largest + 1 + (input_.below(8) ? 0 : input_.below(300));
    receiver_.arrived(from.arriving, queue, kWireBytes, input_.flip());
    receiver_.credit.ask(from.grant, input_.number<uint16_t>(40));
    receiver_.count(from.arriving, number, 1, from.largest, kWireBytes, queue, now_);
    from.largest = number;
    from.rtt.sample(measured(), reported(), now_);
    receiver_.sample(peer, from.arriving, from.rtt, now_);
    if (input_.below(8) == 0) receiver_.missing();
    share(peer);
    slots();
    if (from.ecn.sent.told(input_.number<uint32_t>(0), input_.number<uint32_t>(0)))
      expect(!from.ecn.sent.failed(), "marks of a path that fails are not believed");
  }

  void share(size_t peer) {
    Peer& from = peers_[peer];
    const uint64_t before = from.grant.granted;
    const bool no_room = input_.below(8) == 0;
    receiver_.share(from.grant, {peer, from.arriving, from.rtt, from.largest, no_room}, now_);
    expect(from.grant.granted >= before, "credit is not taken back");
    // What has no room is not asked for; in turns, the others wait.
    if (no_room || from.grant.turns) return;
    expect(from.grant.granted > from.largest, "a sender may send a packet");
  }
  void slots() {
    size_t given = 0;
    for (size_t peer; (peer = receiver_.next_slot(now_)) != GrantSlots::kNone; ++given) {
      expect(given < peers_.size(), "slots come to an end");
      share(peer);
    }
    expect(receiver_.slot_due() > now_, "a slot that is free is given away");
  }

  void check() const {
    const double window = sender_.window().bytes();
    expect(std::isfinite(window) && window >= 4.0 * kWireBytes, "a send window stays open");
    expect(std::isfinite(sender_.room(now_)), "room is a number");
    expect(std::isfinite(sender_.window().rate()) && sender_.window().rate() >= 0, "a rate is one");
    if (in_flight_ == 0) expect(sender_.room(now_) > 0, "an empty window has room");
    const double credit = receiver_.window().bytes();
    // Where losses take its room, it has a packet for each sender.
    expect(std::isfinite(credit) && credit >= 2.0 * kWireBytes, "a receive window stays open");
    expect(sender_.window().target() > 0 && receiver_.window().target() > 0, "a target is a time");
  }

  struct Peer {
    Arriving arriving;
    Credit grant;
    Rtt rtt;
    Ecn ecn;
    uint64_t largest = 0;
  };
  Input& input_;
  Nanos now_ = kSecond;
  SendController sender_;
  std::vector<Peer> peers_;
  ReceiveController receiver_;
  uint64_t in_flight_ = 0;
  Nanos acked_[kPaths] = {};
};

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::Input input(data, size);
  gradwire::fuzz::Case(input).run();
  return 0;
}
