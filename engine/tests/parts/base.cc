#include "proto/base/again.h"
#include "proto/base/agenda.h"
#include "proto/base/memory.h"
#include "proto/base/message.h"
#include "proto/base/reassembly.h"
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
      .def_rw("waiting", &Memory::waiting)
      .def_rw("early", &Memory::early)
      .def("has_op", &Memory::has_op, "bytes"_a, nb::kw_only(), "first"_a, "own"_a = 0)
      .def("has_early", &Memory::has_early, "bytes"_a)
      .def("has_waiting", &Memory::has_waiting, "bytes"_a)
      .def_static("least_limit", &Memory::least_limit, "bytes"_a);

  using Result = MessageReceiver::Result;
  nb::class_<MessageReceiver> message(module, "MessageReceiver");
  nb::enum_<Result>(message, "Result")
      .value("incomplete", Result::incomplete)
      .value("complete", Result::complete)
      .value("malformed", Result::malformed);
  message.def(nb::init<>())
      .def(
          "part",
          [](MessageReceiver& self, uint32_t index, const nb::bytes& payload, uint32_t part_bytes,
             uint64_t most) { return self.part(index, span_of(payload), part_bytes, most); },
          "index"_a, "payload"_a, "part_bytes"_a, "most"_a = uint64_t{kMaxMessage})
      .def("done", &MessageReceiver::done)
      .def("held", &MessageReceiver::held)
      .def("beginning", [](const MessageReceiver& self) { return bytes_of(self.beginning()); })
      .def("take", [](MessageReceiver& self) { return bytes_of(self.take()); });
  message.attr("PREFIX") = kPartPrefix;
  message.attr("MOST") = kMaxMessage;
  message.def_static("cost", &MessageReceiver::cost, "bytes"_a);

  nb::class_<Reassembly>(module, "Reassembly")
      .def(nb::init<>())
      .def(
          "add",
          [](Reassembly& self, uint32_t number, uint16_t total, uint8_t index, uint8_t count,
             const nb::bytes& part, uint32_t most) {
            return bytes_of(self.add({number, total, index, count}, span_of(part), most));
          },
          "number"_a, "total"_a, "index"_a, "count"_a, "part"_a, "most"_a);
}

}  // namespace gradwire::parts
