#include <nanobind/ndarray.h>

#include <span>
#include <tuple>
#include <vector>

#include "proto/push/aggregator.h"
#include "proto/push/passes.h"
#include "proto/push/push_sender.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

using OwnArray = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_push(nb::module_& module) {
  nb::class_<Grid>(module, "Grid")
      .def(nb::init<const Plan&, uint32_t, uint16_t>(), "plan"_a, "datagram"_a, "aggregators"_a)
      .def("chunks", &Grid::chunks)
      .def("length", &Grid::length, "chunk"_a)
      .def(
          "part",
          [](const Grid& self, uint32_t begin, uint32_t end, uint32_t region) {
            const Grid::Shard part = self.part({begin, end}, region);
            return std::pair(part.begin, part.end);
          },
          "begin"_a, "end"_a, "region"_a);

  nb::class_<ChunkSender>(module, "ChunkSender")
      .def("backlog", &ChunkSender::backlog, "fresh"_a = true)
      .def("settled", &ChunkSender::settled)
      .def(
          "next",
          [](ChunkSender& self, bool fresh) -> std::optional<std::tuple<uint32_t, bool>> {
            const ChunkSender::Slice slice = self.next(1, fresh);
            if (slice.chunks.empty()) return std::nullopt;
            return std::tuple(slice.chunks[0], slice.again);
          },
          "fresh"_a = true)
      .def(
          "slice",
          [](ChunkSender& self, size_t most) {
            const ChunkSender::Slice slice = self.next(most, true);
            const std::vector<uint32_t> chunks(slice.chunks.begin(), slice.chunks.end());
            return std::tuple(chunks, slice.again, slice.tail);
          },
          "most"_a)
      .def("peek",
           [](ChunkSender& self) -> std::optional<uint32_t> {
             uint32_t chunk = 0;
             return self.peek(chunk, true) ? std::optional(chunk) : std::nullopt;
           })
      .def("in_last", &ChunkSender::in_last, "share"_a)
      .def("in_flight", &ChunkSender::in_flight, "chunk"_a)
      .def(
          "acked", [](ChunkSender& self, uint32_t chunk) { self.acked({&chunk, 1}); }, "chunk"_a)
      .def("lost", &ChunkSender::lost, "chunk"_a, "why"_a)
      .def("forget", &ChunkSender::forget, "chunk"_a)
      .def("stop_region", &ChunkSender::stop_region, "region"_a)
      .def("take_forgiven", &ChunkSender::take_forgiven)
      .def("finish", &ChunkSender::finish);
  nb::class_<StreamPush, ChunkSender>(module, "StreamPush")
      .def(
          "__init__",
          [](StreamPush* self, const Plan& plan, const Grid& grid, size_t aggregator,
             const std::vector<uint32_t>& critical) {
            const Grid::Shard& shard = grid.shards.at(aggregator);
            new (self)
                StreamPush(plan, grid, shard, PushList(plan, grid, shard, shard.set_of(critical)));
          },
          "plan"_a, "grid"_a, "aggregator"_a, "critical"_a = std::vector<uint32_t>{},
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<SparePush, ChunkSender>(module, "SparePush")
      .def(
          "__init__",
          [](SparePush* self, const Plan& plan, const Grid& grid, size_t aggregator,
             const std::vector<uint32_t>& critical) {
            const Grid::Shard& shard = grid.shards.at(aggregator);
            new (self)
                SparePush(plan, grid, shard, PushList(plan, grid, shard, shard.set_of(critical)));
          },
          "plan"_a, "grid"_a, "aggregator"_a, "critical"_a = std::vector<uint32_t>{},
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  module.def(
      "make_push_sender",
      [](const Plan& plan, const Grid& grid, size_t aggregator, bool may_differ) {
        const Grid::Shard& shard = grid.shards.at(aggregator);
        PushList list(plan, grid, shard, shard.set_of({}));
        return make_push_sender(plan, grid, shard, std::move(list), may_differ);
      },
      "plan"_a, "grid"_a, "aggregator"_a, "may_differ"_a, nb::keep_alive<0, 1>(),
      nb::keep_alive<0, 2>());

  nb::class_<PassSender, ChunkSender>(module, "PassSender")
      .def(
          "__init__",
          [](PassSender* self, uint32_t begin, uint32_t end, const std::vector<uint32_t>& list) {
            new (self) PassSender(Grid::Shard{begin, end}, std::span<const uint32_t>(list));
          },
          "begin"_a, "end"_a, "list"_a)
      .def("seal", &PassSender::seal)
      .def("number", &PassSender::pass)
      .def("take_probe", &PassSender::take_probe)
      .def(
          "bitmap_part",
          [](PassSender& self, uint32_t pass, uint32_t index, const nb::bytes& part,
             uint32_t part_bytes) {
            return self.bitmap_part(pass, index, span_of(part), part_bytes);
          },
          "number"_a, "index"_a, "part"_a, "part_bytes"_a)
      .def("stop", &PassSender::stop, "number"_a);
  nb::class_<PassReceiver>(module, "PassReceiver")
      .def(nb::init<>())
      .def("probe", &PassReceiver::probe, "number"_a)
      .def("waiting", &PassReceiver::waiting)
      .def("answer", &PassReceiver::answer)
      .def("stop", &PassReceiver::stop)
      .def("stopped", &PassReceiver::stopped);

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
             Memory& memory, int here, const std::optional<OwnArray>& own) {
            codec::Elements elements;
            if (own) elements.bytes = reinterpret_cast<uint8_t*>(own->data());
            new (self)
                Aggregator(plan, grid, grid.shards.at(shard), workers, here, elements, memory);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "workers"_a, "memory"_a, nb::kw_only(),
          "here"_a = Aggregator::kNoSelf, "own"_a = nb::none(), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 8>())
      .def(
          "open",
          [](Aggregator& self, uint16_t worker, const std::vector<uint32_t>& critical, Nanos now) {
            self.open(worker, to_bitmap(self.counted(worker).size(), critical), now);
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
               for (const uint32_t region : stop.regions) out.emplace_back(stop.worker, region);
             return out;
           })
      .def("undecided", &Aggregator::undecided, "worker"_a)
      .def("waiting_for", &Aggregator::waiting_for);
}

}  // namespace gradwire::parts
