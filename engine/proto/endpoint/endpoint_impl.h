// Endpoint::Impl is the inside of Endpoint. Its methods stand in the file of their subject, which
// the comments below name; endpoint.cc has timers and closing.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "proto/base/agenda.h"
#include "proto/congestion/send_controller.h"
#include "proto/credit/receive_controller.h"
#include "proto/endpoint/endpoint.h"
#include "proto/endpoint/op.h"
#include "proto/path/path.h"
#include "proto/sched/scheduler.h"
#include "wire/packet.h"

namespace gradwire {

// Packets of ops that have not started here are stashed while memory allows: so many of each path
// in any case, and so many of all paths together.
inline constexpr size_t kStashMost = 512;
inline constexpr size_t kStashInAll = 8192;
// Ops by which a peer may be ahead in its lane; bounds what it can make this endpoint keep.
inline constexpr uint64_t kOpsAhead = 1024;
// A path without an answer for this long may not carry datagrams of the agreed length.
inline constexpr Nanos kTrialAfter = 1 * kSecond;

// WaitingOps are ops that memory does not let start yet.
struct WaitingOps {
  // Workers: own ops, in order of arrival. Their time-outs run meanwhile.
  struct Own {
    OpSpec spec;
    uint64_t need;  // bytes
    Nanos since;
  };
  std::deque<Own> ops;
  // Servers: OPENs of ops that have not been admitted yet.
  struct Opens {
    uint64_t need = 0;  // bytes of the op, once it is known
    std::map<uint16_t, MessageReceiver> messages;
  };
  std::map<uint64_t, Opens> opens;
};

// OpAgenda names the ops that something is due for.
struct OpAgenda {
  // When an op's deadline is, or what its sums wait for; with its id.
  std::set<std::pair<Nanos, uint64_t>> timers;
  std::vector<uint64_t> changed;  // ids: these may be drained
  bool retire = false;            // an op may be drained now
  uint32_t in_passes = 0;         // ops under control "probe"

  Nanos earliest() const { return timers.empty() ? kNever : timers.begin()->first; }
};

// Due is when which path needs something, as of the last settling.
struct Due {
  explicit Due(size_t paths, Nanos now)
      : sends(paths),
        controls(paths),
        checks(paths),
        uncounted(paths),
        last_timer(now),
        clock(now) {}

  // By path: an ACK, ping or farewell; a control frame; on_timer().
  Agenda sends;
  Agenda controls;
  Agenda checks;
  std::vector<uint16_t> touched;  // paths to settle
  // By path: the op of which what waits for the peer must be counted again; null: none.
  std::vector<Op*> uncounted;
  int long_paths = 0;
  int lossy_paths = 0;    // paths with heavy loss
  Nanos repeat = kNever;  // packets go again before an ACK
  Nanos pace = 0;         // the next train
  Nanos last_timer;       // the last on_timer()
  Nanos clock;            // the latest time that is known
};

// Scratch is memory that is used again and again.
struct Scratch {
  std::vector<uint8_t> encoded;  // payloads of one train
  Recovery::Acked acked;
  std::vector<Recovery::Lost> lost;
  std::vector<uint16_t> arrived;  // paths from which packets have arrived since the last flush
};

// Leaving is how this endpoint ends.
struct Leaving {
  bool begun = false;
  bool over = false;
  bool any_gone = false;  // some peer has left
  Nanos deadline = kNever;
  Nanos last_deadline = kNever;  // the latest deadline, even while peers take results
  Nanos linger = 0;
  Nanos result_taken = 0;  // when a peer last acknowledged a result
};

// Fate is what becomes of a packet that arrived for the first time.
enum class Fate : uint8_t { taken, refused, malformed };
inline Fate fate_of(bool good) {
  return good ? Fate::taken : Fate::malformed;
}

// Room says when memory lets an op start.
enum class Room : uint8_t { now, later, never };

struct Endpoint::Impl {
  Impl(const EndpointConfig& config, Nanos now);

  // endpoint.cc
  void on_timer(Nanos now);
  Nanos next_timer();
  void close(Nanos now, Nanos linger);
  void fail(Failure why, Nanos now);
  std::string name(uint16_t endpoint) const { return config.name(endpoint); }
  void emit(Event::Type type, uint16_t endpoint = 0, OpReport report = OpReport()) {
    events.push_back({type, endpoint, std::move(report)});
  }
  bool farewell_over(const Path& path) const;
  bool close_ready() const;
  void finish_close(Nanos now);

  // liveness.cc
  void check_life(const std::vector<Path*>& checked, Nanos now);
  void check_silence(Nanos now);
  Failure silence_of(const std::vector<const Path*>& silent, size_t peers, bool all,
                     Nanos now) const;
  std::string not_begun(const Op& op, int32_t& rank, Nanos now) const;
  void check_deadlines(Nanos now);
  std::string missing_of(const Op& op, int32_t& rank, Nanos now) const;
  Liveness::Times ping_times() const { return {config.ping_interval, config.peer_timeout}; }

  // receive.cc
  void receive(uint16_t source, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
               uint8_t ecn);
  void other_version(const Path& path, uint8_t version, Nanos now);
  void on_packet(Path& path, wire::Kind kind, std::span<const uint8_t> datagram, Nanos now,
                 Nanos arrival, uint8_t ecn);
  void on_reliable(Path& path, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
                   uint8_t ecn);
  Fate accept(Path& path, const wire::Header& header, uint64_t op_id,
              std::span<const uint8_t> datagram, Nanos now);
  std::optional<wire::Ping> read_ping(Path& path, std::span<const uint8_t> datagram);
  bool on_ping(Path& path, std::span<const uint8_t> datagram, Nanos now);
  bool on_pong(Path& path, std::span<const uint8_t> datagram, Nanos now);
  bool on_error(Path& path, std::span<const uint8_t> datagram, Nanos now);
  bool on_bye(Path& path, std::span<const uint8_t> datagram, Nanos now);
  Nanos measure(Path& path, const wire::Header& header, uint64_t bytes, Nanos now, Nanos arrival);
  void note_waits(const Path& path, uint64_t op_id, uint64_t number, Nanos queue);
  void schedule_ack(Path& path, const wire::Header& header, Nanos now);
  // True when the op's chunks of this worker are summed here.
  bool sums_for(const Op& op, uint16_t worker) const {
    return op.aggregator && worker < config.workers;
  }
  // True when the op's own worker takes results of this endpoint.
  bool pulls_from(const Op& op, uint16_t endpoint) const {
    return op.worker && config.aggregator_at(endpoint) != kNoAggregator;
  }
  // The sender of an op's chunks to a peer, in one direction.
  ChunkSender& sender_of(Op& op, const Path& path, wire::Kind kind) const {
    return kind == wire::Kind::push ? *op.worker->push[config.aggregator_at(path.peer)]
                                    : *op.aggregator->back[path.peer];
  }
  Fate on_push(Path& path, Op& op, const wire::Header& header, std::span<const uint8_t> payload,
               Nanos now, bool stashed);
  Fate for_aggregator(Path& path, Op& op, const wire::Header& header,
                      std::span<const uint8_t> payload, Nanos now);
  Fate on_forgive(Path& path, Op& op, std::span<const uint8_t> payload, Nanos now);
  Fate for_worker(Path& path, Op& op, const wire::Header& header, std::span<const uint8_t> payload,
                  Nanos now);
  bool on_pull(Path& path, Op& op, uint32_t chunk, std::span<const uint8_t> payload, Nanos now);
  bool on_stop(Path& path, Op& op, ChunkSender& sender, std::span<const uint8_t> payload);
  Fate dispatch(Path& path, Op& op, const wire::Header& header, std::span<const uint8_t> payload,
                Nanos now, bool stashed = false);
  void share_credit(Path& path, Nanos now);
  void flush(Nanos now);
  void replay(uint64_t op, Nanos now);

  // acks.cc
  void on_counts(Path& path, const wire::Ack& ack, Nanos now);
  bool on_ack(Path& path, const wire::Ack& ack, Nanos now);
  Op* op_of(const SentPacket& packet);
  void packets_acked(Path& path, Nanos now);
  void control_acked(Path& path, std::span<const SentPacket> packets);
  void chunks_acked(Path& path, std::span<const SentPacket> packets, Nanos now);
  void packet_lost(Path& path, const SentPacket& packet, Again why, Nanos now);
  void packets_lost(Path& path, Nanos now);
  void give_up(Op& op, const Path& path, ChunkSender& push);
  void check_probe(Path& path, Nanos now);

  // settle.cc
  // Notes that something of this path has changed.
  void touch(Path& path) {
    if (path.settled.touched) return;
    path.settled.touched = true;
    due.touched.push_back(path.peer);
  }
  void settle();
  void settle_destination(Path& path);
  Nanos next_send(Path& path) const;
  Nanos next_check(Path& path) const;

  // transmit.cc
  bool transmit(Nanos now, Train& train, bool urgent);
  bool transmit_next(Nanos now, Train& train, bool urgent);
  void write_ping(Path& path, Nanos now, bool pong, size_t bytes, Train& train);
  void write_ack(Path& path, Nanos now, Train& train);
  bool transmit_unreliable(Path& path, Nanos now, Train& train);
  bool transmit_ping(Path& path, Nanos now, Train& train);
  bool transmit_error(Path& path, Nanos now, Train& train);
  uint64_t next_id(Path& path) const;
  bool transmit_farewell(Path& path, Nanos now, Train& train);
  bool transmit_control(Path& path, Nanos now, Train& train);
  wire::Header header_at(Nanos now) const;
  static void set_header(wire::Header& header, const SentPacket& packet, uint32_t chunk,
                         uint64_t backlog);
  wire::Common common(wire::Kind kind) const {
    return {wire::kVersion, kind, config.endpoint, config.session};
  }

  // trains.cc
  // Chunk is the next chunk of an op for a peer.
  struct Chunk {
    uint32_t id = 0;
    wire::Kind kind = wire::Kind::push;
    bool again = false;
    bool encoded = false;
    uint16_t flags = 0;
    const void* payload = nullptr;
  };
  // Filling is the state of a train that is being filled.
  struct Filling {
    wire::Header header;    // of the last packet; the next has most of it in common
    uint32_t most = 0;      // packets
    uint64_t left = 0;      // chunks that wait for this peer
    uint64_t room = 0;      // chunks that may go early
    uint32_t encoded = 0;   // elements
    bool by_share = false;  // the receiver's window limits this path
    bool full = false;
  };
  bool early(const Path& path, const Op& op) const;
  size_t most_early(const Path& path) const;
  uint64_t early_room(const Path& path) const;
  uint64_t backlog(const Path& path) const;
  void recount(const Op& op, Path& path);
  void recount(const Op& op);
  // Has the next settling count what waits of an op for a peer: once for all packets until then.
  void count_later(Op& op, Path& path) {
    if (due.uncounted[path.peer] != &op) set_uncounted(op, path);
  }
  void set_uncounted(Op& op, Path& path);
  void note_started(Path& path, uint64_t below);
  void drop(const Op& op);
  SendController::LongPaths long_paths() const;
  bool transmit_train(Nanos now, Train& train);
  bool holds(Path& path, Nanos now, Nanos& until);
  void went(Path& path, const Train& train, bool probe, bool apart);
  void sent(Path& path, const Train& train, Nanos now);
  bool transmit_data(Path& path, Nanos now, Train& train, uint32_t most);
  void fill(Path& path, Op& op, Filling& filling, Nanos now, Train& train);
  static void count_early(Path& path, Op& op, const Chunk& chunk, Filling& filling);
  bool next_chunk(Path& path, Op& op, uint16_t aggregator, bool fresh, Chunk& chunk,
                  const Train& train);
  // The packets that a train holds.
  uint32_t longest_train() const {
    return static_cast<uint32_t>(
        std::min(Train::kMaxSegments, Train::kMaxBytes / config.datagram_bytes));
  }
  uint32_t twins_of(const Path& path, Op& op, const Chunk& chunk, const Filling& filling,
                    Nanos now) const;
  void write_twins(Path& path, Op& op, const Chunk& chunk, Filling& filling, Nanos now,
                   Train& train);
  uint32_t write_chunk(Path& path, Op& op, const Chunk& chunk, bool twin, Filling& filling,
                       Nanos now, Train& train);

  // path_limit.cc
  void limit(Path& path, uint32_t bytes, Nanos now);
  void lowered(Path& path, Nanos now);
  void raised(Path& path);
  void check_limit(Path& path, Nanos now);
  void on_fragment(Path& path, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
                   uint8_t ecn);
  void split(Path& path, Train& train);
  uint32_t longest_datagram() const;

  // priority.cc
  void set_classes(Op& op);
  // The DSCP of the chunk that goes to this peer next. `fresh`: pushes may include chunks not sent
  // so far.
  uint8_t next_dscp(Op& op, uint16_t aggregator, uint16_t peer, bool fresh) {
    return op.spec.plan.class_dscp.empty() ? config.dscp
                                           : dscp_of_class(op, aggregator, peer, fresh);
  }
  uint8_t dscp_of_class(Op& op, uint16_t aggregator, uint16_t peer, bool fresh);

  // repeat.cc
  void repeat(Nanos now);
  double unproven_rate(Nanos now) const;

  // passes.cc
  void end_passes();
  Fate on_pass_packet(Path& path, Op& op, const wire::Header& header,
                      std::span<const uint8_t> payload, Nanos now);
  bool on_probe(uint16_t source, Op& op, const wire::Pass& pass);
  bool on_pass_answer(Path& path, Op& op, const wire::Header& header, const wire::Pass& pass,
                      std::span<const uint8_t> missing, Nanos now);
  bool on_enough(Path& path, Op& op, std::span<const uint8_t> payload);
  void answer(Op& op, uint16_t to, wire::Way way, PassReceiver& passes, bool enough,
              const std::function<Bitmap()>& missing);
  uint64_t most_wanted(const Path& path) const;
  void answer_push(Op& op, uint16_t worker);
  void answer_pull(Op& op, uint16_t aggregator);
  void send_pass(uint16_t to, Op& op, wire::Kind kind, const wire::Pass& pass);

  // ops.cc
  const Lane& lane(uint64_t op) const;
  Lane& lane(uint64_t op);
  Failure start(OpSpec spec, Nanos now);
  Op& make_op(OpSpec spec, bool worker, Nanos now);
  void make_worker_part(Op& op, Nanos now);
  void make_aggregator_part(Op& op);
  void op_changed(Op& op);
  // Notes that an op may be drained.
  void may_be_drained(Op& op) {
    if (op.changed) return;
    op.changed = true;
    op_agenda.changed.push_back(op.id);
  }
  Op* find(uint64_t op) { return last_found && last_found->id == op ? last_found : look_up(op); }
  Op* look_up(uint64_t op);
  uint64_t full_id(uint32_t low) const;
  uint64_t expected(uint64_t op) const;
  bool finished(uint64_t op) const;
  void begin(OpSpec spec, Nanos since, Nanos now);
  Room room_for(uint64_t op, uint64_t need, uint64_t early = 0) const;
  bool stuck(uint64_t op) const;
  void begin_waiting(Nanos now);
  void fail_waiting(const std::function<Failure(const OpSpec&)>& why);
  void fail_op(Op& op, const Failure& why);
  void report_failed(const OpSpec& spec, const Failure& why);
  Failure too_large(uint64_t op, uint64_t step, uint64_t need) const;
  bool still_possible(const Op& op, Nanos now);
  bool drained(const Op& op) const;
  bool results_taken(const Op& op) const;
  void free_drained();
  void retire(Nanos now);

  // messages.cc
  std::string check_messages(const OpSpec& spec) const;
  void send_open(uint16_t to, Op& op, const Grid::Shard& shard, std::span<const uint8_t> plan);
  uint64_t next_admitted(uint64_t op) const;
  void admit(Nanos now);
  bool read_spec(uint64_t id, std::span<const uint8_t> open, OpSpec& spec) const;
  void start_served(OpSpec spec, std::map<uint16_t, MessageReceiver> opens, Nanos now);
  Fate serve_open(Path& path, const wire::Header& header, uint64_t op,
                  std::span<const uint8_t> payload, Nanos now);
  bool same_plan(const Op& op, uint16_t worker, std::span<const uint8_t> bytes, Nanos now);
  bool on_open(Op& op, uint16_t worker, std::span<const uint8_t> bytes, Nanos now);
  bool on_message(Op& op, uint16_t source, wire::Kind kind, MessageReceiver& message,
                  const wire::Header& header, std::span<const uint8_t> payload, Nanos now);
  bool on_close(Op& op, uint16_t aggregator, wire::Reader& reader);
  void send_control(uint16_t to, Op& op, wire::Kind kind, std::vector<uint8_t> payload,
                    uint32_t part = 0);
  void send_message(uint16_t to, Op& op, wire::Kind kind, std::span<const uint8_t> bytes,
                    std::span<const uint8_t> prefix = {});
  void send_list(uint16_t to, Op& op, wire::Kind kind, std::span<const uint32_t> values);

  // results.cc
  void after_sum(Op& op, Nanos now, uint16_t by = Waits::kNobody);
  void stop_regions(Op& op);
  void pass_on(Op& op, Nanos now);
  void send_close(Op& op);
  void fold(Op& op, Nanos now);
  bool withhold(Op& op, uint32_t chunk);
  void try_commit(Op& op, Nanos now);
  void apply(Op& op, uint32_t chunk, const uint8_t* payload, Nanos now);
  const Op* waits_for(uint16_t peer) const;
  void maybe_done(Op& op, Nanos now);
  void report(Op& op, Nanos now);

  uint64_t most_ack_words(const Path& path) const {
    return std::min<uint64_t>(wire::kAckMaxWords,
                              (path.limit.bytes() - wire::kAckFixedBytes) / sizeof(uint64_t));
  }
  uint32_t part_bytes() const {
    return config.datagram_bytes - static_cast<uint32_t>(wire::kHeaderBytes) - kPartPrefix;
  }

  double btlbw() const { return std::max(sender.window().rate(), receiver.window().rate()); }

  EndpointConfig config;
  std::vector<std::unique_ptr<Path>> paths;  // by endpoint; null for the own one
  Memory memory;                             // of all ops
  std::map<uint64_t, std::unique_ptr<Op>> ops;
  Op* last_found = nullptr;  // most packets are of the same op as the one before
  std::vector<Lane> lanes;   // in which ops have been made
  WaitingOps waiting;
  OpAgenda op_agenda;
  std::deque<Event> events;
  Counters counters;
  SendController sender;
  ReceiveController receiver;
  Scheduler scheduler;
  Due due;
  Scratch scratch;
  uint8_t control_dscp = 0;  // the DSCP of the first class in the newest op's plan
  Failure failure;
  Leaving leaving;
};

}  // namespace gradwire
