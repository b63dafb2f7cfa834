#include "proto/credit/credit.h"
#include "proto/credit/grant_slots.h"
#include "proto/credit/receive_controller.h"

#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_credit(nb::module_& module) {
  nb::class_<Credit>(module, "Credit")
      .def(nb::init<>())
      .def_ro("demand", &Credit::demand)
      .def_ro("share", &Credit::share)
      .def_ro("part", &Credit::part)
      .def_ro("granted", &Credit::granted)
      .def_rw("granted_sent", &Credit::granted_sent)
      .def("outdated", &Credit::outdated, "rtprop"_a);
  nb::class_<CreditPool>(module, "CreditPool")
      .def(nb::init<uint32_t, uint32_t>(), "senders"_a, "standing"_a)
      .def_static("standing_for", &CreditPool::standing_for, "senders"_a, "engines"_a = 1)
      .def("ask", &CreditPool::ask, "credit"_a, "demand"_a)
      .def("lower", &CreditPool::lower, "credit"_a, "most"_a)
      .def(
          "share",
          [](const CreditPool& self, Credit& credit, const DelayWindow& window, uint32_t wire_bytes,
             Nanos rtprop, Nanos round, double loss, double rate, uint64_t largest, bool stalled) {
            return self.share(credit, {rtprop, round, loss, rate, largest, stalled}, window,
                              wire_bytes);
          },
          "credit"_a, "window"_a, "wire_bytes"_a, nb::kw_only(), "rtprop"_a = 0, "round"_a = 0,
          "loss"_a = 0.0, "rate"_a = 0.0, "largest"_a = 0, "stalled"_a = false);
  nb::class_<Arriving>(module, "Arriving")
      .def(nb::init<>())
      .def(
          "count",
          [](Arriving& self, uint64_t number, uint64_t largest, uint64_t size, Nanos now,
             uint64_t packets) { self.count(number, packets, largest, size, now); },
          "number"_a, "largest"_a, "size"_a, "now"_a, "packets"_a = 1)
      .def(
          "loss", [](const Arriving& self, Nanos now) { return self.loss.share(now); }, "now"_a)
      .def("rate", [](const Arriving& self) { return self.rate.bytes_per_second(); });
  nb::class_<ReceiveController>(module, "ReceiveController")
      .def(
          "__init__",
          [](ReceiveController* self, size_t endpoints, uint32_t workers, uint32_t wire_bytes,
             Nanos target, bool server) {
            const auto senders = static_cast<uint32_t>(endpoints - 1);
            new (self)
                ReceiveController({endpoints, senders, workers, wire_bytes, 1e6, target, server});
          },
          nb::kw_only(), "endpoints"_a, "workers"_a, "wire_bytes"_a, "target"_a, "server"_a = false)
      .def("window", &ReceiveController::window, nb::rv_policy::reference_internal)
      .def_ro("credit", &ReceiveController::credit)
      .def("arrived", &ReceiveController::arrived, "source"_a, "queue"_a, "bytes"_a,
           "limited"_a = false)
      .def("marked", &ReceiveController::marked, "round"_a, "now"_a)
      .def("sample", &ReceiveController::sample, "peer"_a, "source"_a, "rtt"_a, "now"_a)
      .def(
          "share",
          [](ReceiveController& self, Credit& grant, const Arriving& source, const Rtt& rtt,
             Nanos now, uint64_t largest,
             bool no_room) { return self.share(grant, {0, source, rtt, largest, no_room}, now); },
          "grant"_a, "source"_a, "rtt"_a, "now"_a, nb::kw_only(), "largest"_a = 0,
          "no_room"_a = false)
      .def("others",
           [](ReceiveController& self) {
             std::vector<uint16_t> peers;
             self.add_others(peers);
             return peers;
           })
      .def_static("packets_per_ack", &ReceiveController::packets_per_ack, "grant"_a, "lossy"_a);
  nb::class_<GrantSlots>(module, "GrantSlots")
      .def(nb::init<size_t>(), "peers"_a)
      .def("ask", &GrantSlots::ask, "peer"_a, "largest"_a, "demand"_a)
      .def(
          "next",
          [](GrantSlots& self, Nanos now) -> std::optional<size_t> {
            const size_t peer = self.next(now);
            return peer == GrantSlots::kNone ? std::nullopt : std::optional(peer);
          },
          "now"_a)
      .def("due", &GrantSlots::due)
      .def("grant", &GrantSlots::grant, "peer"_a, "end"_a, "until"_a);
  nb::class_<Allowance>(module, "Allowance")
      .def(nb::init<>())
      .def_rw("credit", &Allowance::credit)
      .def("left", &Allowance::left, "next"_a);
}

}  // namespace gradwire::parts
