#include "proto/base/again.h"
#include "proto/base/agenda.h"
#include "proto/base/memory.h"
#include "proto/base/time.h"
#include "proto/base/token_bucket.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_base(nb::module_& module) {
  module.attr("NEVER") = kNever;

  nb::enum_<Again>(module, "Again")
      .value("lost", Again::lost)
      .value("refused", Again::refused)
      .value("probe", Again::probe)
      .value("repeat", Again::repeat);

  nb::class_<TokenBucket>(module, "TokenBucket")
      .def(nb::init<>())
      .def("refill", &TokenBucket::refill, "per_second"_a, "depth"_a, "now"_a)
      .def("clear", &TokenBucket::clear)
      .def("reset", &TokenBucket::reset, "now"_a)
      .def("spend", nb::overload_cast<double>(&TokenBucket::spend), "tokens"_a)
      .def("spend", nb::overload_cast<double, double>(&TokenBucket::spend), "tokens"_a, "floor"_a)
      .def("tokens", &TokenBucket::tokens)
      .def("wait", &TokenBucket::wait, "tokens"_a, "per_second"_a);

  nb::class_<Agenda> agenda(module, "Agenda");
  agenda.def(nb::init<size_t>(), "size"_a)
      .def("set", &Agenda::set, "index"_a, "due"_a)
      .def("earliest", &Agenda::earliest)
      .def("due", &Agenda::due, "now"_a, "start"_a = 0);
  agenda.attr("NONE") = Agenda::kNone;

  nb::class_<Memory>(module, "Memory")
      .def(
          "__init__", [](Memory* self, uint64_t limit) { new (self) Memory{limit}; }, "limit"_a)
      .def_rw("ops", &Memory::ops)
      .def_rw("waiting", &Memory::waiting);
}

}  // namespace gradwire::parts
