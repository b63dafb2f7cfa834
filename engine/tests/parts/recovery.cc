#include <array>
#include <numeric>
#include <tuple>
#include <vector>

#include "proto/recovery/acknowledger.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/recovery.h"
#include "proto/recovery/repetition.h"
#include "tests/parts/parts.h"
#include "wire/packet.h"

namespace gradwire::parts {
namespace {

// Packets with these fields, which go together; their numbers are the next ones, and their items
// are the same.
void send(Recovery& self, Nanos now, wire::Kind kind, uint16_t bytes, bool recovers,
          size_t packets) {
  SentPacket packet;
  packet.kind = kind;
  packet.bytes = bytes;
  packet.recovers = recovers;
  std::vector<uint32_t> items(packets);
  std::iota(items.begin(), items.end(), static_cast<uint32_t>(self.next()));
  self.send(packet, items, now);
}

auto numbers(const std::vector<Recovery::Lost>& lost) {
  std::vector<std::tuple<uint64_t, Again>> out;
  for (const Recovery::Lost& each : lost) out.emplace_back(each.packet.number, each.why);
  return out;
}

wire::Ack make_ack(uint32_t largest, const std::vector<uint64_t>& bitmap, uint32_t refused,
                   uint32_t delay_us) {
  wire::Ack ack{};
  ack.largest = largest;
  ack.refused = refused;
  ack.delay_us = delay_us;
  ack.words = static_cast<uint16_t>(bitmap.size());
  std::copy(bitmap.begin(), bitmap.end(), ack.bitmap);
  return ack;
}

}  // namespace

void bind_recovery(nb::module_& module) {
  nb::enum_<wire::Kind>(module, "Kind")
      .value("push", wire::Kind::push)
      .value("pull", wire::Kind::pull)
      .value("close", wire::Kind::close);

  nb::class_<wire::Ack>(module, "Ack")
      .def(
          "__init__",
          [](wire::Ack* self, uint32_t largest, const std::vector<uint64_t>& bitmap,
             uint32_t refused, uint32_t delay_us) {
            new (self) wire::Ack(make_ack(largest, bitmap, refused, delay_us));
          },
          "largest"_a, "bitmap"_a, nb::kw_only(), "refused"_a = 0, "delay_us"_a = 0)
      .def_ro("largest", &wire::Ack::largest)
      .def_ro("refused", &wire::Ack::refused)
      .def_ro("delay_us", &wire::Ack::delay_us)
      .def_ro("queue_us", &wire::Ack::queue_us)
      .def_prop_ro("bitmap", [](const wire::Ack& ack) {
        return std::vector<uint64_t>(ack.bitmap, ack.bitmap + ack.words);
      });

  nb::class_<PathProfile>(module, "PathProfile")
      .def_ro("growth", &PathProfile::growth)
      .def_ro("spreads", &PathProfile::spreads)
      .def_ro("unasked", &PathProfile::unasked);
  module.def("profile_of", &profile_of, "rtprop"_a, nb::rv_policy::reference);
  nb::class_<Rtt>(module, "Rtt")
      .def(nb::init<>())
      .def("sample", &Rtt::sample, "latest"_a, "ack_delay"_a, "now"_a)
      .def("any", &Rtt::any)
      .def("smoothed", &Rtt::smoothed)
      .def("round", &Rtt::round)
      .def("minimum", &Rtt::minimum)
      .def("profile", &Rtt::profile, nb::rv_policy::reference)
      .def("probe_timeout", &Rtt::probe_timeout);

  nb::class_<LossMeter>(module, "LossMeter")
      .def(nb::init<>())
      .def("add", &LossMeter::add, "lost"_a, "arrived"_a, "now"_a)
      .def("late", &LossMeter::late, "packets"_a = 1)
      .def("share", &LossMeter::share, "now"_a);

  module.def(
      "repeat_after",
      [](double to, double from, Nanos round, bool queued) {
        return repeat_after({to, from}, round, queued);
      },
      "to"_a, "from_"_a, "round"_a, "queued"_a);
  module.def(
      "repeats",
      [](double to, Nanos round, bool more, bool blocked) {
        const Repeats after({to, 0}, round, false, more, blocked);
        return std::pair(after.control, after.data);
      },
      "to"_a, "round"_a, "more"_a, "blocked"_a);
  nb::class_<Twins>(module, "Twins")
      .def(nb::init<>())
      .def("arrived", &Twins::arrived, "packets"_a)
      .def("of_lost", &Twins::of_lost, "loss"_a)
      .def("of_last", &Twins::of_last, "loss"_a)
      .def("take", &Twins::take)
      .def("queued", &Twins::queued, "now"_a)
      .def("apt", &Twins::apt, "round"_a, "now"_a)
      .def_static("last", &Twins::last, "loss"_a, "others"_a);
  nb::class_<Copies>(module, "Copies")
      .def(nb::init<>())
      .def("sent", &Copies::sent, "packets"_a = 1)
      .def("refill", &Copies::refill, "per_second"_a, "now"_a)
      .def("next", &Copies::next, "now"_a)
      .def("left", &Copies::left)
      .def("lacking", &Copies::lacking);
  nb::class_<FirstRound>(module, "FirstRound")
      .def(nb::init<>())
      .def("add", &FirstRound::add, "round"_a, "window"_a)
      .def("rate", &FirstRound::rate, "window"_a);

  nb::class_<SentPackets>(module, "SentPackets")
      .def(nb::init<>())
      .def("push",
           [](SentPackets& self) {
             const uint32_t item = 0;
             self.push({}, {&item, 1});
             return self.next() - 1;
           })
      .def(
          "settle",
          [](SentPackets& self, uint64_t number, bool acked) {
            if (acked)
              self.acknowledge(number, 1);
            else
              self.give_up(number, false);
            self.advance();
          },
          "number"_a, "acked"_a)
      .def("lowest", &SentPackets::lowest)
      .def("oldest", &SentPackets::oldest)
      .def(
          "open",
          [](const SentPackets& self, uint64_t number) {
            return self.in(SentPackets::kOpen, number);
          },
          "number"_a);

  nb::class_<Recovery>(module, "Recovery")
      .def(nb::init<>())
      .def_ro("rtt", &Recovery::rtt)
      .def("next", &Recovery::next)
      .def("lowest", &Recovery::lowest)
      .def("in_flight", nb::overload_cast<>(&Recovery::in_flight, nb::const_))
      .def("full", &Recovery::full)
      .def("room", &Recovery::room)
      .def("send", &send, "now"_a, "kind"_a = wire::Kind::push, "bytes"_a = 1'000,
           "recovers"_a = true, "packets"_a = 1)
      .def(
          "on_ack",
          [](Recovery& self, const wire::Ack& ack, Nanos now) {
            Recovery::Acked acked;
            const bool valid = self.on_ack(ack, now, acked);
            return std::tuple(valid, acked.items, acked.bytes, acked.in_flight, acked.spurious);
          },
          "ack"_a, "now"_a)
      .def("latest", &Recovery::latest)
      .def(
          "detect_losses",
          [](Recovery& self, Nanos now) {
            std::vector<Recovery::Lost> lost;
            self.detect_losses(now, lost);
            return numbers(lost);
          },
          "now"_a)
      .def("loss_due", &Recovery::loss_due)
      .def("largest_acked", &Recovery::largest_acked)
      .def("refused", &Recovery::refused, "now"_a)
      .def("waiting", &Recovery::waiting)
      .def("next_timeout", &Recovery::next_timeout, "heard"_a, "now"_a)
      .def(
          "on_timeout",
          [](Recovery& self, Nanos heard, Nanos now, bool more) {
            std::vector<Recovery::Lost> lost;
            const bool due = self.on_timeout(heard, more, now, lost);
            return std::tuple(due, numbers(lost));
          },
          "heard"_a, "now"_a, nb::kw_only(), "more"_a = false)
      .def("timeouts", &Recovery::timeouts)
      .def("probes", &Recovery::probes)
      .def("end_probes", &Recovery::end_probes)
      .def("starve", &Recovery::starve, "now"_a)
      .def("feed", &Recovery::feed)
      .def("forget_control", &Recovery::forget_control)
      .def(
          "repeat",
          [](Recovery& self, Nanos control, Nanos data, Copies& copies, Nanos now) {
            Repeats after({}, 0, false, false, false);
            after.control = control;
            after.data = data;
            std::vector<Recovery::Lost> lost;
            const Nanos next = self.repeat(after, copies, now, lost);
            return std::tuple(next, numbers(lost));
          },
          "control"_a, "data"_a, "copies"_a, "now"_a)
      .def(
          "give_up_longer",
          [](Recovery& self, uint32_t bytes) {
            std::vector<Recovery::Lost> lost;
            self.give_up_longer(bytes, lost);
            return numbers(lost);
          },
          "bytes"_a);

  nb::class_<Acknowledger>(module, "Acknowledger")
      .def(nb::init<>())
      .def("largest", &Acknowledger::largest)
      .def("seen", &Acknowledger::seen, "number"_a)
      .def("doubtful", &Acknowledger::doubtful, "number"_a, "granted"_a)
      .def(
          "arrived",
          [](Acknowledger& self, Nanos queue, uint64_t bytes, Nanos now, uint64_t packets) {
            self.arrived(queue, packets, bytes, now);
          },
          "queue"_a, "bytes"_a, "now"_a, "packets"_a = 1)
      .def(
          "record",
          [](Acknowledger& self, uint64_t number, bool refused, Nanos arrival, uint64_t packets) {
            return self.record(number, packets, refused, arrival);
          },
          "number"_a, "refused"_a, "arrival"_a, "packets"_a = 1)
      .def("hurry", &Acknowledger::hurry)
      .def("after", &Acknowledger::after, "packets"_a)
      .def("repeat", &Acknowledger::repeat, "apart"_a, "round"_a, "now"_a)
      .def("next_timer", &Acknowledger::next_timer)
      .def("due", &Acknowledger::due, "rtprop"_a, "now"_a)
      .def(
          "fill",
          [](Acknowledger& self, uint64_t span, uint64_t most_words, Nanos now) {
            wire::Ack ack{};
            self.fill(ack, span, most_words, now);
            return ack;
          },
          "span"_a, "most_words"_a, "now"_a)
      .def("sent", &Acknowledger::sent, "now"_a);
}

}  // namespace gradwire::parts
