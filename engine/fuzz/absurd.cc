// A job among datagrams that only a wrong peer sends: ACKs of what was never sent, grants, delays
// and lengths that cannot be, numbers far ahead, answers to pings that nobody sent, bytes cut
// short. They come in the names of real peers, with the job's tag. The job must end in time, with
// the right result: the fabric's oracle checks it.
#include <vector>

#include "fuzz/input.h"
#include "sim/fabric.h"

namespace gradwire::fuzz {
namespace {

// The longest that a job of these sizes may take, whatever comes between.
constexpr Nanos kLongest = 20 * kSecond;
constexpr uint32_t kSession = 0x5eed;

class Case {
 public:
  explicit Case(Input& input) : input_(input) {}

  void run() {
    sim::FabricOptions options;
    options.workers = static_cast<uint16_t>(2 + input_.below(2));
    options.servers = static_cast<uint16_t>(input_.below(4) ? 0 : 1);
    options.seed = input_.byte();
    options.link.delay = Nanos{1 + input_.below(250)} * (input_.flip() ? 1 : 80) * kMicrosecond;
    options.link.queue_bytes = 64 << 10;
    options.link.loss = input_.below(4) ? 0.0 : 0.03;
    options.endpoint.session = kSession;
    options.endpoint.datagram_bytes = 512;
    sim::Fabric fabric(options);
    const auto elements = 1 + input_.below(20'000);
    for (uint64_t number = 0; number < 2; ++number) {
      for (uint16_t rank = 0; rank < options.workers; ++rank) {
        OpSpec spec;
        spec.op = id_of(number, 0);
        spec.step = number;
        spec.plan.elements = elements;
        spec.plan.regions = {{0, elements, 0.0}};
        spec.timeout = 2 * kLongest;
        fabric.start(rank, spec, std::vector<float>(elements, 1.0f + rank), 0);
      }
    }
    const auto hosts = static_cast<uint16_t>(fabric.hosts());
    Nanos now = 0;
    while (!input_.done() && now < kLongest / 2) {
      now += Nanos{input_.below(2000)} * 5 * kMicrosecond;
      fabric.run(now, true);
      const auto to = static_cast<uint16_t>(input_.below(hosts));
      const auto from = static_cast<uint16_t>(input_.below(hosts));
      if (from == to) continue;
      const std::vector<uint8_t> bytes = datagram(from);
      fabric.inject(from, to, bytes);
    }
    const bool done = fabric.run(kLongest, true);
    for (const std::string& each : fabric.violations()) std::fprintf(stderr, "%s\n", each.c_str());
    expect(!fabric.broken(), "the results are right");
    expect(done, "a job among absurd datagrams ends in time");
    for (uint16_t rank = 0; rank < options.workers; ++rank)
      for (uint64_t number = 0; number < 2; ++number)
        expect(!fabric.report(rank, id_of(number, 0))->failure, "absurd datagrams end no job");
  }

 private:
  // Fields that no correct peer sends.
  std::vector<uint8_t> datagram(uint16_t from) {
    wire::Common common{wire::kVersion, wire::Kind::ack, from, kSession};
    std::vector<uint8_t> bytes(wire::kAckFixedBytes + 8 * wire::kAckMaxWords);
    switch (input_.below(6)) {
      case 0:
      case 1: {
        bytes.resize(wire::write_ack(bytes.data(), common, ack()));
        return bytes;
      }
      case 2: {  // each number far from the one before
        common.kind = static_cast<wire::Kind>(1 + input_.below(11));
        far_ += 1u << 20;
        const wire::Header header{common,
                                  far_,
                                  input_.get<uint32_t>(),
                                  input_.below(8) * static_cast<uint32_t>(kLanes),
                                  input_.get<uint32_t>(),
                                  input_.get<uint16_t>(),
                                  input_.get<uint16_t>()};
        wire::write_header(bytes.data(), header);
        bytes.resize(wire::kHeaderBytes + input_.below(400));
        return bytes;
      }
      case 3: {  // an answer to no ping
        common.kind = wire::Kind::pong;
        wire::write_ping(bytes.data(), common, {input_.get<uint64_t>() >> 24, 0});
        bytes.resize(wire::kPingBytes);
        return bytes;
      }
      case 4: {  // a ping that claims too little
        common.kind = wire::Kind::ping;
        wire::write_ping(bytes.data(), common, {input_.get<uint64_t>() >> 24, 0});
        wire::put(bytes.data() + wire::kPingBytes, static_cast<uint16_t>(1 + input_.below(255)));
        bytes.resize(wire::kPingBytes + wire::kLimitBytes);
        return bytes;
      }
      default: {  // a part of a header, or a kind that is none
        common.kind = static_cast<wire::Kind>(22 + input_.below(200));
        wire::write_common(bytes.data(), common);
        bytes.resize(input_.below(64));
        return bytes;
      }
    }
  }

  // It acknowledges nothing that was sent, and says the rest at the ends of its range.
  wire::Ack ack() {
    wire::Ack ack{};
    ack.largest = 0;  // before the first packet
    if (input_.flip()) ack.largest = 1u << 30 | input_.get<uint32_t>() >> 4;
    ack.refused = input_.number<uint32_t>(0);
    ack.credit = input_.number<uint32_t>(1u << 30);
    ack.delay_us = input_.number<uint32_t>(wire::kAckMostUs);
    ack.queue_us = input_.number<uint32_t>(wire::kAckMostUs);
    ack.share = input_.number<uint32_t>(1);
    ack.words = static_cast<uint8_t>(input_.below(wire::kAckMaxWords + 1));
    ack.room = input_.byte();
    ack.loss = input_.number<uint16_t>(UINT16_MAX);
    ack.ect0 = input_.number<uint32_t>(0);
    ack.ce = input_.number<uint32_t>(0);
    for (uint64_t& word : ack.bitmap) word = ack.largest ? UINT64_MAX : 0;
    return ack;
  }

  Input& input_;
  uint32_t far_ = 1u << 24;
};

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::Input input(data, size);
  gradwire::fuzz::Case(input).run();
  return 0;
}
