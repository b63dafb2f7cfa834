#include "proto/congestion/circuit_breaker.h"
#include "proto/congestion/competition.h"
#include "proto/congestion/delay_window.h"
#include "proto/congestion/ecn.h"
#include "proto/congestion/loss_count.h"
#include "proto/congestion/loss_law.h"
#include "proto/congestion/queue_delay.h"
#include "proto/congestion/rate_meter.h"
#include "proto/congestion/send_controller.h"
#include "proto/congestion/stretch.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {

void bind_congestion(nb::module_& module) {
  nb::class_<QueueDelay>(module, "QueueDelay")
      .def(nb::init<>())
      .def("sample", &QueueDelay::sample, "sent_us"_a, "arrival"_a, "excess"_a, "now"_a);
  nb::class_<PortDelay>(module, "PortDelay")
      .def(nb::init<size_t>(), "paths"_a)
      .def(
          "add",
          [](PortDelay& self, size_t path, Nanos delay, uint64_t bytes, Nanos now) {
            const PortDelay::Now port = self.add(path, delay, bytes, now);
            return std::pair(port.in_use, port.delay);
          },
          "path"_a, "delay"_a, "bytes"_a, "now"_a);
  nb::class_<RateMeter>(module, "RateMeter")
      .def(nb::init<>())
      .def("add", &RateMeter::add, "bytes"_a, "now"_a, "lossy"_a = false, "sent"_a = 0,
           "losing"_a = 0)
      .def("sent", &RateMeter::sent, "bytes"_a)
      .def("bytes_per_second", &RateMeter::bytes_per_second)
      .def("proven", &RateMeter::proven);
  nb::class_<LossLaw>(module, "LossLaw")
      .def(nb::init<double>(), "evidence"_a)
      .def("room", &LossLaw::room)
      .def("pressed", &LossLaw::pressed)
      .def("pace", &LossLaw::pace)
      .def("left", &LossLaw::left)
      .def("of_path", &LossLaw::of_path)
      .def("floods", &LossLaw::floods, "loss"_a, "use"_a, "now"_a)
      .def("marked", &LossLaw::marked)
      .def("count", &LossLaw::count, "lost"_a, "arrived"_a, "queue"_a)
      .def("queued", &LossLaw::queued, "delay"_a)
      .def(
          "judge",
          [](LossLaw& self, Nanos round, Nanos target, bool lossy, Nanos now, double use) {
            self.judge({round, target, lossy, use}, now);
          },
          "round"_a, "target"_a, "lossy"_a, "now"_a, "use"_a = 1.0);
  nb::class_<LossCount>(module, "LossCount")
      .def(nb::init<>())
      .def(
          "add",
          [](LossCount& self, uint64_t number, uint64_t largest, Nanos queue, Nanos now,
             uint64_t packets) { return self.add(number, packets, largest, queue, now); },
          "number"_a, "largest"_a, "queue"_a, "now"_a, "packets"_a = 1)
      .def("ended", [](const LossCount& self) {
        const LossCount::Period& ended = self.ended();
        return nb::make_tuple(ended.lost, ended.arrived, ended.queue);
      });
  nb::class_<Stretch>(module, "Stretch")
      .def(nb::init<>())
      .def("any", &Stretch::any)
      .def("factor", &Stretch::factor, "loss"_a)
      .def("loss", &Stretch::loss, "share"_a, "told"_a)
      .def("marked", &Stretch::marked)
      .def("queued", &Stretch::queued, "delay"_a)
      .def(
          "epoch",
          [](Stretch& self, double window, double use, Nanos delay, Nanos target, bool limited) {
            self.delivered(use * 1e7, 10 * kMillisecond);
            self.epoch(window, 1e9, delay, target, limited);
          },
          nb::kw_only(), "window"_a, "use"_a, "delay"_a, "target"_a, "limited"_a);
  nb::class_<Competition>(module, "Competition")
      .def(nb::init<>())
      .def("observe", &Competition::observe, "bytes"_a, "epoch"_a, "delay"_a, "target"_a, "slow"_a,
           "now"_a)
      .def("competes", &Competition::competes)
      .def("trying", &Competition::trying);
  nb::class_<CircuitBreaker>(module, "CircuitBreaker")
      .def(nb::init<>())
      .def("sent", &CircuitBreaker::sent, "bytes"_a, "told"_a, "packets"_a = 1)
      .def("lost", &CircuitBreaker::lost)
      .def("arrived", &CircuitBreaker::arrived, "bytes"_a)
      .def("tick", &CircuitBreaker::tick, "now"_a)
      .def("factor", &CircuitBreaker::factor)
      .def("most", &CircuitBreaker::most);
  nb::class_<EcnSeen>(module, "EcnSeen")
      .def(nb::init<>())
      .def_ro("ect0", &EcnSeen::ect0)
      .def_ro("ce", &EcnSeen::ce)
      .def("add", &EcnSeen::add, "ecn"_a, "packets"_a = 1);
  nb::class_<EcnPath>(module, "EcnPath")
      .def(nb::init<>())
      .def("capable", &EcnPath::capable)
      .def("failed", &EcnPath::failed)
      .def("off", &EcnPath::off)
      .def("sent", &EcnPath::sent, "count"_a = 1)
      .def("acked", &EcnPath::acked, "ect"_a, "packets"_a = 1)
      .def("timed_out", &EcnPath::timed_out, "in_a_row"_a)
      .def("given_up", &EcnPath::given_up)
      .def("told", &EcnPath::told, "ect0"_a, "ce"_a);

  nb::class_<DelayWindow>(module, "DelayWindow")
      .def(
          "__init__",
          [](DelayWindow* self, double initial, double minimum, double buffer, Nanos target,
             double evidence, double fewest) {
            new (self) DelayWindow(initial, {minimum, buffer, target, evidence, fewest});
          },
          "initial"_a, "minimum"_a, "buffer"_a, "target"_a, "evidence"_a = 96.0, "fewest"_a = 0.0)
      .def("bytes", &DelayWindow::bytes)
      .def("target", &DelayWindow::target)
      .def("queue_delay", &DelayWindow::queue_delay)
      .def("ramps", &DelayWindow::ramps)
      .def("stretch", nb::overload_cast<double>(&DelayWindow::stretch, nb::const_), "loss"_a)
      .def("room", &DelayWindow::room)
      .def("loss", &DelayWindow::loss, "share"_a, "told"_a)
      .def("count", &DelayWindow::count, "lost"_a, "arrived"_a, "queue"_a)
      .def("sent", &DelayWindow::sent, "bytes"_a)
      .def("rate", &DelayWindow::rate)
      .def("sample", &DelayWindow::sample, "bytes"_a, "queue"_a, "round"_a, "rtprop"_a, "lossy"_a,
           "now"_a, "sent"_a = 0)
      .def("marked", &DelayWindow::marked)
      .def("lost", nb::overload_cast<>(&DelayWindow::lost))
      .def("limited", &DelayWindow::limited);

  using Report = SendController::Report;
  using LongPaths = SendController::LongPaths;
  nb::class_<SendController>(module, "SendController")
      .def(nb::init<uint32_t, Nanos, bool, size_t>(), "wire_bytes"_a, "delay_target"_a,
           "pacing"_a = true, "paths"_a = 2)
      .def("window", &SendController::window, nb::rv_policy::reference_internal)
      .def("throttled", &SendController::throttled)
      .def("on_sent", &SendController::on_sent, "bytes"_a, "now"_a, "packets"_a = 1)
      .def("on_left", &SendController::on_left, "bytes"_a)
      .def("on_lost", &SendController::on_lost)
      .def(
          "on_ack",
          [](SendController& self, size_t path, uint64_t bytes, double loss, double windows,
             Nanos queue, Nanos round, Nanos rtprop, Nanos now, Nanos last_sent) {
            bool asked = false;
            const auto sum = [&] {
              asked = true;
              return windows;
            };
            self.on_ack(Report{path, bytes, loss, queue, round, rtprop, last_sent}, sum, now);
            return asked;
          },
          nb::kw_only(), "path"_a = 0, "bytes"_a, "loss"_a = 0.0, "windows"_a = 0.0, "queue"_a = 0,
          "round"_a, "rtprop"_a, "now"_a, "last_sent"_a = 0)
      .def("marked", &SendController::marked, "sent"_a, "now"_a)
      .def("told", &SendController::told, "path"_a, "room"_a)
      .def("on_timer", &SendController::on_timer, "now"_a)
      .def(
          "pace",
          [](SendController& self, double rate, Nanos now, double unproven, uint32_t far,
             Nanos rtprop, Nanos round, double window, double turn, double turn_rate) {
            self.pace(LongPaths{far, rtprop, round, window}, rate, unproven, {turn, turn_rate},
                      now);
          },
          "rate"_a, "now"_a, nb::kw_only(), "unproven"_a = 0.0, "far"_a = 0, "rtprop"_a = 0,
          "round"_a = 0, "window"_a = 0.0, "turn"_a = 0.0, "turn_rate"_a = 0.0)
      .def("led_by_receiver", &SendController::led_by_receiver)
      .def("room", &SendController::room, "now"_a)
      .def("limited", &SendController::limited)
      .def("quantum", &SendController::quantum)
      .def("wait", &SendController::wait, "now"_a)
      .def("train_sent", &SendController::train_sent, "bytes"_a)
      .def("probe_sent", &SendController::probe_sent, "bytes"_a)
      .def("hold", &SendController::hold, "tokens"_a, "window"_a, "round"_a, "now"_a)
      .def("queued", &SendController::queued)
      .def(
          "copies",
          [](SendController& self, double rate, double unproven, Nanos now) {
            return self.copies(rate, unproven, now).left();
          },
          "rate"_a, "unproven"_a, "now"_a);
}

}  // namespace gradwire::parts
