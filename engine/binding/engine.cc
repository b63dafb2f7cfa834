// Engine in Python: the UDP engine of this process.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <system_error>
#include <unordered_map>

#include "binding/binding.h"
#include "binding/errors.h"
#include "io/gate.h"
#include "io/loop_group.h"
#include "wire/packet.h"

namespace gradwire::binding {
namespace {

using namespace nb::literals;

// The engines whose threads must stop before the interpreter ends. Guarded by the GIL.
std::vector<std::weak_ptr<io::LoopGroup>>& living() {
  static std::vector<std::weak_ptr<io::LoopGroup>> loops;
  return loops;
}

void close_all() {
  std::vector<std::weak_ptr<io::LoopGroup>> loops;
  loops.swap(living());
  const nb::gil_scoped_release release;
  for (const auto& weak : loops) {
    if (const auto loop = weak.lock()) loop->close();
  }
}

io::DropOptions make_drop(double rate, double burst, uint64_t seed) {
  io::DropOptions options{rate, burst, seed};
  if (const std::string wrong = options.validate(); !wrong.empty()) {
    throw nb::value_error(wrong.c_str());
  }
  return options;
}

class Engine {
 public:
  Engine(const EndpointConfig& config, const std::vector<io::Keys>& keys,
         const std::string& address, const std::vector<uint16_t>& ports,
         const io::DropOptions& drop)
      : loop_(std::make_shared<io::LoopGroup>(config, keys, address, ports)) {
    if (drop.rate > 0.0) loop_->set_drop(drop);
    std::erase_if(living(), [](const auto& weak) { return weak.expired(); });
    living().push_back(loop_);
  }
  ~Engine() {
    // Python destroys objects with the GIL held. The thread must end before the arrays are freed.
    const nb::gil_scoped_release release;
    loop_->close();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  io::LoopGroup& loop() { return *loop_; }

  void all_reduce(uint64_t op, uint16_t lane, uint64_t step, const Plan& plan,
                  const BucketArray& data, const std::optional<InputArray<uint32_t>>& critical,
                  const std::optional<InputArray<uint8_t>>& priorities,
                  const std::vector<double>& stats, int64_t timeout,
                  const std::string& timeout_from) {
    if (data.shape(0) != plan.elements) {
      throw nb::value_error(("data has " + std::to_string(data.shape(0)) + " elements, the plan " +
                             std::to_string(plan.elements))
                                .c_str());
    }
    const bool narrow = data.dtype() == nb::dtype<uint16_t>();
    if (!narrow && data.dtype() != nb::dtype<float>())
      throw nb::type_error("data has another type than float32 and uint16");
    if (narrow && !plan.result_format().is_type_of_two_bytes()) {
      throw nb::value_error(
          "data of uint16 needs a plan with a pull whose encoding is \"half\" or \"bf16\"");
    }
    if (timeout <= 0) throw nb::value_error("timeout_ns must be positive");
    OpSpec spec;
    spec.op = checked_id(op, lane);
    spec.step = step;
    spec.plan = plan;
    spec.data = {static_cast<uint8_t*>(data.data()), narrow};
    if (critical) spec.critical.assign(critical->data(), critical->data() + critical->shape(0));
    if (priorities)
      spec.priorities.assign(priorities->data(), priorities->data() + priorities->shape(0));
    spec.stats = to_stats(stats);
    spec.timeout = timeout;
    const uint64_t id = spec.op;
    spec.timeout_from = timeout_from;
    // The engine's thread writes into the array from start() on, so it is kept before that, and
    // even if the caller drops it.
    const auto [held, fresh] = held_.try_emplace(id, data);
    try {
      loop_->start(spec);
    } catch (...) {
      if (fresh) held_.erase(held);
      throw;
    }
  }

  std::optional<OpReport> next_completion(int64_t timeout) {
    std::optional<OpReport> report;
    wait_in_slices(timeout, [&](Nanos slice) {
      report = loop_->next_report(slice);
      return report.has_value() || loop_->closed();
    });
    if (report) held_.erase(report->op);
    return report;
  }

 private:
  std::shared_ptr<io::LoopGroup> loop_;
  std::unordered_map<uint64_t, BucketArray> held_;
};

void require(bool right, const std::string& text) {
  if (!right) throw nb::value_error(text.c_str());
}

// The two secrets of a peer, or None: of what goes there, and of what comes from there.
using PeerSecrets = std::optional<std::pair<nb::bytes, nb::bytes>>;

// The keys of each of the engine's threads, whose secrets follow each other.
std::vector<io::Keys> make_keys(const std::string& auth, const std::string& cipher,
                                const std::vector<PeerSecrets>& secrets,
                                const EndpointConfig& config) {
  io::Keys keys;
  keys.mode = parse<seal::Mode>(
      "auth", auth, std::array<std::string_view, 4>{"none", "headers", "whole", "secret"});
  keys.cipher = parse<seal::Cipher>(
      "cipher", cipher, std::array<std::string_view, 2>{"aes-128-gcm", "chacha20-poly1305"});
  std::vector<io::Keys> all(config.engines, keys);
  if (keys.mode == seal::Mode::none) return all;
  const size_t endpoints = config.endpoints();
  require(secrets.size() == endpoints * config.engines,
          "secrets: " + std::to_string(secrets.size()) + " for " + std::to_string(endpoints) +
              " endpoints; one pair each, or None, for each of " + std::to_string(config.engines) +
              " engines");
  for (size_t i = 0; i < secrets.size(); ++i) {
    auto& out = all[i / endpoints].secrets.emplace_back();
    if (secrets[i]) out.emplace(to_secret(secrets[i]->first), to_secret(secrets[i]->second));
  }
  for (const io::Keys& each : all) {
    for (uint16_t peer = 0; peer < endpoints; ++peer) {
      require(peer == config.endpoint || !config.talks_to(peer) || each.secrets[peer],
              "secrets: none for endpoint " + std::to_string(peer));
    }
  }
  return all;
}

EndpointConfig make_config(uint16_t endpoint, uint16_t workers, uint16_t servers, uint32_t session,
                           uint32_t datagram_bytes, int64_t peer_timeout, uint64_t memory_limit,
                           int64_t dscp, bool ecn, const std::vector<uint32_t>& ranks,
                           uint16_t engines) {
  require(workers >= 1, "workers: at least 1 is needed");
  require(uint32_t{workers} + servers <= 65'535, "workers + servers: at most 65535 are allowed");
  require(endpoint < uint32_t{workers} + servers,
          "endpoint is " + std::to_string(endpoint) + "; there are " +
              std::to_string(uint32_t{workers} + servers) + " endpoints");
  require(datagram_bytes >= wire::kMinDatagram && datagram_bytes <= wire::kMaxDatagram,
          "datagram_bytes is " + std::to_string(datagram_bytes) + "; allowed are 256 to 8972");
  require(peer_timeout > 0, "peer_timeout_ns must be positive");
  require(dscp >= 0 && dscp <= kMostDscp,
          "dscp is " + std::to_string(dscp) + "; allowed are 0 to 63");
  require(ranks.empty() || ranks.size() == workers, "ranks: " + std::to_string(ranks.size()) +
                                                        " for " + std::to_string(workers) +
                                                        " workers; one each, or none");
  require(engines >= 1, "engines: at least 1 is needed");
  EndpointConfig config;
  config.engines = engines;
  config.endpoint = endpoint;
  config.workers = workers;
  config.servers = servers;
  config.session = session;
  config.datagram_bytes = datagram_bytes;
  config.peer_timeout = peer_timeout;
  config.ping_interval = std::min(config.ping_interval, std::max<Nanos>(peer_timeout / 5, 1));
  if (memory_limit != 0) config.memory_limit = memory_limit;
  config.dscp = static_cast<uint8_t>(dscp);
  config.ecn = ecn;
  config.ranks = ranks;
  return config;
}

// Asks the engine's thread, which may be busy, without the interpreter's lock.
io::Snapshot snapshot_of(io::LoopGroup& loop) {
  const nb::gil_scoped_release release;
  return loop.snapshot();
}

nb::dict counters_of(io::LoopGroup& loop) {
  const io::Snapshot snapshot = snapshot_of(loop);
  nb::dict out;
  add_counters(out, snapshot.endpoint);
  out["send_calls"] = snapshot.socket.send_calls;
  out["receive_calls"] = snapshot.socket.receive_calls;
  out["send_blocked"] = snapshot.socket.blocked;
  out["send_too_long"] = snapshot.socket.too_long;
  out["send_errors"] = snapshot.socket.send_errors;
  out["receive_truncated"] = snapshot.socket.truncated;
  out["receive_overflows"] = snapshot.socket.overflows;
  out["strangers"] = snapshot.strangers;
  out["forged"] = snapshot.gate.forged;
  out["replayed"] = snapshot.gate.replayed;
  out["injected_drops"] = snapshot.injected;
  out["wakeups"] = snapshot.wakeups;
  return out;
}

nb::dict path_of(const PathState& path) {
  nb::dict out;
  out["packets_sent"] = path.total.sent.packets;
  out["bytes_sent"] = path.total.sent.bytes;
  out["packets_received"] = path.total.received.packets;
  out["bytes_received"] = path.total.received.bytes;
  out["retransmissions"] = path.total.sent.retransmissions;
  out["declared_lost"] = path.total.declared_lost;
  out["waited_ns"] = path.total.waited;
  out["rtprop_ns"] = path.rtprop;
  out["round_ns"] = path.round;
  out["queue_to_ns"] = path.queue_to;
  out["loss_to"] = path.loss_to;
  out["loss_from"] = path.loss_from;
  out["window"] = path.window;
  out["in_flight"] = path.in_flight;
  return out;
}

nb::dict features_of(io::LoopGroup& loop) {
  const io::Snapshot snapshot = snapshot_of(loop);
  nb::dict out;
  out["udp_segment"] = snapshot.features.segment;
  out["udp_gro"] = snapshot.features.gro;
  out["timestamps"] = snapshot.features.timestamps;
  out["dscp"] = snapshot.features.dscp;
  out["ecn"] = snapshot.features.ecn;
  out["rcvbuf"] = snapshot.features.receive_buffer;
  out["sndbuf"] = snapshot.features.send_buffer;
  out["rcvbuf_asked"] = io::kReceiveBuffer;
  out["sndbuf_asked"] = io::kSendBuffer;
  return out;
}

std::string refusal_of(io::LoopGroup& loop) {
  const nb::gil_scoped_release release;
  const io::SocketCounters socket = loop.snapshot().socket;
  if (socket.send_errors == 0) return "";
  return std::generic_category().message(socket.last_error) + " (" +
         std::to_string(socket.send_errors) + " datagrams)";
}

}  // namespace

void add_counters(nb::dict& into, const Counters& counters) {
  into["packets_sent"] = counters.sent.packets;
  into["bytes_sent"] = counters.sent.bytes;
  into["packets_received"] = counters.received.packets;
  into["bytes_received"] = counters.received.bytes;
  into["retransmissions"] = counters.sent.retransmissions;
  into["spurious_retransmissions"] = counters.spurious_retransmissions;
  into["copies"] = counters.copies;
  into["declared_lost"] = counters.declared_lost;
  into["probes"] = counters.probes;
  into["acks_sent"] = counters.acks_sent;
  into["duplicates"] = counters.duplicates;
  into["malformed"] = counters.malformed;
  into["refused"] = counters.refused;
  into["memory"] = counters.now.memory;
  into["credit_stalls"] = counters.credit_stalls;
  into["window_stalls"] = counters.window_stalls;
  into["marked"] = counters.marked;
  into["mark_cuts"] = counters.mark_cuts;
  into["ecn_failed"] = counters.ecn_failed;
  into["rtprop_ns"] = counters.now.rtprop;
  into["queue_delay_ns"] = counters.now.queue_delay;
  into["btlbw"] = counters.now.btlbw;
  into["fragmented"] = counters.fragmented;
  into["path_limit"] = counters.now.path_limit;
  into["send_window"] = counters.now.send_window;
  into["receive_window"] = counters.now.receive_window;
}

void bind_engine(nb::module_& module) {
  nb::class_<PeerState>(module, "Peer", "What an engine knows of another one.")
      .def_prop_ro("endpoint", [](const PeerState& p) { return p.endpoint; })
      .def_prop_ro("answered", [](const PeerState& p) { return p.answered; })
      .def_prop_ro("heard", [](const PeerState& p) { return p.heard; })
      .def_prop_ro("left", [](const PeerState& p) { return p.left; })
      .def_prop_ro("silence_ns", [](const PeerState& p) { return p.silence; })
      .def("path", [](const PeerState& p) { return path_of(p.path); })
      .def(
          "has_begun",
          [](const PeerState& p, uint64_t op, uint16_t lane) {
            return p.has_begun(checked_id(op, lane));
          },
          "op"_a, "lane"_a = 0);

  nb::class_<Failure>(module, "Failure", "Why an engine has failed.")
      .def_prop_ro("text", [](const Failure& f) { return to_text(f.text); })
      .def_prop_ro("rank", [](const Failure& f) { return f.rank; })
      .def_prop_ro("cause", [](const Failure& f) { return word_of(f.cause); });

  nb::class_<Engine>(module, "Engine",
                     "One UDP engine of this process: one socket, one thread without the GIL.")
      .def(
          "__init__",
          [](Engine* self, uint16_t endpoint, uint16_t workers, uint16_t servers, uint32_t session,
             const std::string& address, uint16_t port, uint32_t datagram_bytes,
             int64_t peer_timeout, uint64_t memory_limit, double drop_rate, double drop_burst,
             uint64_t drop_seed, int64_t dscp, bool ecn, const std::vector<uint32_t>& ranks,
             const std::string& auth, const std::string& cipher,
             const std::vector<PeerSecrets>& secrets, uint16_t engines,
             std::vector<uint16_t> ports) {
            const EndpointConfig config =
                make_config(endpoint, workers, servers, session, datagram_bytes, peer_timeout,
                            memory_limit, dscp, ecn, ranks, engines);
            if (ports.empty()) ports = {port};
            new (self) Engine(config, make_keys(auth, cipher, secrets, config), address, ports,
                              make_drop(drop_rate, drop_burst, drop_seed));
          },
          nb::kw_only(), "endpoint"_a, "workers"_a, "servers"_a, "session"_a, "address"_a,
          "port"_a = 0, "datagram_bytes"_a = 1472, "peer_timeout_ns"_a = 30 * kSecond,
          "memory_limit"_a = 0, "drop_rate"_a = 0.0, "drop_burst"_a = 1.0, "drop_seed"_a = 0,
          "dscp"_a = 0, "ecn"_a = true, "ranks"_a = std::vector<uint32_t>{}, "auth"_a = "none",
          "cipher"_a = "aes-128-gcm", "secrets"_a = std::vector<PeerSecrets>{}, "engines"_a = 1,
          "ports"_a = std::vector<uint16_t>{})
      .def_prop_ro("address", [](Engine& engine) { return engine.loop().addresses()[0]; })
      .def_prop_ro("addresses", [](Engine& engine) { return engine.loop().addresses(); })
      .def("connect",
           [](Engine& engine, const nb::args& addresses) {
             std::vector<std::vector<io::LoopGroup::Place>> places;
             for (const nb::handle each : addresses)
               places.push_back(nb::cast<std::vector<io::LoopGroup::Place>>(each));
             const nb::gil_scoped_release release;
             engine.loop().connect(places);
           })
      .def(
          "wait_connected",
          [](Engine& engine, int64_t timeout) {
            std::vector<uint16_t> missing;
            wait_in_slices(timeout, [&](Nanos slice) {
              missing = engine.loop().wait_connected(slice);
              return missing.empty() || engine.loop().closed() || engine.loop().failure();
            });
            return missing;
          },
          "timeout_ns"_a)
      .def("all_reduce", &Engine::all_reduce, nb::kw_only(), "op"_a, "lane"_a = 0, "step"_a,
           "plan"_a, "data"_a.noconvert(), "critical"_a = nb::none(), "priorities"_a = nb::none(),
           "stats"_a = std::vector<double>{}, "timeout_ns"_a = 1800 * kSecond,
           "timeout_from"_a = "")
      .def("next_completion", &Engine::next_completion, "timeout_ns"_a)
      .def(
          "set_drop",
          [](Engine& engine, double rate, double burst, uint64_t seed) {
            engine.loop().set_drop(make_drop(rate, burst, seed));
          },
          "rate"_a, "burst"_a = 1.0, "seed"_a = 0)
      .def("counters", [](Engine& engine) { return counters_of(engine.loop()); })
      .def("peers",
           [](Engine& engine) {
             const nb::gil_scoped_release release;
             return engine.loop().snapshot().peers;
           })
      .def(
          "record",
          [](Engine& engine, size_t entries) {
            std::vector<std::vector<Timeline::Entry>> found;
            {
              const nb::gil_scoped_release release;
              found = engine.loop().record(entries);
            }
            nb::list out;
            for (const auto& each : found) out.append(timeline_list(each));
            return out;
          },
          "entries"_a)
      .def("refusal", [](Engine& engine) { return refusal_of(engine.loop()); })
      .def("features", [](Engine& engine) { return features_of(engine.loop()); })
      .def("failure",
           [](Engine& engine) -> std::optional<Failure> {
             Failure failure = engine.loop().failure();
             if (!failure) return std::nullopt;
             return failure;
           })
      .def(
          "fail", [](Engine& engine, const std::string& why) { engine.loop().fail(why); }, "why"_a)
      .def("leave_to_parent", [](Engine& engine) { engine.loop().leave_to_parent(); })
      .def("close", [](Engine& engine) {
        const nb::gil_scoped_release release;
        engine.loop().close();
      });

  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_all));
}

}  // namespace gradwire::binding
