#include "proto/plan/lanes.h"
#include "proto/sched/scheduler.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_sched(nb::module_& module) {
  module.def("id_of", &id_of, "number"_a, "lane"_a);

  nb::class_<Scheduler> scheduler(module, "Scheduler");
  nb::class_<Scheduler::Choice>(module, "Choice")
      .def_ro("to", &Scheduler::Choice::to)
      .def_ro("probe", &Scheduler::Choice::probe)
      .def_ro("stalled", &Scheduler::Choice::stalled);
  scheduler.def(nb::init<size_t>(), "destinations"_a)
      .def(
          "set_waiting",
          [](Scheduler& self, uint16_t to, uint64_t op, uint32_t ready, uint32_t early) {
            self.set_waiting(to, op, {ready, early});
          },
          "to"_a, "op"_a, "ready"_a, "early"_a = 0)
      .def("backlog", &Scheduler::backlog, "to"_a, "room"_a = true)
      .def("next_lane", &Scheduler::next_lane, "to"_a, "room"_a = true)
      .def("timed_out", &Scheduler::timed_out, "to"_a)
      .def("next_op", &Scheduler::next_op, "to"_a, "start"_a)
      .def(
          "set_destination",
          [](Scheduler& self, uint16_t to, uint64_t backlog, uint64_t credit, uint32_t probes,
             bool closed) { self.set_destination(to, {backlog, credit, probes, closed}); },
          "to"_a, "backlog"_a, "credit"_a, "probes"_a = 0, "closed"_a = false)
      .def(
          "choose",
          [](const Scheduler& self, bool open, const std::vector<bool>& held) {
            return self.choose(open, [&](uint16_t to) { return to < held.size() && held[to]; });
          },
          "open"_a = true, "held"_a = std::vector<bool>{})
      .def("went", &Scheduler::went, "to"_a);
  scheduler.attr("NOWHERE") = Scheduler::kNowhere;
  scheduler.attr("NO_OP") = Scheduler::kNoOp;
}

}  // namespace gradwire::parts
