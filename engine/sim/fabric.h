// Fabric runs endpoints in virtual time on one switch. The protocol code is the code that ships;
// links, queues and losses are computed. One seed gives one run.
//
// Set it up (link(), add_cross_traffic()), start() ops, run(), and read reports, counters and
// violations(). Each host has an uplink to the switch and a downlink (its port) from it. The fabric
// drives the endpoints as io does, and checks invariants at every event.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/endpoint/endpoint.h"
#include "sim/event_queue.h"
#include "sim/hearing.h"
#include "sim/link.h"
#include "sim/pass_check.h"
#include "sim/random.h"
#include "sim/tcp_flow.h"
#include "wire/packet.h"

namespace gradwire::sim {

class Fabric;

struct FabricOptions {
  uint16_t workers = 2;
  uint16_t servers = 0;
  uint64_t seed = 0;
  LinkOptions link;           // both directions of every port, until set_link
  uint32_t overhead = 42;     // bytes on the wire besides the payload: Ethernet, IPv4, UDP
  bool whole_trains = false;  // a train passes queues and losses as one
  Nanos host_delay = 0;       // from a datagram's arrival, or a timer's time, to its processing …
  Nanos host_jitter = 0;      // … plus up to this
  Nanos send_time = 0;        // how long a call that sends a train keeps its host busy
  size_t trace_limit = 0;     // datagrams that trace() keeps
  uint64_t most_events = UINT64_MAX;  // more count as a storm, a broken invariant
  // Another job on the same hosts: its ports are shared, and time goes on from its time.
  Fabric* beside = nullptr;
  EndpointConfig endpoint;  // of all endpoints; endpoint, workers and servers are set

  // An empty string, or what is wrong.
  std::string validate() const;
};

struct CrossTraffic {
  Nanos start = 0;
  Nanos length = 10 * kMillisecond;
  Nanos period = 0;     // 0: one burst
  double rate = 500e6;  // bytes/s
  uint32_t train = 1;   // packets back to back
};

// TraceEntry is one datagram as it left an endpoint, and its fate.
struct TraceEntry {
  enum class Fate : uint8_t { delivered, queue, loss, unreachable };
  Nanos time;
  uint16_t source;
  uint16_t destination;
  uint8_t kind;
  uint32_t packet_number;  // of reliable packets, like op and chunk
  uint32_t op;
  uint32_t chunk;
  uint32_t bytes;
  Fate fate;
  uint8_t dscp;
};

class Fabric {
 public:
  enum class Direction : uint8_t { up, down };

  // Throws std::invalid_argument.
  explicit Fabric(const FabricOptions& options);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const FabricOptions& options() const { return options_; }
  size_t hosts() const { return hosts_.size(); }
  Nanos now() const { return now_; }

  // ---- the network and its faults
  Link& link(uint16_t host, Direction direction);
  void add_cross_traffic(uint16_t host, Direction direction, const CrossTraffic& traffic);
  // Adds a flow that yields to loss; returns its index.
  size_t add_flow(uint16_t host, Direction direction, const TcpFlowOptions& flow);
  const TcpFlowCounters& flow(size_t index) const { return flows_.at(index).flow.counters; }
  // Makes a host's clock run faster by `ppm` millionths; before the first event only.
  void set_clock(uint16_t host, double ppm);
  // Sets a host's clock forward, as the move of a virtual machine does. A monotonic clock never
  // goes back.
  void jump_clock(uint16_t host, Nanos by);
  void pause(uint16_t host);  // the process is suspended; its socket buffer fills
  // `stood`: its clock stood still meanwhile, as that of a virtual machine does.
  void resume(uint16_t host, bool stood = false);
  void kill(uint16_t host);  // the process ends without BYE
  // Starts the process of a host anew, as a member of another session: the launcher starts the
  // whole job again, each host at its own time. The first such start of a session ends the ops of
  // the session before, whose results are gone; packets under way stay.
  void restart(uint16_t host, uint32_t session);
  // Drops what `from` sends to `to`, from now on or no longer.
  void set_cut(uint16_t from, uint16_t to, bool cut);
  void set_partition(uint16_t a, uint16_t b, bool parted);
  // Delivers a forged datagram to `destination` in the name of `source`.
  void inject(uint16_t source, uint16_t destination, std::span<const uint8_t> bytes);

  // ---- ops
  // `data` belongs to the fabric from here on. Refused ops have a report at once.
  void start(uint16_t worker, OpSpec spec, std::vector<float> data, Nanos at);
  void close(uint16_t host, Nanos linger);

  // Frees what is kept of ops that all workers have finished: buffers, reports, hashes of payloads.
  void forget();

  // Runs until `until`, or until all ops of living workers are done (if `until_done`) or a check
  // fails. True when all ops are done.
  bool run(Nanos until, bool until_done);
  // Runs this and another fabric on one clock: event by event, the earlier first. It ends at
  // `until`, when either has no open op, or when a check fails.
  void run_beside(Fabric& other, Nanos until);
  // Runs fabrics on one clock until all ops of all of them are done; true when they are.
  static bool run_together(std::span<Fabric* const> fabrics, Nanos until);

  // ---- results
  const OpReport* report(uint16_t worker, uint64_t op) const;  // null while it runs
  const std::vector<float>* data(uint16_t worker, uint64_t op) const;
  Nanos finished_at(uint16_t worker, uint64_t op) const;
  Timeline& timeline(uint16_t host) { return hosts_.at(host).endpoint->timeline(); }
  const std::string& failure(uint16_t host) const { return hosts_[host].failure; }
  bool closed(uint16_t host) const { return hosts_[host].closed; }
  Counters counters(uint16_t host) const { return hosts_[host].endpoint->counters(); }
  uint64_t dropped_by_socket(uint16_t host) const { return hosts_[host].dropped_socket; }
  // The packets sent by a host that queues and policers have dropped, wherever they are.
  uint64_t dropped_by_ports(uint16_t host) const { return hosts_[host].dropped_ports; }
  // The longest time in which `to` heard nothing of `from` since the wire lost what they sent.
  Nanos unheard(uint16_t from, uint16_t to) const { return hearing_.longest(from, to); }
  // True when each endpoint has had an answer of each that it talks to.
  bool met() const;
  bool broken() const { return !violations_.empty(); }
  // The invariants found broken. Finished buffers are compared once more.
  std::vector<std::string> violations();
  uint64_t trace_hash() const { return trace_hash_; }
  const std::vector<TraceEntry>& trace() const { return trace_; }
  uint64_t events() const { return sequence_; }

 private:
  // The trace index of datagrams that are not recorded.
  static constexpr uint32_t kUntraced = 0xffffffff;
  // Units that an endpoint may hold, a few, so that most runs come to the end of them.
  static constexpr size_t kMostHeld = 16;

  // Unit is what travels: one datagram, or a train that stays whole.
  struct Unit {
    uint16_t source;
    uint16_t destination;
    uint32_t segment;
    uint32_t packets;
    uint32_t trace;  // trace index of its first datagram
    uint8_t ecn;
    bool corrupt;  // the kernel of the receiving host drops it
    bool forged;   // no endpoint sent it
    std::vector<uint8_t> bytes;
  };
  using Event = EventQueue::Event;
  struct Arrived {
    uint32_t unit;
    Nanos time;
  };
  // Received is what has arrived at once, in memory that the endpoint may hold.
  struct Received {
    std::vector<uint8_t> bytes;
    Buffer buffer = {};
  };
  struct Host {
    std::list<Received> held;  // outlives the endpoint
    std::unique_ptr<Endpoint> endpoint;
    std::shared_ptr<Link> up;
    std::shared_ptr<Link> down;
    std::deque<Arrived> ring;
    uint64_t ring_bytes = 0;
    uint64_t dropped_socket = 0;
    uint64_t dropped_ports = 0;
    Nanos timer_at = kNever;   // the earliest timer event in the queue …
    Nanos timer_for = kNever;  // … and the timer that it is for
    Nanos busy_until = 0;      // the end of a send call
    double clock = 0;          // what its clock gains in a nanosecond …
    Nanos ahead = 0;           // … and by how much it has been set
    Nanos paused_at = 0;
    std::vector<uint32_t> asked;  // runs to start when the process goes on, in order
    uint32_t session = 0;
    Nanos stepped_at = -1;
    uint32_t steps_at_once = 0;
    bool wake_due = false;
    bool paused = false;
    bool dead = false;
    bool closed = false;
    std::string failure;
    std::vector<uint64_t> packet_numbers;  // by destination: the last number sent
  };
  struct Run {
    uint16_t worker;
    OpSpec spec;
    std::vector<float> input;
    std::vector<float> data;
    bool begun = false;
    bool done = false;
    bool over = false;  // of an earlier session
    OpReport report;
    uint64_t result = 0;  // fingerprint of `data` when it was reported
    Nanos finished_at = kNever;
  };
  struct Cross {
    uint16_t host;
    Direction direction;
    CrossTraffic traffic;
    Nanos burst_end;
  };

  struct Flow {
    uint16_t host;
    Direction direction;
    TcpFlow flow;
  };

  // Sender identifies the chunks of one kind that one host sends of an op; a result is the same for
  // all receivers.
  struct Sender {
    uint32_t op;
    uint16_t host;
    wire::Kind kind;
    auto operator<=>(const Sender&) const = default;
  };

  void push(Nanos time, Event::Kind kind, uint32_t index, uint16_t stream = EventQueue::kNoStream);
  Nanos next_event() const { return queue_.empty() ? kNever : queue_.top().time; }
  void next();
  void handle(const Event& event);
  uint32_t new_unit();
  uint32_t unused_unit();
  uint32_t copy_unit(uint32_t from);
  void free_unit(uint32_t unit);

  void step(uint16_t host);
  void take_arrived(Host& host);
  void schedule_timer(uint16_t host);
  Nanos lateness();
  void make_endpoint(uint16_t host);
  void end_session();
  static Nanos local(const Host& host, Nanos time);
  static Nanos from_local(const Host& host, Nanos time);
  void begin(Run& run);
  void finish(Run& run, OpReport report);
  void take_event(uint16_t host, gradwire::Event& event);

  void launch(uint16_t host, const Train& train);
  void cross(uint32_t unit, uint16_t host, Direction direction);
  void at_switch(uint32_t unit);
  void at_host(uint32_t unit);
  void send_garbage(uint32_t unit, Link& link, Nanos at);
  void cross_packet(uint32_t index);
  void flow_packets(uint32_t index);
  bool reachable(uint16_t from, uint16_t to) const;

  void check_train(uint16_t host, const Train& train);
  void check_datagram(uint16_t host, uint16_t destination, std::span<const uint8_t> bytes);
  void check_payload(uint16_t host, const wire::Header& header, std::span<const uint8_t> payload);
  void check_passes(uint16_t host, uint16_t destination, const wire::Header& header,
                    std::span<const uint8_t> payload);
  void note_bitmap(uint16_t host, uint16_t source, std::span<const uint8_t> bytes);
  void check_op(uint64_t op);
  void violate(const std::string& text);
  static uint64_t fingerprint(std::span<const std::byte> bytes);
  void hash(uint64_t value);
  void hash(std::span<const uint8_t> bytes);
  uint32_t record(const Unit& unit, std::span<const uint8_t> bytes, uint8_t dscp);
  void set_fate(const Unit& unit, TraceEntry::Fate fate);

  FabricOptions options_;
  Nanos now_ = 0;
  uint64_t sequence_ = 0;
  Random random_;
  EventQueue queue_;
  std::vector<Host> hosts_;
  std::vector<Unit> units_;
  std::vector<uint32_t> free_units_;
  std::deque<Run> runs_;
  std::map<uint64_t, std::vector<uint32_t>> by_op_;  // op -> run of each worker
  uint64_t open_runs_ = 0;
  std::vector<Cross> cross_;
  std::vector<Flow> flows_;
  std::vector<bool> parted_;  // [from × hosts + to]
  Train train_;
  std::vector<Endpoint::Datagram> run_;  // the datagrams of one unit
  gradwire::Event event_;
  std::map<Sender, std::vector<uint64_t>> payloads_;  // hashes by chunk; 0: not sent yet
  PassCheck passes_;
  Hearing hearing_;
  std::vector<std::string> violations_;
  std::vector<TraceEntry> trace_;
  uint64_t trace_hash_ = 0xcbf29ce484222325u;
};

}  // namespace gradwire::sim
