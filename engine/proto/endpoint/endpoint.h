// One endpoint of a job (a worker or a server) as a sans-IO state machine: datagrams in with a
// time, datagrams out, next timer, events. It reads no clock, no socket and no random source.
//
// The driver (io or sim) loops:
//   for each datagram:  receive(bytes, now, arrival)
//   after each batch:   flush(now)                (before any other call)
//   when due:           on_timer(now)             (next_timer() says when)
//   while transmit(now, train): send the train    (its payload pointers live until the next call)
//   while next_event(event): hand the event on
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "proto/base/agenda.h"
#include "proto/base/buffer.h"
#include "proto/base/config.h"
#include "proto/base/counters.h"
#include "proto/base/failure.h"
#include "proto/base/time.h"
#include "proto/base/timeline.h"
#include "proto/base/train.h"
#include "proto/op/admission.h"
#include "proto/op/op.h"
#include "proto/op/op_report.h"
#include "proto/op/op_table.h"
#include "proto/path/changes.h"
#include "proto/path/path.h"
#include "proto/path/paths.h"
#include "proto/path/port.h"
#include "proto/plan/lanes.h"
#include "proto/sched/scheduler.h"
#include "wire/packet.h"

namespace gradwire {

struct Event {
  enum class Type : uint8_t {
    op_done,    // the report is of this op
    connected,  // the endpoint has answered for the first time
    failed,     // this endpoint can go on no more: report.failure
    suspect,    // the driver shall find the longest datagram on the route to this endpoint
    closed,     // close() has finished, with everything acknowledged or the time over
  };
  Type type = Type::op_done;
  uint16_t endpoint = 0;
  OpReport report;
};

// PeerState is what an endpoint has observed of a peer.
struct PeerState {
  uint16_t endpoint = 0;
  bool answered = false;        // a ping of full length has been answered
  bool heard = false;           // a packet has arrived from it
  bool left = false;            // it has said goodbye
  Nanos silence = 0;            // time since the last packet
  std::vector<uint64_t> begun;  // by lane: ids below it are known to have started there
  PathState path;

  bool has_begun(uint64_t op) const {
    return lane_of(op) < begun.size() && op < begun[lane_of(op)];
  }
};

class Endpoint {
 public:
  using Datagram = std::span<const uint8_t>;

  explicit Endpoint(const EndpointConfig& config, Nanos now);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Starts an op, or returns why it cannot start. Such an op gets no report, and changes nothing
  // unless the endpoint has failed.
  Failure start(OpSpec spec, Nanos now);
  // Takes datagrams that have arrived together from `source`, the endpoint whose address they came
  // from, in their order. `arrival`: when the kernel received them, at most `now`. `ecn`: their
  // codepoint (RFC 3168). `buffer`: where they lie, if they may stay there for longer than this
  // call.
  void receive(uint16_t source, std::span<const Datagram> datagrams, Nanos now, Nanos arrival,
               uint8_t ecn = 0, Buffer* buffer = nullptr);
  void flush(Nanos now);
  // Writes the next train; false when nothing is to be sent now. `urgent`: only ACKs, pings and
  // what ends the job, which the driver sends before a train that waits for the socket.
  bool transmit(Nanos now, Train& train, bool urgent = false);
  Nanos next_timer() const;
  void on_timer(Nanos now);
  // Sets the longest datagram that the route to a peer carries, as the driver has found.
  void limit(uint16_t peer, uint32_t bytes, Nanos now);
  bool next_event(Event& event);
  // Fails for a reason of the caller's, which the peers are told.
  void give_up(Failure why, Nanos now);
  // Sends BYE to the peers and serves what they still need. Event::closed follows once all is
  // acknowledged: within `linger`, or later while peers still need results that do not count as
  // dead.
  void close(Nanos now, Nanos linger);

  Counters counters() const;
  std::vector<PeerState> peers(Nanos now) const;
  const Failure& failure() const { return failure_; }
  Timeline& timeline() { return timeline_; }

 private:
  // Due is when which path needs something, as of the last catch_up().
  struct Due {
    Due(size_t paths, Nanos now)
        : sends(paths), controls(paths), checks(paths), last_timer(now), clock(now) {}

    // By path: an ACK, ping or farewell; a control frame; on_timer().
    Agenda sends;
    Agenda controls;
    Agenda checks;
    Nanos repeat = kNever;  // packets go again before an ACK
    Nanos pace = 0;         // the next train
    Nanos last_timer;       // the last on_timer()
    Nanos clock;            // the latest time that is known
    bool retire = false;    // an op may be drained
  };
  // Leaving is how this endpoint ends.
  struct Leaving {
    Nanos deadline = kNever;
    Nanos last_deadline = kNever;  // the latest, even while peers that live need something
  };

  // endpoint.cc: its life and its clock
  void emit(Event::Type type, uint16_t endpoint = 0, OpReport report = OpReport());
  void fail(Failure why, Nanos now);
  void check_silence(Nanos now);
  void check_deadlines(Nanos now);
  void finish_close(Nanos now);
  void catch_up();

  // receive.cc: the way of a packet
  bool on_packet(Path& path, wire::Kind kind, Datagram datagram, Path::Run& run, Nanos now);
  bool on_reliable(Path& path, Datagram datagram, Path::Run& run, Nanos now);
  void end_run(Path& path, Path::Run& run, Nanos now);
  Fate accept(Path& path, const wire::Header& header, uint64_t id, Datagram datagram, Nanos now);
  Fate take_open(uint16_t worker, const wire::Header& header, uint64_t id,
                 std::span<const uint8_t> payload, Nanos now);
  bool on_ack(Path& path, const wire::Ack& ack, Nanos now);
  void acked(Path& path, const SentPacket& first, std::span<const uint32_t> items, Nanos now);
  void lost(Path& path, Nanos now);
  bool on_bye(Path& path, std::span<const uint8_t> datagram, Nanos now);
  void note_started(Path& path, uint64_t below);
  void act(Path& path, Nanos now);

  // transmit.cc: whose train goes next
  bool next_train(Nanos now, Train& train, bool urgent);
  bool next_chunks(Nanos now, Train& train);
  void repeat(Nanos now);

  // ops.cc: ops begin, go on and end
  void act(Op& op, Nanos now);
  Op& make_op(OpSpec spec, bool works, Nanos now);
  void begin(Admission::Own own, Nanos now);
  void serve(Admission::Served served, Nanos now);
  void replay(uint64_t id, Nanos now);
  bool still_possible(const Op& op, Nanos now);
  void abandon(Op& op, const Failure& why);
  void leave(const Op& op);
  void retire(Nanos now);

  Port port_;
  Paths paths_;
  OpTable ops_;
  Admission admission_;
  Scheduler scheduler_;
  Due due_;
  Changes changes_;
  std::vector<uint16_t> arrived_;  // paths from which packets have arrived since the last flush
  std::vector<uint8_t> encoded_;   // payloads of one train
  std::deque<Event> events_;
  Failure failure_;
  Leaving leaving_;
  Timeline timeline_;
  Timeline::What hindrance_ = Timeline::What::pace;  // what kept all trains from going last
};

}  // namespace gradwire
