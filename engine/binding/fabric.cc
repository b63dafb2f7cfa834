// Fabric in Python: endpoints in virtual time. gradwire.sim adds seconds and docstrings.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "binding/binding.h"
#include "binding/errors.h"
#include "sim/fabric.h"
#include "wire/packet.h"

namespace gradwire::binding {
namespace {

using namespace nb::literals;
using sim::Fabric;
using Direction = Fabric::Direction;

Direction parse_direction(const std::string& word) {
  if (word == "up") return Direction::up;
  if (word == "down") return Direction::down;
  throw nb::value_error(("direction is \"" + word + "\"; allowed are \"up\", \"down\"").c_str());
}

uint16_t known_host(const Fabric& fabric, int64_t host) {
  const int64_t count = int64_t{fabric.options().workers} + fabric.options().servers;
  if (host >= 0 && host < count) return static_cast<uint16_t>(host);
  throw nb::value_error(
      ("host is " + std::to_string(host) + "; there are " + std::to_string(count)).c_str());
}

const OpReport& finished_report(const Fabric& fabric, uint16_t worker, uint64_t op) {
  const OpReport* const report = fabric.report(worker, op);
  if (report != nullptr) return *report;
  throw nb::value_error(
      (op_name(op) + " of worker " + std::to_string(worker) + " is not finished").c_str());
}

nb::dict link_counters(const sim::Link& link, Nanos now) {
  const sim::LinkCounters& counters = link.counters;
  nb::dict out;
  out["queue_bytes"] = link.queued(now);
  out["packets"] = counters.packets;
  out["bytes"] = counters.bytes;
  out["dropped_queue"] = counters.dropped_queue;
  out["dropped_loss"] = counters.dropped_loss;
  out["reordered"] = counters.reordered;
  out["duplicated"] = counters.duplicated;
  out["garbage"] = counters.garbage;
  out["corrupted"] = counters.corrupted;
  out["dropped_long"] = counters.dropped_long;
  out["dropped_policer"] = counters.dropped_policer;
  out["cross_packets"] = counters.cross_packets;
  out["cross_dropped"] = counters.cross_dropped;
  out["max_queue_bytes"] = counters.max_queue_bytes;
  out["ect"] = counters.ect;
  out["marked"] = counters.marked;
  return out;
}

const char* kind_name(uint8_t kind) {
  switch (static_cast<wire::Kind>(kind)) {
    case wire::Kind::push:
      return "push";
    case wire::Kind::pull:
      return "pull";
    case wire::Kind::open:
      return "open";
    case wire::Kind::forgive:
      return "forgive";
    case wire::Kind::stop:
      return "stop";
    case wire::Kind::close:
      return "close";
    case wire::Kind::fold:
      return "fold";
    case wire::Kind::commit:
      return "commit";
    case wire::Kind::enough:
      return "enough";
    case wire::Kind::probe:
      return "probe";
    case wire::Kind::bitmap:
      return "bitmap";
    case wire::Kind::ack:
      return "ack";
    case wire::Kind::fragment:
      return "fragment";
    case wire::Kind::ping:
      return "ping";
    case wire::Kind::pong:
      return "pong";
    case wire::Kind::error:
      return "error";
    case wire::Kind::bye:
      return "bye";
  }
  return "unknown";
}

const char* fate_name(sim::TraceEntry::Fate fate) {
  switch (fate) {
    case sim::TraceEntry::Fate::delivered:
      return "delivered";
    case sim::TraceEntry::Fate::queue:
      return "queue";
    case sim::TraceEntry::Fate::loss:
      return "loss";
    case sim::TraceEntry::Fate::unreachable:
      return "unreachable";
  }
  return "";
}

constexpr Nanos kSlice = 100 * kMillisecond;

nb::list trace_list(const Fabric& fabric) {
  nb::list out;
  for (const sim::TraceEntry& entry : fabric.trace()) {
    out.append(nb::make_tuple(entry.time, entry.source, entry.destination, kind_name(entry.kind),
                              entry.packet_number, number_of(entry.op), entry.chunk, entry.bytes,
                              fate_name(entry.fate), entry.dscp, lane_of(entry.op)));
  }
  return out;
}

sim::LinkOptions checked_link(const sim::LinkOptions& options) {
  if (const std::string wrong = options.validate(); !wrong.empty()) {
    throw nb::value_error(wrong.c_str());
  }
  return options;
}

void start(Fabric& fabric, uint16_t worker, uint64_t op, uint16_t lane, uint64_t step,
           const Plan& plan, const InputArray<float>& data,
           const std::optional<InputArray<uint32_t>>& critical,
           const std::optional<InputArray<uint8_t>>& priorities, const std::vector<double>& stats,
           int64_t timeout, int64_t at) {
  if (data.shape(0) != plan.elements) {
    throw nb::value_error(("data has " + std::to_string(data.shape(0)) + " elements, the plan " +
                           std::to_string(plan.elements))
                              .c_str());
  }
  OpSpec spec;
  spec.op = checked_id(op, lane);
  spec.step = step;
  spec.plan = plan;
  if (critical) spec.critical.assign(critical->data(), critical->data() + critical->shape(0));
  if (priorities)
    spec.priorities.assign(priorities->data(), priorities->data() + priorities->shape(0));
  spec.stats = to_stats(stats);
  spec.timeout = timeout;
  fabric.start(worker, std::move(spec), {data.data(), data.data() + data.shape(0)}, at);
}

// Runs two jobs on the same ports, in slices as run() does.
void run_beside(Fabric& fabric, Fabric& other, int64_t until) {
  while (fabric.now() < until) {
    const Nanos before = fabric.now();
    const Nanos stop = std::min<Nanos>(until, before + kSlice);
    {
      const nb::gil_scoped_release release;
      fabric.run_beside(other, stop);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (fabric.now() < stop) return;
  }
}

// Runs several jobs on the same ports until all their ops are done, in slices as run() does.
bool run_together(const std::vector<Fabric*>& fabrics, int64_t until) {
  for (Nanos now = fabrics.at(0)->now(); now < until;) {
    now = std::min<Nanos>(until, now + kSlice);
    bool done = false;
    {
      const nb::gil_scoped_release release;
      done = Fabric::run_together(fabrics, now);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (done) return true;
  }
  return false;
}

// Runs in slices of virtual time, so that Ctrl-C takes effect.
bool run(Fabric& fabric, int64_t until, bool until_done) {
  for (;;) {
    const Nanos stop = std::min<Nanos>(until, fabric.now() + kSlice);
    bool done = false;
    {
      const nb::gil_scoped_release release;
      done = fabric.run(stop, until_done);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if ((done && until_done) || fabric.broken() || stop >= until) return done;
  }
}

}  // namespace

void bind_fabric(nb::module_& module) {
  nb::class_<sim::LinkOptions>(module, "Link", "One direction of a port in virtual time.")
      .def(
          "__init__",
          [](sim::LinkOptions* self, double rate, int64_t delay, uint64_t queue_bytes, double loss,
             double loss_burst, double reorder, int64_t reorder_delay, double duplicate,
             double garbage, double flip, double corrupt, uint64_t ecn_bytes, bool bleach,
             bool drop_ect, uint32_t longest, double police_rate, uint64_t police_burst) {
            new (self) sim::LinkOptions(
                checked_link({rate, delay, queue_bytes, loss, loss_burst, reorder, reorder_delay,
                              duplicate, garbage, flip, corrupt, ecn_bytes, bleach, drop_ect,
                              longest, police_rate, police_burst}));
          },
          nb::kw_only(), "rate"_a = 125e6, "delay_ns"_a = 20 * kMicrosecond,
          "queue_bytes"_a = 256 << 10, "loss"_a = 0.0, "loss_burst"_a = 1.0, "reorder"_a = 0.0,
          "reorder_delay_ns"_a = 100 * kMicrosecond, "duplicate"_a = 0.0, "garbage"_a = 0.0,
          "flip"_a = 0.0, "corrupt"_a = 0.0, "ecn_bytes"_a = 0, "bleach"_a = false,
          "drop_ect"_a = false, "longest"_a = 0, "police_rate"_a = 0.0,
          "police_burst"_a = 64 << 10);
  nb::class_<Fabric>(module, "Fabric", "Endpoints in virtual time on one switch.")
      .def(
          "__init__",
          [](Fabric* self, uint16_t workers, uint16_t servers, uint64_t seed,
             const sim::LinkOptions& link, bool ecn, uint32_t overhead, bool whole_trains,
             int64_t host_delay, int64_t host_jitter, int64_t send_time, uint32_t datagram_bytes,
             int64_t peer_timeout, int64_t ping_interval, uint32_t receive_buffer,
             uint64_t memory_limit, bool pacing, uint32_t session, size_t trace_limit,
             uint64_t most_events, Fabric* beside, uint16_t engine, uint16_t engines) {
            sim::FabricOptions options;
            options.beside = beside;
            options.workers = workers;
            options.servers = servers;
            options.seed = seed;
            options.link = link;
            options.endpoint.ecn = ecn;
            options.overhead = overhead;
            options.whole_trains = whole_trains;
            options.host_delay = host_delay;
            options.host_jitter = host_jitter;
            options.send_time = send_time;
            options.trace_limit = trace_limit;
            options.most_events = most_events;
            if (datagram_bytes < wire::kMinDatagram || datagram_bytes > wire::kMaxDatagram) {
              throw nb::value_error("datagram_bytes: allowed are 256 to 8972");
            }
            options.endpoint.datagram_bytes = datagram_bytes;
            options.endpoint.peer_timeout = peer_timeout;
            options.endpoint.ping_interval = ping_interval;
            options.endpoint.receive_buffer = receive_buffer;
            options.endpoint.memory_limit = memory_limit;
            options.endpoint.pacing = pacing;
            options.endpoint.session = session;
            options.endpoint.engine = engine;
            options.endpoint.engines = engines;
            new (self) Fabric(options);
          },
          nb::kw_only(), "workers"_a, "servers"_a = 0, "seed"_a = 0, "link"_a = sim::LinkOptions{},
          "ecn"_a = true, "overhead"_a = 42, "whole_trains"_a = false, "host_delay_ns"_a = 0,
          "host_jitter_ns"_a = 0, "send_time_ns"_a = 0, "datagram_bytes"_a = 1472,
          "peer_timeout_ns"_a = 30 * kSecond, "ping_interval_ns"_a = kSecond,
          "receive_buffer"_a = 1 << 20, "memory_limit"_a = uint64_t{1} << 31, "pacing"_a = true,
          "session"_a = 1, "trace_limit"_a = 0, "most_events"_a = UINT64_MAX,
          "beside"_a.none() = nb::none(), "engine"_a = 0, "engines"_a = 1)
      .def_prop_ro("now_ns", &Fabric::now)
      .def_prop_ro("events", &Fabric::events)
      .def_prop_ro("trace_hash", &Fabric::trace_hash)
      .def(
          "set_link",
          [](Fabric& fabric, int64_t host, const std::string& direction,
             const sim::LinkOptions& link) {
            fabric.link(known_host(fabric, host), parse_direction(direction)).set_options(link);
          },
          "host"_a, "direction"_a, "link"_a)
      .def(
          "link",
          [](Fabric& fabric, int64_t host, const std::string& direction) {
            return link_counters(fabric.link(known_host(fabric, host), parse_direction(direction)),
                                 fabric.now());
          },
          "host"_a, "direction"_a)
      .def(
          "cross_traffic",
          [](Fabric& fabric, int64_t host, const std::string& direction, double rate, int64_t start,
             int64_t length, int64_t period, uint32_t train) {
            fabric.add_cross_traffic(known_host(fabric, host), parse_direction(direction),
                                     {start, length, period, rate, train});
          },
          "host"_a, "direction"_a = "down", nb::kw_only(), "rate"_a, "start_ns"_a = 0,
          "length_ns"_a, "period_ns"_a = 0, "train"_a = 1)
      .def(
          "add_flow",
          [](Fabric& fabric, int64_t host, const std::string& direction, int64_t start, int64_t end,
             int64_t round) {
            return fabric.add_flow(known_host(fabric, host), parse_direction(direction),
                                   {start, end < 0 ? kNever : end, round});
          },
          "host"_a, "direction"_a = "down", nb::kw_only(), "start_ns"_a = 0, "end_ns"_a = -1,
          "round_ns"_a = 200 * kMicrosecond)
      .def(
          "flow",
          [](const Fabric& fabric, size_t index) {
            const sim::TcpFlowCounters& counters = fabric.flow(index);
            nb::dict out;
            out["packets"] = counters.packets;
            out["dropped"] = counters.dropped;
            out["delivered_bytes"] = counters.delivered_bytes;
            return out;
          },
          "index"_a)
      .def(
          "set_clock",
          [](Fabric& f, int64_t host, double ppm) { f.set_clock(known_host(f, host), ppm); },
          "host"_a, "ppm"_a)
      .def(
          "jump_clock",
          [](Fabric& f, int64_t host, int64_t by) { f.jump_clock(known_host(f, host), by); },
          "host"_a, "by_ns"_a)
      .def(
          "pause", [](Fabric& f, int64_t host) { f.pause(known_host(f, host)); }, "host"_a)
      .def(
          "resume",
          [](Fabric& f, int64_t host, bool stood) { f.resume(known_host(f, host), stood); },
          "host"_a, "clock_stood"_a = false)
      .def(
          "restart",
          [](Fabric& f, int64_t host, uint32_t session) {
            f.restart(known_host(f, host), session);
          },
          "host"_a, "session"_a)
      .def(
          "cut",
          [](Fabric& f, int64_t from, int64_t to, bool cut) {
            f.set_cut(known_host(f, from), known_host(f, to), cut);
          },
          "source"_a, "destination"_a, "cut"_a = true)
      .def(
          "kill", [](Fabric& f, int64_t host) { f.kill(known_host(f, host)); }, "host"_a)
      .def(
          "partition",
          [](Fabric& f, int64_t a, int64_t b, bool parted) {
            f.set_partition(known_host(f, a), known_host(f, b), parted);
          },
          "a"_a, "b"_a, "parted"_a = true)
      .def(
          "inject",
          [](Fabric& f, int64_t source, int64_t destination, const nb::bytes& data) {
            f.inject(known_host(f, source), known_host(f, destination),
                     {reinterpret_cast<const uint8_t*>(data.c_str()), data.size()});
          },
          "source"_a, "destination"_a, "data"_a)
      .def("start", &start, nb::kw_only(), "worker"_a, "op"_a, "lane"_a = 0, "step"_a, "plan"_a,
           "data"_a, "critical"_a = nb::none(), "priorities"_a = nb::none(),
           "stats"_a = std::vector<double>{}, "timeout_ns"_a = 1800 * kSecond, "at_ns"_a = 0)
      .def(
          "close",
          [](Fabric& f, int64_t host, int64_t linger) { f.close(known_host(f, host), linger); },
          "host"_a, "linger_ns"_a = 2 * kSecond)
      .def("forget", &Fabric::forget)
      .def("run", &run, "until_ns"_a, "until_done"_a = true)
      .def("run_beside", &run_beside, "other"_a, "until_ns"_a)
      .def_static("run_together", &run_together, "fabrics"_a, "until_ns"_a)
      .def(
          "completion",
          [](const Fabric& f, uint16_t worker, uint64_t op,
             uint16_t lane) -> std::optional<OpReport> {
            const OpReport* const report = f.report(worker, checked_id(op, lane));
            if (report == nullptr) return std::nullopt;
            return *report;
          },
          "worker"_a, "op"_a, "lane"_a = 0)
      .def(
          "result",
          [](const Fabric& f, uint16_t worker, uint64_t op, uint16_t lane) {
            const uint64_t id = checked_id(op, lane);
            finished_report(f, worker, id);
            return to_array(*f.data(worker, id));
          },
          "worker"_a, "op"_a, "lane"_a = 0)
      .def(
          "finished_at_ns",
          [](const Fabric& f, uint16_t worker, uint64_t op, uint16_t lane) {
            const uint64_t id = checked_id(op, lane);
            finished_report(f, worker, id);
            return f.finished_at(worker, id);
          },
          "worker"_a, "op"_a, "lane"_a = 0)
      .def(
          "failure",
          [](const Fabric& f, int64_t host) { return to_text(f.failure(known_host(f, host))); },
          "host"_a)
      .def_prop_ro("met", &Fabric::met)
      .def(
          "unheard_ns",
          [](const Fabric& f, int64_t from, int64_t to) {
            return f.unheard(known_host(f, from), known_host(f, to));
          },
          "source"_a, "destination"_a)
      .def(
          "closed", [](const Fabric& f, int64_t host) { return f.closed(known_host(f, host)); },
          "host"_a)
      .def(
          "counters",
          [](const Fabric& f, int64_t host) {
            nb::dict out;
            add_counters(out, f.counters(known_host(f, host)));
            out["dropped_by_socket"] = f.dropped_by_socket(known_host(f, host));
            out["dropped_by_ports"] = f.dropped_by_ports(known_host(f, host));
            return out;
          },
          "host"_a)
      .def(
          "record",
          [](Fabric& f, int64_t host, size_t entries) {
            Timeline& timeline = f.timeline(known_host(f, host));
            const std::vector<Timeline::Entry> found = timeline.take();
            timeline.keep(entries);
            return timeline_list(found);
          },
          "host"_a, "entries"_a)
      .def("violations", &Fabric::violations)
      .def("trace", &trace_list);
}

}  // namespace gradwire::binding
