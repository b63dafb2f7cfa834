#include <span>
#include <tuple>
#include <vector>

#include "proto/push/aggregator.h"
#include "proto/push/passes.h"
#include "proto/push/push_sender.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

std::span<const uint8_t> span_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

}  // namespace

void bind_push(nb::module_& module) {
  nb::class_<Grid>(module, "Grid")
      .def(nb::init<const Plan&, uint32_t, uint16_t>(), "plan"_a, "datagram"_a, "aggregators"_a)
      .def("chunks", &Grid::chunks)
      .def("length", &Grid::length, "chunk"_a);

  nb::class_<PassSender>(module, "PassSender")
      .def(
          "__init__",
          [](PassSender* self, uint32_t begin, uint32_t end) {
            new (self) PassSender(Grid::Shard{begin, end});
          },
          "begin"_a, "end"_a)
      .def("add", &PassSender::add, "chunk"_a)
      .def("seal", &PassSender::seal)
      .def("number", &PassSender::pass)
      .def("backlog", &PassSender::backlog)
      .def("settled", &PassSender::settled)
      .def("next",
           [](PassSender& self) -> std::optional<std::tuple<uint32_t, bool>> {
             uint32_t chunk = 0;
             bool again = false;
             if (!self.next(chunk, again)) return std::nullopt;
             return std::tuple(chunk, again);
           })
      .def("take_probe", &PassSender::take_probe)
      .def(
          "bitmap_part",
          [](PassSender& self, uint32_t pass, uint32_t index, const nb::bytes& part,
             uint32_t part_bytes) {
            return self.bitmap_part(pass, index, span_of(part), part_bytes);
          },
          "number"_a, "index"_a, "part"_a, "part_bytes"_a)
      .def("stop", &PassSender::stop, "number"_a)
      .def("decided", &PassSender::decided, "chunk"_a);
  nb::class_<PassReceiver>(module, "PassReceiver")
      .def(nb::init<>())
      .def("probe", &PassReceiver::probe, "number"_a)
      .def("waiting", &PassReceiver::waiting)
      .def("answer", &PassReceiver::answer)
      .def("stop", &PassReceiver::stop)
      .def("stopped", &PassReceiver::stopped);

  nb::class_<PushSender>(module, "PushSender")
      .def(
          "__init__",
          [](PushSender* self, const Plan& plan, const Grid& grid, size_t aggregator,
             const std::vector<uint32_t>& critical, bool may_differ) {
            new (self) PushSender(plan, grid, grid.shards.at(aggregator), critical, {}, may_differ);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "critical"_a = std::vector<uint32_t>{},
          "may_differ"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("backlog", &PushSender::backlog, "fresh"_a = true)
      .def("settled", &PushSender::settled)
      .def(
          "next",
          [](PushSender& self, bool fresh) -> std::optional<std::tuple<uint32_t, bool>> {
            uint32_t chunk = 0;
            bool again = false;
            if (!self.next(chunk, again, fresh)) return std::nullopt;
            return std::tuple(chunk, again);
          },
          "fresh"_a = true)
      .def("peek",
           [](PushSender& self) -> std::optional<uint32_t> {
             uint32_t chunk = 0;
             return self.peek(chunk) ? std::optional(chunk) : std::nullopt;
           })
      .def("in_tail", &PushSender::in_tail)
      .def("acked", &PushSender::acked, "chunk"_a)
      .def("lost", &PushSender::lost, "chunk"_a, "why"_a)
      .def("stop_region", &PushSender::stop_region, "region"_a)
      .def("decided", &PushSender::decided, "chunk"_a)
      .def("finish", &PushSender::finish)
      .def("take_forgiven", &PushSender::take_forgiven);

  nb::class_<Aggregator> aggregator(module, "Aggregator");
  nb::enum_<Aggregator::Added>(module, "Added")
      .value("counted", Aggregator::Added::counted)
      .value("ignored", Aggregator::Added::ignored)
      .value("no_memory", Aggregator::Added::no_memory)
      .value("malformed", Aggregator::Added::malformed);
  aggregator
      .def(
          "__init__",
          [](Aggregator* self, const Plan& plan, const Grid& grid, size_t shard, uint16_t workers,
             Memory& memory) {
            new (self) Aggregator(plan, grid, grid.shards.at(shard), workers, Aggregator::kNoSelf,
                                  nullptr, memory);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "workers"_a, "memory"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>())
      .def(
          "open",
          [](Aggregator& self, uint16_t worker, const std::vector<uint32_t>& critical, Nanos now) {
            self.open(worker, critical, now);
          },
          "worker"_a, "critical"_a, "now"_a)
      .def(
          "add",
          [](Aggregator& self, uint16_t worker, uint32_t chunk, const nb::bytes& payload, bool tail,
             Nanos now) { return self.add(worker, chunk, span_of(payload), tail, now); },
          "worker"_a, "chunk"_a, "payload"_a, "tail"_a, "now"_a)
      .def("forgive", &Aggregator::forgive, "worker"_a, "chunk"_a)
      .def("on_timer", &Aggregator::on_timer, "now"_a)
      .def("next_timer", &Aggregator::next_timer)
      .def("finished", &Aggregator::finished)
      .def("all_final", &Aggregator::all_final)
      .def("result", &Aggregator::result, "chunk"_a)
      .def("take_stops",
           [](Aggregator& self) {
             std::vector<std::tuple<uint16_t, uint32_t>> out;
             for (const Aggregator::Stop& stop : self.take_stops())
               out.emplace_back(stop.worker, stop.region);
             return out;
           })
      .def("undecided", &Aggregator::undecided, "worker"_a)
      .def("waiting_for", &Aggregator::waiting_for);
}

}  // namespace gradwire::parts
