// The module gradwire_lab._link: TapLink and LinkQueue, the lab's own link, over TAP devices and in
// virtual time. gradwire itself does not use it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "binding/errors.h"
#include "lab/tap_link.h"

namespace gradwire::binding {
namespace {

using namespace nb::literals;

lab::WireOptions make_options(int64_t delay, int64_t jitter, bool keep_order, double rate,
                              uint64_t queue_bytes, uint64_t ecn_bytes, double loss,
                              double loss_burst, uint64_t memory_bytes) {
  lab::WireOptions options{delay,     jitter, keep_order, rate,        queue_bytes,
                           ecn_bytes, loss,   loss_burst, memory_bytes};
  if (const std::string wrong = options.validate(); !wrong.empty()) {
    throw nb::value_error(wrong.c_str());
  }
  return options;
}

size_t known(int direction) {
  if (direction != 0 && direction != 1) throw nb::index_error("a link has directions 0 and 1");
  return static_cast<size_t>(direction);
}

nb::dict counters_dict(const lab::WireCounters& counters) {
  nb::dict out;
  out["packets"] = counters.packets;
  out["bytes"] = counters.bytes;
  out["delivered"] = counters.delivered;
  out["dropped_queue"] = counters.dropped_queue;
  out["dropped_queue_bytes"] = counters.dropped_queue_bytes;
  out["marked"] = counters.marked;
  out["queue_bytes"] = counters.queue_bytes;
  out["dropped_loss"] = counters.dropped_loss;
  out["dropped_memory"] = counters.dropped_memory;
  out["max_queue_bytes"] = counters.max_queue_bytes;
  return out;
}

}  // namespace

void bind_link(nb::module_& module) {
  nb::class_<lab::LinkQueue> queue(module, "LinkQueue",
                                   "One direction of the lab's own link, in virtual time.");
  queue.def(nb::init<bool, uint64_t>(), nb::kw_only(), "headed"_a = false, "seed"_a = 0)
      .def(
          "offer",
          [](lab::LinkQueue& self, int64_t now, const nb::bytes& frame) {
            self.offer(now, {reinterpret_cast<const uint8_t*>(frame.data()), frame.size()});
          },
          "now"_a, "frame"_a)
      .def(
          "take",
          [](lab::LinkQueue& self, int64_t now) -> std::optional<nb::bytes> {
            std::vector<uint8_t> frame;
            if (!self.take(now, frame)) return std::nullopt;
            return nb::bytes(frame.data(), frame.size());
          },
          "now"_a)
      .def("next_event",
           [](const lab::LinkQueue& self) -> std::optional<int64_t> {
             const Nanos next = self.next_event();
             return next == kNever ? std::nullopt : std::optional<int64_t>(next);
           })
      .def("counters", [](const lab::LinkQueue& self) {
        nb::dict out = counters_dict(self.counters());
        out["held_bytes"] = self.held_bytes();
        return out;
      });
  queue.def(
      "set",
      [](lab::LinkQueue& self, int64_t now, int64_t delay, int64_t jitter, bool keep_order,
         double rate, uint64_t queue_bytes, uint64_t ecn_bytes, double loss, double loss_burst,
         uint64_t memory_bytes) {
        self.set_options(now, make_options(delay, jitter, keep_order, rate, queue_bytes, ecn_bytes,
                                           loss, loss_burst, memory_bytes));
      },
      "now"_a, nb::kw_only(), "delay_ns"_a = 0, "jitter_ns"_a = 0, "keep_order"_a = true,
      "rate"_a = 0.0, "queue_bytes"_a = 0, "ecn_bytes"_a = 0, "loss"_a = 0.0, "loss_burst"_a = 0.0,
      "memory_bytes"_a = lab::WireOptions{}.memory_bytes);

  nb::class_<lab::TapLink>(module, "TapLink",
                           "The lab's own link: a thread between two TAP devices, without the GIL.")
      .def(nb::init<int, int, bool, uint64_t>(), "first"_a, "second"_a, nb::kw_only(),
           "headed"_a = true, "seed"_a = 0)
      .def(
          "set",
          [](lab::TapLink& self, int direction, int64_t delay, int64_t jitter, bool keep_order,
             double rate, uint64_t queue_bytes, uint64_t ecn_bytes, double loss, double loss_burst,
             uint64_t memory_bytes) {
            const size_t which = known(direction);
            const lab::WireOptions options =
                make_options(delay, jitter, keep_order, rate, queue_bytes, ecn_bytes, loss,
                             loss_burst, memory_bytes);
            const nb::gil_scoped_release release;
            self.set_options(which, options);
          },
          "direction"_a, nb::kw_only(), "delay_ns"_a = 0, "jitter_ns"_a = 0, "keep_order"_a = true,
          "rate"_a = 0.0, "queue_bytes"_a = 0, "ecn_bytes"_a = 0, "loss"_a = 0.0,
          "loss_burst"_a = 0.0, "memory_bytes"_a = lab::WireOptions{}.memory_bytes)
      .def(
          "counters",
          [](lab::TapLink& self, int direction) {
            const size_t which = known(direction);
            lab::TapCounters counters;
            {
              const nb::gil_scoped_release release;
              counters = self.counters(which);
            }
            nb::dict out = counters_dict(counters.wire);
            out["frames"] = counters.frames;
            out["refused"] = counters.refused;
            out["total_lateness_ns"] = counters.total_lateness;
            out["max_lateness_ns"] = counters.max_lateness;
            return out;
          },
          "direction"_a)
      .def("processor_time_ns", &lab::TapLink::processor_time)
      .def("failure", [](lab::TapLink& self) { return to_text(self.failure()); })
      .def("close", [](lab::TapLink& self) {
        const nb::gil_scoped_release release;
        self.close();
      });
}

}  // namespace gradwire::binding

namespace nb = nanobind;

NB_MODULE(_link, module) {
  module.doc() = "The links of gradwire's lab";
  nb::set_leak_warnings(false);
  nb::register_exception_translator(gradwire::binding::translate_system_error);
  gradwire::binding::bind_link(module);
}
