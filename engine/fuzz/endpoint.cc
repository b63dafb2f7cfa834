// Operations on an endpoint by one who belongs to the job. Two real endpoints exchange datagrams
// over a network that the input decides about: it delivers, drops, repeats and changes them, lets
// time pass, starts ops, and sends what it makes up in the second one's name. The first one never
// crashes or spins, keeps to its memory, and ends each op in time, with a result or an error. As
// long as nothing was changed or made up, each op ends with the right sum.
#include <deque>
#include <memory>
#include <vector>

#include "fuzz/input.h"
#include "proto/endpoint/endpoint.h"

namespace gradwire::fuzz {
namespace {

constexpr uint32_t kSession = 0x5eed;
constexpr Nanos kTimeout = 20 * kSecond;
constexpr size_t kMostOnTheWay = 4096;
constexpr uint32_t kMostOps = 4;

using Bytes = std::vector<uint8_t>;

struct Side {
  std::unique_ptr<Endpoint> endpoint;
  std::deque<Bytes> arriving;
  std::deque<std::vector<float>> data;
  std::vector<uint8_t> done;  // by op: 1 with a result, 2 with an error
  bool failed = false;
};

class Case {
 public:
  explicit Case(Input& input) : input_(input) {
    for (uint16_t e = 0; e < 2; ++e) {
      EndpointConfig config;
      config.endpoint = e;
      config.workers = 2;
      config.session = kSession;
      config.datagram_bytes = 512;
      config.peer_timeout = 5 * kSecond;
      config.memory_limit = 1 << 20;
      sides_[e].endpoint = std::make_unique<Endpoint>(config, now_);
    }
  }

  void run() {
    exchange();
    while (!input_.done()) {
      step();
      turn(0);
      turn(1);
    }
    // All that was started ends.
    const Nanos end = now_ + kTimeout + 20 * kSecond;
    while (now_ < end && open()) {
      pass(kSecond / 4);
      exchange();
    }
    expect(!open(), "each op ends in time");
    for (Side& side : sides_) side.endpoint->close(now_, kSecond);
    for (int i = 0; i < 8; ++i) {
      pass(kSecond / 4);
      exchange();
    }
  }

 private:
  void step() {
    switch (input_.below(14)) {
      case 0:
      case 1:
        return start();
      case 2:
      case 3:
        return exchange();
      case 4:
        return pass(Nanos{input_.get<uint16_t>()} * kMicrosecond);
      case 5:
        return pass(Nanos{input_.get<uint16_t>()} * kMillisecond / 16);
      case 6:
        return deliver(input_.below(2), 1 + input_.below(8));
      case 7:
        return drop();
      case 8:
        return again();
      case 9:
        return change();
      case 10:
        sides_[0].endpoint->limit(1, input_.number<uint32_t>(300), now_);
        made_up_ = true;
        return;
      case 11:
        return make_up(ack());
      default:
        return make_up(made());
    }
  }

  void start() {
    if (ops_ >= kMostOps) return;
    OpSpec spec;
    spec.op = id_of(ops_, 0);
    spec.step = ops_;
    spec.timeout = kTimeout;
    Plan& plan = spec.plan;
    plan.elements = 1 + input_.below(3000);
    const uint8_t how = input_.byte();
    const bool lossy = how & 1;
    plan.regions = {{0, plan.elements, lossy ? 0.2 : 0.0}};
    plan.spend = lossy ? Spend::lost : Spend::nothing;
    plan.format.encoding = how & 2 ? codec::Encoding::f16 : codec::Encoding::f32;
    if (how & 4) plan.pull = static_cast<Pull>(how >> 4 & 3);
    if (how & 8) plan.control = Control::probe;
    if (plan.pull == Pull::committed || plan.pull == Pull::lossy) plan.pull_bound = 0.1;
    if (!plan.validate().empty()) return;
    exact_.push_back(!lossy && plan.pull == Pull::exact);
    ++ops_;
    for (Side& side : sides_) {
      side.done.push_back(0);
      side.data.emplace_back(plan.elements, 1.0f + static_cast<float>(&side - sides_));
      spec.data = {reinterpret_cast<uint8_t*>(side.data.back().data())};
      if (side.endpoint->start(spec, now_)) side.done.back() = 2;
    }
  }

  bool open() const {
    for (const Side& side : sides_)
      for (const uint8_t done : side.done)
        if (!done) return true;
    return false;
  }

  // What an endpoint does in one turn of its driver's loop.
  void turn(uint32_t which) {
    Side& side = sides_[which];
    Endpoint& endpoint = *side.endpoint;
    endpoint.flush(now_);
    for (int i = 0; endpoint.next_timer() <= now_; ++i) {
      expect(i < 1000, "a timer advances");
      endpoint.on_timer(now_);
      send(which);
    }
    send(which);
    Event event;
    while (endpoint.next_event(event)) take(side, event);
    expect(endpoint.counters().now.memory <= 1 << 20, "an endpoint keeps to its memory");
  }

  void send(uint32_t which) {
    std::deque<Bytes>& way = sides_[1 - which].arriving;
    for (int i = 0; sides_[which].endpoint->transmit(now_, train_); ++i) {
      expect(i < 10'000, "what may be sent at one time ends");
      expect(train_.count > 0 && train_.segment_bytes > 0, "a train has datagrams");
      Bytes whole;
      for (uint32_t s = 0; s < 2 * train_.count; ++s) {
        const auto* data = static_cast<const uint8_t*>(train_.spans[s].data);
        whole.insert(whole.end(), data, data + train_.spans[s].size);
      }
      for (size_t at = 0; at < whole.size(); at += train_.segment_bytes) {
        const size_t end = std::min<size_t>(whole.size(), at + train_.segment_bytes);
        if (way.size() < kMostOnTheWay)
          way.emplace_back(whole.begin() + static_cast<ptrdiff_t>(at),
                           whole.begin() + static_cast<ptrdiff_t>(end));
      }
    }
  }

  void take(Side& side, const Event& event) {
    if (event.type == Event::Type::failed) side.failed = true;
    if (event.type != Event::Type::op_done) return;
    const uint64_t number = number_of(event.report.op);
    expect(number < side.done.size() && !side.done[number], "an op is reported once");
    const bool failed = bool(event.report.failure);
    side.done[number] = failed ? 2 : 1;
    if (made_up_ || failed || !exact_[number]) return;
    for (const float value : side.data[number])
      expect(value == 3.0f, "an op of honest endpoints has the right sum");
  }

  void pass(Nanos step) {
    now_ += step;
    turn(0);
    turn(1);
  }

  void deliver(uint32_t to, uint32_t count) {
    std::deque<Bytes>& way = sides_[to].arriving;
    for (; count > 0 && !way.empty(); --count) {
      const Bytes bytes = std::move(way.front());
      way.pop_front();
      const Nanos late = input_.below(4) ? 0 : Nanos{input_.get<uint16_t>()} * kMicrosecond;
      const std::span<const uint8_t> one(bytes);
      sides_[to].endpoint->receive(static_cast<uint16_t>(1 - to), {&one, 1}, now_, now_ - late,
                                   static_cast<uint8_t>(input_.done() ? 2 : input_.below(4)));
    }
    turn(to);
  }

  // All that is on the way arrives, and what answers it, for some milliseconds.
  void exchange() {
    for (int i = 0; i < 40; ++i) {
      now_ += 100 * kMicrosecond;
      turn(0);
      turn(1);
      deliver(0, kMostOnTheWay);
      deliver(1, kMostOnTheWay);
    }
  }

  void drop() {
    std::deque<Bytes>& way = sides_[input_.below(2)].arriving;
    for (uint32_t count = 1 + input_.below(8); count > 0 && !way.empty(); --count) way.pop_front();
  }
  void again() {
    std::deque<Bytes>& way = sides_[input_.below(2)].arriving;
    if (!way.empty()) way.push_back(way[input_.below(static_cast<uint32_t>(way.size()))]);
  }
  void change() {
    std::deque<Bytes>& way = sides_[0].arriving;
    if (way.empty()) return;
    Bytes& bytes = way[input_.below(static_cast<uint32_t>(way.size()))];
    if (bytes.empty()) return;
    const size_t at = input_.below(static_cast<uint32_t>(bytes.size()));
    bytes[at] = input_.number<uint8_t>(bytes[at]);
    if (input_.below(8) == 0) bytes.resize(input_.below(600));
    made_up_ = true;
  }

  void make_up(const Bytes& bytes) {
    made_up_ = true;
    const std::span<const uint8_t> one(bytes);
    sides_[0].endpoint->receive(1, {&one, 1}, now_, now_, static_cast<uint8_t>(input_.below(4)));
    turn(0);
  }

  Bytes ack() {
    wire::Ack ack{};
    ack.largest = input_.number<uint32_t>(input_.below(64));
    ack.refused = input_.number<uint32_t>(0);
    ack.credit = input_.number<uint32_t>(100);
    ack.delay_us = input_.number<uint32_t>(100);
    ack.queue_us = input_.number<uint32_t>(100);
    ack.share = input_.number<uint32_t>(10'000);
    ack.words = 2;
    ack.room = input_.byte();
    ack.loss = input_.number<uint16_t>(0);
    ack.ect0 = input_.number<uint32_t>(0);
    ack.ce = input_.number<uint32_t>(0);
    ack.bitmap[0] = input_.number<uint64_t>(UINT64_MAX);
    Bytes bytes(wire::kAckFixedBytes + 16);
    wire::write_ack(bytes.data(), {wire::kVersion, wire::Kind::ack, 1, kSession}, ack);
    return bytes;
  }

  // A datagram of any kind, whose fields are plausible or not.
  Bytes made() {
    wire::Header header{};
    header.common = {wire::kVersion, static_cast<wire::Kind>(1 + input_.below(21)), 1, kSession};
    header.packet_number = input_.number<uint32_t>(++made_ * 3);
    header.send_time_us = input_.number(us(now_));
    header.op = input_.number(static_cast<uint32_t>(id_of(input_.below(ops_ + 2), 0)));
    header.chunk = input_.number<uint32_t>(input_.below(32));
    header.backlog = input_.number<uint16_t>(3);
    header.flags = input_.number<uint16_t>(0);
    Bytes bytes(wire::kHeaderBytes);
    wire::write_header(bytes.data(), header);
    const Bytes payload = input_.take(input_.flip() ? 484 : input_.below(64));
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    if (header.common.kind <= wire::Kind::pull && input_.flip()) bytes.resize(512);
    return bytes;
  }

  Input& input_;
  Nanos now_ = kSecond;
  Side sides_[2];
  Train train_;
  uint32_t ops_ = 0;
  uint32_t made_ = 0;
  std::vector<bool> exact_;
  bool made_up_ = false;  // something on the way was not honest
};

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::Input input(data, size);
  gradwire::fuzz::Case(input).run();
  return 0;
}
