#include "proto/op/op.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "proto/op/admission.h"
#include "proto/op/op_table.h"
#include "proto/op/outbox.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

using Values = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Frames = std::vector<std::tuple<uint16_t, uint8_t, uint32_t, nb::bytes>>;

Frames frames_of(Outbox& out) {
  Frames found;
  for (const Outbox::Frame& each : out.frames)
    found.emplace_back(each.to, static_cast<uint8_t>(each.kind), each.part, bytes_of(each.payload));
  return found;
}

EndpointConfig config_of(uint16_t endpoint, uint16_t workers, uint16_t servers, uint32_t datagram,
                         uint64_t memory) {
  EndpointConfig config;
  config.endpoint = endpoint;
  config.workers = workers;
  config.servers = servers;
  config.datagram_bytes = datagram;
  config.memory_limit = memory;
  return config;
}

// An op with what outlives it.
struct OneOp {
  OneOp(const Plan& plan, uint16_t endpoint, uint16_t workers, uint16_t servers, uint32_t datagram,
        Values data, const std::vector<uint32_t>& critical)
      : config(config_of(endpoint, workers, servers, datagram, 1 << 24)) {
    memory.limit = config.memory_limit;
    OpSpec spec;
    spec.plan = plan;
    spec.data = {reinterpret_cast<uint8_t*>(data.data())};
    spec.critical = critical;
    op = std::make_unique<Op>(std::move(spec), config, memory, endpoint < workers, 0);
    encoded.resize(datagram);
  }
  OneOp(const OneOp&) = delete;
  OneOp& operator=(const OneOp&) = delete;

  EndpointConfig config;
  Memory memory;
  std::unique_ptr<Op> op;
  std::vector<uint8_t> encoded;
};

// The ops of an endpoint, those that wait for memory, and the values of all.
struct OpsWaiting {
  OpsWaiting(uint16_t endpoint, uint16_t workers, uint64_t limit)
      : config(config_of(endpoint, workers, 0, 1472, limit)),
        table(config),
        admission(config, table, memory),
        values(1 << 20) {
    memory.limit = limit;
  }
  OpsWaiting(const OpsWaiting&) = delete;
  OpsWaiting& operator=(const OpsWaiting&) = delete;

  EndpointConfig config;
  Memory memory;
  OpTable table;
  Admission admission;
  std::vector<float> values;
};

}  // namespace

void bind_op(nb::module_& module) {
  module.def("part_bytes", &Outbox::part_bytes, "datagram"_a);
  nb::class_<Outbox>(module, "Outbox")
      .def(nb::init<uint32_t>(), "datagram"_a)
      .def(
          "message",
          [](Outbox& self, uint16_t to, const nb::bytes& bytes, const nb::bytes& prefix) {
            self.message(to, wire::Kind::open, span_of(bytes), span_of(prefix));
          },
          "to"_a, "bytes"_a, "prefix"_a)
      .def(
          "list",
          [](Outbox& self, uint16_t to, const std::vector<uint32_t>& values) {
            self.list(to, wire::Kind::stop, values);
          },
          "to"_a, "values"_a)
      .def("frames", &frames_of)
      .def("any", &Outbox::any)
      .def("clear", &Outbox::clear)
      .def_rw("unacknowledged", &Outbox::unacknowledged);

  nb::class_<OneOp>(module, "Op")
      .def(nb::init<const Plan&, uint16_t, uint16_t, uint16_t, uint32_t, Values,
                    const std::vector<uint32_t>&>(),
           "plan"_a, "endpoint"_a, "workers"_a, "servers"_a, "datagram"_a, "data"_a,
           "critical"_a = std::vector<uint32_t>{}, nb::keep_alive<1, 7>())
      .def(
          "begin", [](OneOp& self, Nanos now) { self.op->begin(UINT32_MAX, now); }, "now"_a = 0)
      .def(
          "take",
          [](OneOp& self, uint16_t peer, uint8_t kind, uint32_t chunk, const nb::bytes& payload,
             Nanos now) {
            wire::Header header{};
            header.common.kind = static_cast<wire::Kind>(kind);
            header.chunk = chunk;
            const Fate fate = self.op->take(peer, header, span_of(payload), now);
            self.op->follow(now);
            return static_cast<int>(fate);
          },
          "peer"_a, "kind"_a, "chunk"_a, "payload"_a, "now"_a = 0)
      .def(
          "next",
          [](OneOp& self,
             uint16_t peer) -> std::optional<std::tuple<uint8_t, uint32_t, bool, nb::bytes>> {
            const Chunks chunks = self.op->next(peer, true, 1);
            if (chunks.ids.empty()) return std::nullopt;
            const uint32_t chunk = chunks.ids[0];
            const size_t bytes = self.op->spec.plan.format.bytes(self.op->grid.length(chunk));
            const void* payload = self.op->payload(chunks.kind, chunk, self.encoded.data());
            return std::tuple(static_cast<uint8_t>(chunks.kind), chunk, chunks.again,
                              nb::bytes(payload, bytes));
          },
          "peer"_a)
      .def("backlog",
           [](const OneOp& self, uint16_t peer) {
             const Op::Backlog found = self.op->backlog(peer);
             return std::pair(found.sure, found.fresh);
           })
      .def(
          "acked",
          [](OneOp& self, uint16_t peer, uint8_t kind, uint32_t chunk, Nanos now) {
            self.op->acked(peer, static_cast<wire::Kind>(kind), {&chunk, 1}, now);
          },
          "peer"_a, "kind"_a, "chunk"_a, "now"_a = 0)
      .def(
          "lost",
          [](OneOp& self, uint16_t peer, uint8_t kind, uint32_t chunk, Again why, Nanos now) {
            self.op->lost(peer, static_cast<wire::Kind>(kind), chunk, why, now);
          },
          "peer"_a, "kind"_a, "chunk"_a, "why"_a, "now"_a = 0)
      .def("control_acked", [](OneOp& self) { self.op->control_acked(); })
      .def(
          "left", [](OneOp& self, uint16_t peer) { self.op->left(peer); }, "peer"_a)
      .def("end_passes", [](OneOp& self, uint16_t peer) { self.op->end_passes(peer, false); })
      .def("drained", [](const OneOp& self) { return self.op->drained(); })
      .def("done", [](const OneOp& self) { return self.op->done(); })
      .def("needs", [](const OneOp& self, uint16_t peer) { return self.op->needs(peer); })
      .def("wanted", [](const OneOp& self, uint16_t peer) { return self.op->most_wanted(peer); })
      .def("missing", [](const OneOp& self) { return self.op->missing().endpoints; })
      .def("failure", [](const OneOp& self) { return self.op->out.failure.text; })
      .def("satisfied", [](const OneOp& self) { return self.op->out.satisfied; })
      .def("applied",
           [](const OneOp& self) {
             const auto& report = self.op->out.report;
             return report ? report->applied : std::vector<uint8_t>();
           })
      .def("frames", [](OneOp& self) { return frames_of(self.op->out); })
      .def("clear", [](OneOp& self) { self.op->out.clear(); });

  nb::class_<OpsWaiting>(module, "OpsWaiting")
      .def(nb::init<uint16_t, uint16_t, uint64_t>(), "endpoint"_a, "workers"_a, "limit"_a)
      .def(
          "add",
          [](OpsWaiting& self, uint64_t op, const Plan& plan) {
            OpSpec spec;
            spec.op = op;
            spec.plan = plan;
            spec.data = {reinterpret_cast<uint8_t*>(self.values.data())};
            return self.admission.add(std::move(spec), 0).text;
          },
          "op"_a, "plan"_a)
      .def("start",
           [](OpsWaiting& self) -> std::pair<std::optional<uint64_t>, std::string> {
             Failure why;
             const Admission::Own* const own = self.admission.next_own(why);
             if (!own || why) return {std::nullopt, why.text};
             Admission::Own ready = self.admission.take(*own);
             const uint64_t id = ready.spec.op;
             ++self.table.lane(id).next;
             self.table.add(
                 std::make_unique<Op>(std::move(ready.spec), self.config, self.memory, true, 0));
             return {id, ""};
           })
      .def(
          "finish",
          [](OpsWaiting& self, uint64_t op) {
            self.table.lane(op).finish(number_of(op));
            self.table.remove(op);
          },
          "op"_a)
      .def("full_id", [](OpsWaiting& self, uint32_t low) { return self.table.full_id(low); })
      .def("finished", [](OpsWaiting& self, uint64_t op) { return self.table.finished(op); })
      .def("far_ahead", [](OpsWaiting& self, uint64_t op) { return self.table.far_ahead(op); })
      .def("held", [](OpsWaiting& self) { return self.memory.held(); });
}

}  // namespace gradwire::parts
