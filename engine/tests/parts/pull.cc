#include "proto/pull/pull.h"

#include <tuple>
#include <vector>

#include "proto/pull/pull_ledger.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

// The list of finished chunks that an aggregator shares among its PullSenders.
struct Finished {
  std::vector<uint32_t> chunks;
};

}  // namespace

void bind_pull(nb::module_& module) {
  nb::class_<Finished>(module, "Finished")
      .def(nb::init<>())
      .def("append", [](Finished& self, uint32_t chunk) { self.chunks.push_back(chunk); });

  nb::class_<PullSender>(module, "PullSender")
      .def(
          "__init__",
          [](PullSender* self, const Plan& plan, const Grid& grid, size_t aggregator,
             const Finished& finished) {
            new (self) PullSender(plan, grid, grid.shards.at(aggregator), finished.chunks);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "finished"_a, nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 5>())
      .def("backlog", &PullSender::backlog)
      .def("next",
           [](PullSender& self) -> std::optional<std::tuple<uint32_t, bool>> {
             uint32_t chunk = 0;
             bool again = false;
             if (!self.next(chunk, again)) return std::nullopt;
             return std::tuple(chunk, again);
           })
      .def("peek",
           [](PullSender& self) -> std::optional<uint32_t> {
             uint32_t chunk = 0;
             return self.peek(chunk) ? std::optional(chunk) : std::nullopt;
           })
      .def("acked", &PullSender::acked, "chunk"_a)
      .def("lost", &PullSender::lost, "chunk"_a)
      .def("forget", &PullSender::forget, "chunk"_a)
      .def("in_flight", &PullSender::in_flight, "chunk"_a)
      .def("acked_count", &PullSender::acked_count)
      .def("passes", &PullSender::passes, nb::rv_policy::reference_internal)
      .def("seal", &PullSender::seal)
      .def("stop_region", &PullSender::stop_region, "region"_a)
      .def("settled", &PullSender::settled);

  nb::class_<PullReceiver>(module, "PullReceiver")
      .def(
          "__init__",
          [](PullReceiver* self, uint32_t begin, uint32_t end) {
            new (self) PullReceiver(Grid::Shard{begin, end});
          },
          "begin"_a, "end"_a)
      .def("insert", &PullReceiver::insert, "chunk"_a)
      .def("has", &PullReceiver::has, "chunk"_a)
      .def(
          "close",
          [](PullReceiver& self, size_t size, const std::vector<uint32_t>& counted,
             const std::vector<uint32_t>& applied) {
            self.close(to_bitmap(size, counted), to_bitmap(size, applied));
          },
          "size"_a, "counted"_a, "applied"_a)
      .def(
          "commit",
          [](PullReceiver& self, size_t size, const std::vector<uint32_t>& committed) {
            self.commit(to_bitmap(size, committed));
          },
          "size"_a, "committed"_a)
      .def("closed", &PullReceiver::closed)
      .def("committed", &PullReceiver::committed)
      .def("missing", &PullReceiver::missing)
      .def("counted", &PullReceiver::counted, "chunk"_a)
      .def("wanted", &PullReceiver::wanted, "chunk"_a);

  module.def("pull_losable", &pull_losable, "plan"_a, "region"_a, "elements"_a);
  nb::class_<PullLedger>(module, "PullLedger")
      .def(
          "__init__",
          [](PullLedger* self, const Plan& plan, const Grid& grid, size_t aggregator) {
            new (self) PullLedger(plan, grid, grid.shards.at(aggregator));
          },
          "plan"_a, "grid"_a, "aggregator"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("arrived", &PullLedger::arrived, "chunk"_a)
      .def(
          "close",
          [](PullLedger& self, size_t size, const std::vector<uint32_t>& results,
             const std::vector<uint32_t>& needed) {
            self.close(to_bitmap(size, results), to_bitmap(size, needed));
          },
          "size"_a, "results"_a, "needed"_a)
      .def("closed", &PullLedger::closed)
      .def("enough", &PullLedger::enough)
      .def("take_enough", &PullLedger::take_enough)
      .def("missing", [](const PullLedger& self) {
        const Bitmap missing = self.missing();
        std::vector<uint32_t> out;
        for (uint32_t i = 0; i < missing.size(); ++i)
          if (missing.test(i)) out.push_back(i);
        return out;
      });
}

}  // namespace gradwire::parts
