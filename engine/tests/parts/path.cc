#include "proto/path/path.h"
#include "proto/path/control_frames.h"
#include "proto/path/farewell.h"
#include "proto/path/liveness.h"
#include "proto/path/path_limit.h"
#include "proto/path/started_ops.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_path(nb::module_& module) {
  nb::class_<Liveness::Times>(module, "Times")
      .def(
          "__init__",
          [](Liveness::Times* self, Nanos interval, Nanos timeout) {
            new (self) Liveness::Times{interval, timeout};
          },
          "interval"_a, "timeout"_a);
  nb::class_<Liveness>(module, "Liveness")
      .def(nb::init<>())
      .def_rw("last_heard", &Liveness::last_heard)
      .def_ro("heard", &Liveness::heard)
      .def_rw("connected", &Liveness::connected)
      .def_rw("last_ping", &Liveness::last_ping)
      .def("note", &Liveness::note, "now"_a)
      .def("interval", &Liveness::interval, "times"_a, "failed"_a, "now"_a)
      .def("ping_due", &Liveness::ping_due, "times"_a, "failed"_a, "now"_a)
      .def("next_ping", &Liveness::next_ping, "times"_a, "failed"_a);

  nb::class_<Stash>(module, "Stash")
      .def(nb::init<>())
      .def("size", &Stash::size)
      .def(
          "add",
          [](Stash& self, uint64_t op, nb::bytes datagram) {
            self.add(op, {reinterpret_cast<const uint8_t*>(datagram.c_str()), datagram.size()});
          },
          "op"_a, "datagram"_a)
      .def(
          "take",
          [](Stash& self, uint64_t op) {
            std::vector<nb::bytes> out;
            for (const Stash::Datagram& each : self.take(op))
              out.emplace_back(reinterpret_cast<const char*>(each.data()), each.size());
            return out;
          },
          "op"_a);

  nb::class_<Farewell>(module, "Farewell")
      .def(nb::init<>())
      .def_rw("gone", &Farewell::gone)
      .def_rw("acknowledged", &Farewell::acknowledged)
      .def_ro("errors_left", &Farewell::errors_left)
      .def_ro("next", &Farewell::next)
      .def("lanes", &Farewell::lanes, "count"_a)
      .def("note", &Farewell::note, "lane"_a, "number"_a)
      .def("told", &Farewell::told)
      .def("complete", &Farewell::complete, "op"_a)
      .def("fail", &Farewell::fail, "now"_a)
      .def("error_sent", &Farewell::error_sent, "now"_a)
      .def("leave", &Farewell::leave, "reliable"_a, "now"_a)
      .def("bye_sent", &Farewell::bye_sent, "now"_a)
      .def("over", &Farewell::over, "met"_a, "failed"_a);

  nb::class_<StartedOps>(module, "StartedOps")
      .def(nb::init<>())
      .def("contains", &StartedOps::contains, "op"_a)
      .def("next_of", &StartedOps::next_of, "id"_a)
      .def("note_next", &StartedOps::note_next, "id"_a);

  nb::class_<PathLimit>(module, "PathLimit")
      .def(nb::init<uint32_t>(), "agreed"_a)
      .def("bytes", &PathLimit::bytes)
      .def("reduced", &PathLimit::reduced)
      .def("lower", &PathLimit::lower, "bytes"_a, "now"_a = 0)
      .def("arrived", &PathLimit::arrived, "bytes"_a)
      .def("both_ways", &PathLimit::both_ways)
      .def("claimed", &PathLimit::claimed, "bytes"_a, "now"_a)
      .def("sent", &PathLimit::sent, "bytes"_a, "now"_a, "count"_a = 1)
      .def("acked", &PathLimit::acked, "bytes"_a)
      .def("suspect", &PathLimit::suspect, "now"_a, "round"_a)
      .def("try_out", &PathLimit::try_out, "now"_a, "interval"_a)
      .def("on_trial", &PathLimit::on_trial)
      .def("ping", &PathLimit::ping, "now"_a, "stamp"_a)
      .def("answered", &PathLimit::answered, "stamp"_a, "now"_a, "round"_a)
      .def("next_ping", &PathLimit::next_ping)
      .def("next_timer", &PathLimit::next_timer, "round"_a)
      .def_static("shorter", &PathLimit::shorter, "bytes"_a);

  nb::class_<ControlFrames>(module, "ControlFrames")
      .def(nb::init<>())
      .def(
          "push",
          [](ControlFrames& self, uint32_t part) { self.push({0, wire::Kind::open, part, {}}); },
          "part"_a)
      .def("open", &ControlFrames::open)
      .def("waiting", &ControlFrames::waiting)
      .def("take", &ControlFrames::take)
      .def("live", &ControlFrames::live, "handle"_a)
      .def(
          "at", [](const ControlFrames& self, uint32_t handle) { return self.at(handle).part; },
          "handle"_a)
      .def("again", &ControlFrames::again, "handle"_a)
      .def("release", &ControlFrames::release, "handle"_a);
}

}  // namespace gradwire::parts
