#include <optional>
#include <vector>

#include "proto/pull/committed_pull.h"
#include "proto/pull/pull_ledger.h"
#include "proto/pull/pull_receiver.h"
#include "proto/pull/pull_sender.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

// The list of finished chunks that an aggregator shares among its senders.
struct Finished {
  std::vector<uint32_t> chunks;
};

std::vector<uint32_t> members(const Bitmap& bitmap) {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < bitmap.size(); ++i)
    if (bitmap.test(i)) out.push_back(i);
  return out;
}

}  // namespace

void bind_pull(nb::module_& module) {
  nb::class_<Finished>(module, "Finished")
      .def(nb::init<>())
      .def("append", [](Finished& self, uint32_t chunk) { self.chunks.push_back(chunk); });

  nb::class_<StreamPull, ChunkSender>(module, "StreamPull");
  nb::class_<LossyPull, StreamPull>(module, "LossyPull");
  module.def(
      "make_pull_sender",
      [](const Plan& plan, const Grid& grid, size_t aggregator, const Finished& finished) {
        return make_pull_sender(plan, grid, grid.shards.at(aggregator), finished.chunks);
      },
      "plan"_a, "grid"_a, "aggregator"_a, "finished"_a, nb::keep_alive<0, 2>(),
      nb::keep_alive<0, 4>());

  nb::class_<PullReceiver>(module, "PullReceiver")
      .def(
          "__init__",
          [](PullReceiver* self, const Plan& plan, const Grid& grid, size_t aggregator, bool own) {
            new (self) PullReceiver(plan, grid, grid.shards.at(aggregator), own);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "own"_a = false, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>())
      .def("takes_results", &PullReceiver::takes_results)
      .def("complete", &PullReceiver::complete)
      .def("insert", &PullReceiver::insert, "chunk"_a)
      .def("has", &PullReceiver::has, "chunk"_a)
      .def(
          "close",
          [](PullReceiver& self, size_t size, const std::vector<uint32_t>& counted,
             const std::vector<uint32_t>& applied, const std::vector<uint32_t>& needed) {
            self.on_close(to_bitmap(size, counted), to_bitmap(size, applied),
                          to_bitmap(size, needed));
          },
          "size"_a, "counted"_a, "applied"_a, "needed"_a = std::vector<uint32_t>{})
      .def(
          "commit",
          [](PullReceiver& self, size_t size, const std::vector<uint32_t>& committed) {
            self.on_commit(to_bitmap(size, committed));
          },
          "size"_a, "committed"_a)
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
            self.on_close(to_bitmap(size, results), to_bitmap(size, needed));
          },
          "size"_a, "results"_a, "needed"_a)
      .def("closed", &PullLedger::closed)
      .def("enough", &PullLedger::enough)
      .def("missing", [](const PullLedger& self) { return members(self.missing()); });

  nb::class_<CommittedPull>(module, "CommittedPull")
      .def(
          "__init__",
          [](CommittedPull* self, const Plan& plan, const Grid& grid, size_t aggregator,
             const Aggregator& sum) {
            new (self) CommittedPull(plan, grid, grid.shards.at(aggregator), sum);
          },
          "plan"_a, "grid"_a, "aggregator"_a, "sum"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("lost", &CommittedPull::lost, "chunk"_a)
      .def("closed", &CommittedPull::seal)
      .def("settled",
           [](CommittedPull& self) -> std::optional<std::vector<uint32_t>> {
             const std::optional<Bitmap> applied = self.decide();
             return applied ? std::optional(members(*applied)) : std::nullopt;
           })
      .def("withheld", &CommittedPull::withheld, "chunk"_a)
      .def("over", &CommittedPull::over);
}

}  // namespace gradwire::parts
