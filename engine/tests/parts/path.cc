#include "proto/path/path.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "proto/path/control_frames.h"
#include "proto/path/farewell.h"
#include "proto/path/liveness.h"
#include "proto/path/path_limit.h"
#include "proto/path/silence.h"
#include "proto/path/started_ops.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {
namespace {

// One end of a path, with the port that outlives it.
struct PathEnd {
  PathEnd(uint16_t endpoint, uint16_t workers, uint32_t datagram, uint64_t memory, Nanos now)
      : port(config_of(endpoint, workers, datagram, memory)),
        path(endpoint == 0 ? 1 : 0, port, now) {}

  static EndpointConfig config_of(uint16_t endpoint, uint16_t workers, uint32_t datagram,
                                  uint64_t memory) {
    EndpointConfig config;
    config.endpoint = endpoint;
    config.workers = workers;
    config.datagram_bytes = datagram;
    config.memory_limit = memory;
    return config;
  }
  static std::optional<nb::bytes> bytes(const Train& train) {
    return nb::bytes(train.spans[0].data, train.spans[0].size);
  }

  Port port;
  Path path;
  Train train;
};

std::vector<uint64_t> numbers_of(std::vector<Recovery::Lost>& lost) {
  std::vector<uint64_t> numbers;
  for (const Recovery::Lost& each : lost) numbers.push_back(each.packet.number);
  return numbers;
}

void bind_ends(nb::module_& module) {
  module.def(
      "failure_of_silence",
      [](const std::vector<std::tuple<uint16_t, Nanos, bool>>& peers, uint16_t workers,
         Nanos timeout, Nanos now) {
        EndpointConfig config;
        config.workers = workers;
        config.peer_timeout = timeout;
        std::vector<Listened> listened;
        for (const auto& [peer, heard, left] : peers) listened.push_back({peer, heard, left});
        const Failure why = failure_of_silence(listened, config, "", now);
        return std::tuple(why.text, why.rank, std::string(word_of(why.cause)));
      },
      "peers"_a, "workers"_a, "timeout"_a, "now"_a);

  nb::class_<PathEnd>(module, "PathEnd")
      .def(nb::init<uint16_t, uint16_t, uint32_t, uint64_t, Nanos>(), "endpoint"_a, "workers"_a = 2,
           "datagram"_a = 1472, "memory"_a = 1 << 24, "now"_a = 0)
      .def(
          "push",
          [](PathEnd& self, size_t bytes) {
            self.path.control.push({0, wire::Kind::stop, 0, std::vector<uint8_t>(bytes)});
          },
          "bytes"_a)
      .def("open_frames", [](const PathEnd& self) { return self.path.control.open(); })
      .def("in_flight", [](const PathEnd& self) { return self.path.recovery.in_flight(); })
      .def("sent", [](const PathEnd& self) { return self.path.recovery.next() - 1; })
      .def("probes", [](const PathEnd& self) { return self.path.recovery.probes(); })
      .def("awaits", [](const PathEnd& self) { return self.path.recovery.waiting(); })
      .def("credit", [](const PathEnd& self) { return self.path.credit(); })
      .def(
          "most_packets",
          [](PathEnd& self, bool probe, uint64_t window) {
            return self.path.most_packets(probe, window);
          },
          "probe"_a, "window"_a)
      .def(
          "adapt",
          [](PathEnd& self, uint64_t backlog, Nanos now) { self.path.adapt(backlog, now); },
          "backlog"_a, "now"_a)
      .def("next_send", [](const PathEnd& self) { return self.path.next_send(); })
      .def("next_check", [](const PathEnd& self, Nanos now) { return self.path.next_check(now); })
      .def(
          "on_timer",
          [](PathEnd& self, uint64_t backlog, Nanos now) {
            self.path.check_pings(now);
            self.path.check(now);
            self.path.check_probes(backlog, now);
          },
          "backlog"_a, "now"_a)
      .def("take_lost",
           [](PathEnd& self) {
             for (const Recovery::Lost& each : self.port.lost) self.path.lost(each);
             const auto numbers = numbers_of(self.port.lost);
             self.port.lost.clear();
             return numbers;
           })
      .def(
          "write_control",
          [](PathEnd& self, Nanos now) -> std::optional<nb::bytes> {
            if (!self.path.control_waits()) return std::nullopt;
            self.path.write_control(now, self.train);
            return PathEnd::bytes(self.train);
          },
          "now"_a)
      .def(
          "write_signal",
          [](PathEnd& self, Nanos now) -> std::optional<nb::bytes> {
            if (!self.path.write_signal({}, {}, now, self.train)) return std::nullopt;
            return PathEnd::bytes(self.train);
          },
          "now"_a)
      .def(
          "take_packet",
          [](PathEnd& self, const nb::bytes& datagram, Nanos now) {
            const auto header = wire::read_header(span_of(datagram));
            self.path.life.note(now);
            const uint64_t next = self.path.acks.largest() + 1;
            const uint64_t number = header ? wire::expand(header->packet_number, next) : 0;
            if (!header || !self.path.is_new(number, *header)) return uint64_t{0};
            Path::Run run{now, 0};
            run.begin(*header, header->op, number, false);
            run.add(*header, datagram.size());
            self.path.record(run, now);
            self.path.sample(now);
            self.path.share_credit(now);
            return number;
          },
          "datagram"_a, "now"_a)
      .def(
          "take_ack",
          [](PathEnd& self, const nb::bytes& datagram,
             Nanos now) -> std::optional<std::vector<uint64_t>> {
            wire::Ack ack;
            self.path.life.note(now);
            if (!wire::read_ack(span_of(datagram), ack) || !self.path.on_ack(ack, now))
              return std::nullopt;
            std::vector<uint64_t> numbers;
            // Control frames go alone.
            for (const Recovery::Acked::Run& run : self.port.acked.runs)
              numbers.push_back(run.first.number);
            for (const uint32_t handle : self.port.acked.items) self.path.control.release(handle);
            if (self.path.judge(ack, now)) self.path.teach(ack, [] { return 0.0; }, now);
            return numbers;
          },
          "datagram"_a, "now"_a)
      .def(
          "take_ping",
          [](PathEnd& self, const nb::bytes& datagram, bool pong, Nanos now) {
            const auto ping = wire::read_ping(span_of(datagram));
            self.path.life.note(now);
            if (!ping) return false;
            if (pong) self.path.on_pong(*ping, now);
            return pong ||
                   self.path.on_ping(*ping, span_of(datagram).subspan(wire::kPingBytes), now);
          },
          "datagram"_a, "pong"_a, "now"_a)
      .def(
          "keep",
          [](PathEnd& self, uint64_t op, const nb::bytes& datagram) {
            return self.path.keep(op, span_of(datagram));
          },
          "op"_a, "datagram"_a)
      .def(
          "release",
          [](PathEnd& self, uint64_t op) {
            return self.path.stash.take(op, self.port.stashed, self.port.memory).size();
          },
          "op"_a)
      .def("held", [](const PathEnd& self) { return self.port.memory.held(); })
      .def(
          "start", [](PathEnd& self, uint64_t below) { self.path.started.note_next(below); },
          "below"_a)
      .def(
          "is_early", [](const PathEnd& self, uint64_t op) { return self.path.is_early(op); },
          "op"_a)
      .def("connected", [](const PathEnd& self) { return self.path.life.connected; })
      .def(
          "fail",
          [](PathEnd& self, Nanos now) {
            self.port.failed = true;
            if (!self.path.farewell.gone) self.path.farewell.fail(now);
          },
          "now"_a)
      .def(
          "leave",
          [](PathEnd& self, Nanos now) {
            self.port.leaving = true;
            self.path.farewell.leave(self.path.loss_to.share(now) <= kHeavyLoss, now);
          },
          "now"_a)
      .def(
          "lower_limit",
          [](PathEnd& self, uint32_t bytes, Nanos now) {
            self.path.lower_limit(bytes, now);
            return self.path.news.failure.text;
          },
          "bytes"_a, "now"_a);
}

}  // namespace

void bind_path(nb::module_& module) {
  nb::class_<Liveness>(module, "Liveness")
      .def(nb::init<>())
      .def_rw("last_heard", &Liveness::last_heard)
      .def_ro("heard", &Liveness::heard)
      .def_rw("connected", &Liveness::connected)
      .def_rw("last_ping", &Liveness::last_ping)
      .def("note", &Liveness::note, "now"_a)
      .def(
          "next_ping",
          [](const Liveness& self, Nanos interval, Nanos timeout, bool failed) {
            EndpointConfig config;
            config.ping_interval = interval;
            config.peer_timeout = timeout;
            return self.next_ping(config, failed);
          },
          "interval"_a, "timeout"_a, "failed"_a);

  nb::class_<Stash>(module, "Stash")
      .def(nb::init<>())
      .def("size", &Stash::size)
      .def(
          "add",
          [](Stash& self, uint64_t op, nb::bytes datagram, size_t all, Memory& memory) {
            return self.add(op, span_of(datagram), all, memory);
          },
          "op"_a, "datagram"_a, "all"_a, "memory"_a)
      .def(
          "take",
          [](Stash& self, uint64_t op, Memory& memory) {
            size_t all = self.size();
            std::vector<nb::bytes> out;
            for (const Stash::Datagram& each : self.take(op, all, memory))
              out.push_back(bytes_of(each));
            return out;
          },
          "op"_a, "memory"_a)
      .def("no_room", &Stash::no_room);

  nb::class_<Farewell>(module, "Farewell")
      .def(nb::init<>())
      .def_rw("gone", &Farewell::gone)
      .def_rw("acknowledged", &Farewell::acknowledged)
      .def_ro("errors_left", &Farewell::errors_left)
      .def_ro("next", &Farewell::next)
      .def("lanes", &Farewell::lanes, "count"_a)
      .def("note", &Farewell::note, "lane"_a, "number"_a)
      .def("told", &Farewell::told)
      .def("complete", &Farewell::complete, "op"_a)
      .def("fail", &Farewell::fail, "now"_a)
      .def("error_sent", &Farewell::error_sent, "now"_a)
      .def("leave", &Farewell::leave, "reliable"_a, "now"_a)
      .def("bye_sent", &Farewell::bye_sent, "now"_a)
      .def("over", &Farewell::over, "met"_a, "failed"_a);

  nb::class_<StartedOps>(module, "StartedOps")
      .def(nb::init<>())
      .def("contains", &StartedOps::contains, "op"_a)
      .def("next_of", &StartedOps::next_of, "id"_a)
      .def("note_next", &StartedOps::note_next, "id"_a)
      .def("early_room", &StartedOps::early_room, "most"_a)
      .def("add_early", &StartedOps::add_early, "op"_a, "chunks"_a = 1)
      .def("forget_early", &StartedOps::forget_early, "op"_a);

  nb::class_<PathLimit>(module, "PathLimit")
      .def(nb::init<uint32_t>(), "agreed"_a)
      .def("bytes", &PathLimit::bytes)
      .def("reduced", &PathLimit::reduced)
      .def("lower", &PathLimit::lower, "bytes"_a, "now"_a = 0)
      .def("arrived", &PathLimit::arrived, "bytes"_a)
      .def("both_ways", &PathLimit::both_ways)
      .def("claimed", &PathLimit::claimed, "bytes"_a, "now"_a)
      .def("sent", &PathLimit::sent, "bytes"_a, "now"_a, "count"_a = 1)
      .def("acked", &PathLimit::acked, "bytes"_a)
      .def("suspect", &PathLimit::suspect, "now"_a, "round"_a)
      .def("try_out", &PathLimit::try_out, "now"_a, "interval"_a)
      .def("on_trial", &PathLimit::on_trial)
      .def("ping", &PathLimit::ping, "now"_a, "stamp"_a)
      .def("answered", &PathLimit::answered, "stamp"_a, "now"_a, "round"_a)
      .def("next_ping", &PathLimit::next_ping)
      .def("next_timer", &PathLimit::next_timer, "round"_a)
      .def_static("shorter", &PathLimit::shorter, "bytes"_a, "tag"_a = 0);

  nb::class_<ControlFrames>(module, "ControlFrames")
      .def(nb::init<>())
      .def(
          "push",
          [](ControlFrames& self, uint32_t part) { self.push({0, wire::Kind::open, part, {}}); },
          "part"_a)
      .def("open", &ControlFrames::open)
      .def("waiting", &ControlFrames::waiting)
      .def("take", &ControlFrames::take)
      .def("live", &ControlFrames::live, "handle"_a)
      .def(
          "at", [](const ControlFrames& self, uint32_t handle) { return self.at(handle).part; },
          "handle"_a)
      .def("again", &ControlFrames::again, "handle"_a)
      .def("release", &ControlFrames::release, "handle"_a);

  bind_ends(module);
}

}  // namespace gradwire::parts
