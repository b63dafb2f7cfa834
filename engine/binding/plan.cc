// Plan, chunk_grid and Completion in Python.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/binding.h"
#include "binding/errors.h"
#include "codec/codec.h"
#include "proto/base/memory.h"
#include "proto/op/op_memory.h"
#include "proto/plan/grid.h"
#include "reduce/accumulate.h"

namespace gradwire::binding {
namespace {

using namespace nb::literals;

using RegionTuple = std::tuple<uint64_t, uint64_t, double>;
using ScheduleTuple = std::tuple<std::string, std::string, int64_t, double>;

Plan make_plan(uint64_t elements, const std::vector<RegionTuple>& regions, const std::string& spend,
               const std::vector<ScheduleTuple>& schedule, const std::string& fill,
               const std::string& order, const std::string& pull, double pull_bound, double scale,
               uint64_t seed, const std::string& encoding, double kept,
               const std::vector<uint8_t>& class_dscp, const std::string& control,
               uint32_t datagram_bytes, const std::vector<uint64_t>& shards) {
  using Words2 = std::array<std::string_view, 2>;
  using Words3 = std::array<std::string_view, 3>;
  using Words4 = std::array<std::string_view, 4>;
  Plan plan;
  plan.elements = elements;
  plan.datagram_bytes = datagram_bytes;
  plan.regions.reserve(regions.size());
  for (const auto& [offset, length, bound] : regions) {
    plan.regions.push_back({offset, length, bound});
  }
  plan.schedule.clear();
  for (const auto& [clock, scope, delay, fraction] : schedule) {
    plan.schedule.push_back(
        {parse<Clock>("schedule: clock", clock, Words3{"open", "first_arrival", "tail"}),
         parse<Scope>("schedule: scope", scope, Words2{"worker", "all"}), delay, fraction});
  }
  plan.spend = parse<Spend>("spend", spend, Words4{"nothing", "late", "lost", "anything"});
  plan.fill = parse<Fill>("fill", fill, Words2{"zero", "mean"});
  plan.order = parse<Order>("order", order, Words3{"sequential", "shuffled", "priority"});
  plan.pull = parse<Pull>("pull", pull, Words4{"exact", "committed", "none", "lossy"});
  plan.control = parse<Control>("control", control, Words2{"stream", "probe"});
  plan.pull_bound = pull_bound;
  plan.scale = scale;
  plan.seed = seed;
  plan.format = parse_format(encoding, kept);
  plan.class_dscp = class_dscp;
  plan.shards = shards;
  if (const std::string wrong = plan.validate(); !wrong.empty()) {
    throw nb::value_error(wrong.c_str());
  }
  return plan;
}

Grid make_grid(const Plan& plan, uint32_t datagram_bytes, uint16_t aggregators) {
  check_datagram(datagram_bytes);
  if (aggregators == 0) throw nb::value_error("aggregators: at least 1 is needed");
  if (!plan.shards.empty() && plan.shards.size() != aggregators)
    throw nb::value_error(("shards has " + std::to_string(plan.shards.size()) +
                           " entries; one for each of " + std::to_string(aggregators) +
                           " aggregators is needed")
                              .c_str());
  return Grid(plan, datagram_bytes, aggregators);
}

// The most elements, at most `losable`, that whole chunks add up to. All chunks of a region have
// the length `full` except the last.
uint64_t whole_chunks(uint64_t losable, uint64_t full, uint64_t full_count, uint64_t tail) {
  const uint64_t without = std::min(losable / full, full_count) * full;
  if (tail == 0 || tail > losable) return without;
  return std::max(without, std::min((losable - tail) / full, full_count) * full + tail);
}

// Every engine has its part of each shard, and of a region's bound what its part of the region has.
std::vector<double> effective_bounds(const Plan& plan, uint32_t datagram_bytes,
                                     uint16_t aggregators, uint16_t engines) {
  const Grid grid = make_grid(plan, datagram_bytes, aggregators);
  std::vector<uint64_t> losable(plan.regions.size());
  std::vector<Grid::Shard> all;
  for (const Grid::Shard& shard : grid.shards)
    for (uint16_t engine = 0; engine < engines; ++engine)
      all.push_back(shard.part_of(engine, engines));
  for (const Grid::Shard& shard : all) {
    const std::vector<ShardRegion> parts = shard_regions(plan, grid, shard);
    std::vector<uint64_t> tails(plan.regions.size());
    for (uint32_t c = shard.begin; c < shard.end; ++c) {
      if (grid.length(c) != grid.chunk_elements) tails[grid.region[c]] = grid.length(c);
    }
    for (size_t r = 0; r < parts.size(); ++r) {
      const uint64_t full_count = parts[r].chunks.size() - (tails[r] != 0 ? 1 : 0);
      losable[r] += whole_chunks(parts[r].losable, grid.chunk_elements, full_count, tails[r]);
    }
  }
  std::vector<double> bounds(plan.regions.size());
  for (size_t r = 0; r < bounds.size(); ++r) {
    bounds[r] = static_cast<double>(losable[r]) / static_cast<double>(plan.regions[r].length);
  }
  return bounds;
}

auto chunk_grid(const Plan& plan, uint32_t datagram_bytes, uint16_t aggregators) {
  Grid grid = make_grid(plan, datagram_bytes, aggregators);
  std::vector<uint32_t> lengths(grid.chunks());
  std::vector<uint32_t> owners(grid.chunks());
  for (uint32_t c = 0; c < grid.chunks(); ++c) lengths[c] = grid.length(c);
  for (uint16_t a = 0; a < aggregators; ++a) {
    std::fill(owners.begin() + grid.shards[a].begin, owners.begin() + grid.shards[a].end, a);
  }
  grid.offset.pop_back();  // the end of the last chunk
  return nb::make_tuple(to_array(std::move(grid.offset)), to_array(std::move(lengths)),
                        to_array(std::move(grid.region)), to_array(std::move(owners)));
}

// The memory limit with which every endpoint of a job of this size can take an op of this plan.
uint64_t least_memory_limit(const Plan& plan, uint32_t datagram_bytes, uint16_t workers,
                            uint16_t servers, uint16_t engines) {
  check_datagram(datagram_bytes);
  if (workers < 1) throw nb::value_error("workers: at least 1 is needed");
  EndpointConfig config;
  config.datagram_bytes = datagram_bytes;
  config.workers = workers;
  config.servers = servers;
  config.engines = engines;
  if (!plan.shards.empty() && plan.shards.size() != config.aggregators())
    throw nb::value_error("shards: one for each aggregator is needed");
  uint64_t most = 0;
  for (uint16_t a = 0; a < config.aggregators(); ++a) {
    config.endpoint = config.aggregator_endpoint(a);
    most = std::max(most, memory_of(plan, config));
  }
  return Memory::least_limit(most) * engines;
}

void check_elements(const Plan& plan, size_t count) {
  if (count != plan.elements) {
    throw nb::value_error(("values has " + std::to_string(count) + " elements, the plan " +
                           std::to_string(plan.elements))
                              .c_str());
  }
}

Array<float> round_trip(const Plan& plan, const InputArray<float>& values, uint32_t datagram_bytes,
                        uint16_t aggregators) {
  check_elements(plan, values.shape(0));
  std::vector<float> out(values.data(), values.data() + values.shape(0));
  {
    const nb::gil_scoped_release release;
    const Grid grid = make_grid(plan, datagram_bytes, aggregators);
    std::vector<uint8_t> scratch(plan.format.bytes(grid.chunk_elements));
    for (uint32_t c = 0; c < grid.chunks(); ++c) {
      codec::round_trip(plan.format, out.data() + grid.offset[c], grid.length(c), scratch.data());
    }
  }
  return to_array(std::move(out));
}

// Replaces each counted chunk by the error of its encoding, or by zeros if a value is not finite or
// exceeds the encoding's range.
void keep_encoding_error(const Plan& plan, const WritableArray& values,
                         const InputArray<uint8_t>& counted, uint32_t datagram_bytes,
                         uint16_t aggregators) {
  check_elements(plan, values.shape(0));
  const Grid grid = make_grid(plan, datagram_bytes, aggregators);
  if (counted.shape(0) != grid.chunks()) {
    throw nb::value_error(("counted has " + std::to_string(counted.shape(0)) +
                           " entries, the plan " + std::to_string(grid.chunks()) + " chunks")
                              .c_str());
  }
  const nb::gil_scoped_release release;
  std::vector<uint8_t> payload(plan.format.bytes(grid.chunk_elements));
  std::vector<float> decoded(grid.chunk_elements);
  for (uint32_t c = 0; c < grid.chunks(); ++c) {
    if (counted.data()[c] == 0) continue;
    float* const sent = values.data() + grid.offset[c];
    const uint32_t length = grid.length(c);
    if (plan.format.plain()) {
      std::fill_n(sent, length, 0.0f);
      continue;
    }
    codec::encode(plan.format, sent, length, payload.data());
    codec::decode(plan.format, payload.data(), length, decoded.data());
    reduce::subtract(sent, decoded.data(), length);
    if (!reduce::all_finite(sent, length)) std::fill_n(sent, length, 0.0f);
  }
}

std::vector<double> half_of_stats(const OpReport& report, size_t half) {
  const auto begin = report.stats.begin() + static_cast<ptrdiff_t>(half * kStatSlots / 2);
  return {begin, begin + kStatSlots / 2};
}

}  // namespace

uint64_t checked_id(uint64_t op, uint64_t lane) {
  if (lane < kLanes && op < UINT64_MAX / kLanes) return id_of(op, lane);
  const std::string text = "op " + std::to_string(op) + " of lane " + std::to_string(lane) +
                           ": lanes are 0 to " + std::to_string(kLanes - 1) + ", ops below 2^52";
  throw nb::value_error(text.c_str());
}

Stats to_stats(const std::vector<double>& values) {
  if (values.size() > kStatSlots) throw nb::value_error("stats: at most 8 numbers are carried");
  Stats stats{};
  std::copy(values.begin(), values.end(), stats.begin());
  return stats;
}

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan", "One transfer as all ranks agreed on it; immutable.")
      .def(
          "__init__",
          [](Plan* self, uint64_t elements, const std::vector<RegionTuple>& regions,
             const std::string& spend, const std::vector<ScheduleTuple>& schedule,
             const std::string& fill, const std::string& order, const std::string& pull,
             double pull_bound, double scale, uint64_t seed, const std::string& encoding,
             double kept, const std::vector<uint8_t>& class_dscp, const std::string& control,
             uint32_t datagram_bytes, const std::vector<uint64_t>& shards) {
            new (self) Plan(make_plan(elements, regions, spend, schedule, fill, order, pull,
                                      pull_bound, scale, seed, encoding, kept, class_dscp, control,
                                      datagram_bytes, shards));
          },
          nb::kw_only(), "elements"_a, "regions"_a, "spend"_a = "nothing",
          "schedule"_a = std::vector<ScheduleTuple>{{"open", "all", 0, 1.0}}, "fill"_a = "zero",
          "order"_a = "sequential", "pull"_a = "exact", "pull_bound"_a = 0.0, "scale"_a = 1.0,
          "seed"_a = 0, "encoding"_a = "f32", "kept"_a = 1.0,
          "class_dscp"_a = std::vector<uint8_t>{}, "control"_a = "stream", "datagram_bytes"_a = 0,
          "shards"_a = std::vector<uint64_t>{})
      .def_prop_ro("elements", [](const Plan& plan) { return plan.elements; })
      .def_prop_ro("hash", &Plan::hash)
      .def("effective_bounds", &effective_bounds, "datagram_bytes"_a, "aggregators"_a,
           "engines"_a = 1);

  module.def("chunk_grid", &chunk_grid, "plan"_a, "datagram_bytes"_a, "aggregators"_a,
             "Element offsets, lengths, region index and aggregator of each chunk.");

  module.def("least_memory_limit", &least_memory_limit, "plan"_a, "datagram_bytes"_a, "workers"_a,
             "servers"_a = 0, "engines"_a = 1,
             "The memory limit, in bytes, below which a job cannot take this plan.");
  module.def("round_trip", &round_trip, "plan"_a, "values"_a, "datagram_bytes"_a, "aggregators"_a,
             "What the other ranks get of these values.");
  module.def("keep_encoding_error", &keep_encoding_error, "plan"_a, "values"_a.noconvert(),
             "counted"_a, "datagram_bytes"_a, "aggregators"_a,
             "Leaves of what was sent and counted only what its encoding took from it.");
  using Report = OpReport;
  nb::class_<Report>(module, "Completion", "What became of one all-reduce.")
      .def_prop_ro("op", [](const Report& r) { return number_of(r.op); })
      .def_prop_ro("lane", [](const Report& r) { return lane_of(r.op); })
      .def_prop_ro("step", [](const Report& r) { return r.step; })
      .def_prop_ro("ok", [](const Report& r) { return !r.failure; })
      .def_prop_ro("datagram_bytes", [](const Report& r) { return r.datagram_bytes; })
      .def_prop_ro("error", [](const Report& r) { return to_text(r.failure.text); })
      .def_prop_ro("error_rank", [](const Report& r) { return r.failure.rank; })
      .def_prop_ro("error_cause", [](const Report& r) { return word_of(r.failure.cause); })
      .def_prop_ro(
          "counted", [](const Report& r) { return to_array(r.counted); }, nb::rv_policy::automatic)
      .def_prop_ro(
          "applied", [](const Report& r) { return to_array(r.applied); }, nb::rv_policy::automatic)
      .def_prop_ro(
          "withheld_chunks", [](const Report& r) { return to_array(r.withheld_chunks); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "withheld_values", [](const Report& r) { return to_array(r.withheld_values); },
          nb::rv_policy::automatic)
      .def("take_result_error", [](Report& r) { return to_array(std::move(r.result_error)); })
      .def_prop_ro("error_offset", [](const Report& r) { return r.error_offset; })
      .def_prop_ro("delivered", [](const Report& r) { return r.delivered; })
      .def_prop_ro("exceeded", [](const Report& r) { return r.exceeded; })
      .def_prop_ro("stats_sum", [](const Report& r) { return half_of_stats(r, 0); })
      .def_prop_ro("stats_max", [](const Report& r) { return half_of_stats(r, 1); })
      .def_prop_ro("push_ns", [](const Report& r) { return r.cost.push; })
      .def_prop_ro("pull_ns", [](const Report& r) { return r.cost.pull; })
      .def_prop_ro("total_ns", [](const Report& r) { return r.cost.total; })
      .def_prop_ro("bytes_sent", [](const Report& r) { return r.cost.traffic.bytes; })
      .def_prop_ro("packets_sent", [](const Report& r) { return r.cost.traffic.packets; })
      .def_prop_ro("retransmissions",
                   [](const Report& r) { return r.cost.traffic.retransmissions; })
      .def_prop_ro("passes", [](const Report& r) { return r.cost.passes; })
      .def_prop_ro("rtprop_ns", [](const Report& r) { return r.cost.rtprop; })
      .def_prop_ro("btlbw", [](const Report& r) { return r.cost.btlbw; })
      .def_prop_ro("waits", [](const Report& r) {
        const Waits& w = r.cost.waits;
        std::vector<std::pair<int64_t, int64_t>> all;
        for (const Waits::Most& most :
             {w.opened, w.pushed, w.pulled, w.queued, Waits::most_of(w.resent),
              Waits::most_of(w.missed), w.burst})
          all.emplace_back(most.peer == Waits::kNobody ? -1 : most.peer, most.value);
        return all;
      });
}

}  // namespace gradwire::binding
