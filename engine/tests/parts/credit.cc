#include "proto/credit/credit.h"

#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_credit(nb::module_& module) {
  nb::class_<Credit>(module, "Credit")
      .def(nb::init<>())
      .def_ro("demand", &Credit::demand)
      .def_ro("share", &Credit::share)
      .def_ro("part", &Credit::part)
      .def_ro("granted", &Credit::granted)
      .def_rw("granted_sent", &Credit::granted_sent);
  nb::class_<CreditPool>(module, "CreditPool")
      .def(nb::init<uint32_t, uint32_t>(), "senders"_a, "standing"_a)
      .def_static("standing_for", &CreditPool::standing_for, "senders"_a)
      .def("ask", &CreditPool::ask, "credit"_a, "demand"_a)
      .def(
          "share",
          [](const CreditPool& self, Credit& credit, const DelayWindow& window, uint32_t wire_bytes,
             Nanos rtprop, Nanos round, double loss, double rate, uint64_t largest, bool stalled) {
            return self.share(credit, {rtprop, round, loss, rate, largest, stalled}, window,
                              wire_bytes);
          },
          "credit"_a, "window"_a, "wire_bytes"_a, nb::kw_only(), "rtprop"_a = 0, "round"_a = 0,
          "loss"_a = 0.0, "rate"_a = 0.0, "largest"_a = 0, "stalled"_a = false);
  nb::class_<Allowance>(module, "Allowance")
      .def(nb::init<>())
      .def_rw("credit", &Allowance::credit)
      .def("left", &Allowance::left, "next"_a);
}

}  // namespace gradwire::parts
