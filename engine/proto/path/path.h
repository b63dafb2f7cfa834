// Path is the way to and from one peer, with everything that is decided about it alone: what it
// may send, when it sends what no op asks for, and what becomes of packets before their op is
// known.
//
// Its endpoint hands it packets and times, and acts on `news` after each. What is due follows from
// its state: next_send() and next_check() change nothing. adapt() is called once after its state or
// its backlog has changed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "proto/base/counters.h"
#include "proto/base/failure.h"
#include "proto/base/reassembly.h"
#include "proto/base/timeline.h"
#include "proto/base/train.h"
#include "proto/congestion/ecn.h"
#include "proto/credit/credit.h"
#include "proto/credit/receive_controller.h"
#include "proto/path/control_frames.h"
#include "proto/path/farewell.h"
#include "proto/path/liveness.h"
#include "proto/path/path_limit.h"
#include "proto/path/port.h"
#include "proto/path/started_ops.h"
#include "proto/path/stash.h"
#include "proto/plan/lanes.h"
#include "proto/recovery/acknowledger.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/recovery.h"
#include "proto/recovery/repetition.h"
#include "wire/packet.h"

namespace gradwire {

// LossReport is the share of packets that is lost on the way to a peer, and for how long they queue
// there, as the peer reports.
struct LossReport {
  double reported = 0;
  Nanos queue = 0;
  Nanos time = 0;

  bool recent(Nanos now) const { return now - time <= LossMeter::kMemory; }
  double share(Nanos now) const { return recent(now) ? reported : 0.0; }
};

// Fragments are parts of datagrams that are longer than the path carries.
struct Fragments {
  // Whole is a chunk that went in fragments, of which the longest has `length` bytes.
  struct Whole {
    wire::Kind kind = wire::Kind::fragment;
    uint32_t op = 0;
    uint32_t chunk = 0;
    uint32_t length = 0;
    bool operator==(const Whole&) const = default;
  };
  uint32_t sent = 0;          // datagrams sent in fragments
  std::vector<Whole> latest;  // by their number, modulo as many
  Reassembly arriving;
};

struct Path {
  // News is what the endpoint does after an event of a path.
  struct News {
    bool connected = false;  // the peer has answered for the first time
    bool suspect = false;    // the driver shall find the longest datagram on the route
    Failure failure;         // the path carries nothing useful any more
  };
  // Standing is what the path was when it last adapted.
  struct Standing {
    bool spreads = false;  // it is long, and paces what it sends over a round
    bool lossy = false;    // it has heavy loss
    uint64_t backlog = 0;  // chunks that may go
  };

  Path(uint16_t endpoint, Port& shared, Nanos now);

  const uint16_t peer;
  Port& port;
  Liveness life;
  Farewell farewell;
  StartedOps started;  // by the peer
  PathLimit limit;     // length of datagrams sent, and received as far as reported
  Fragments fragments;
  Ecn ecn;

  // Sending.
  Recovery recovery;
  ControlFrames control;
  LossReport loss_to;
  Allowance allowed;
  Hold hold;

  // Receiving. The grant stands before the largest number received, which decides about it.
  Arriving arriving;
  Credit grant;
  Acknowledger acks;
  Stash stash;

  Standing standing;
  PathCounters counted;
  News news;

  PathLoss loss(Nanos now) const { return {loss_to.share(now), arriving.loss.share(now)}; }
  const PathProfile& profile() const { return recovery.rtt.profile(); }
  PathState state(Nanos now) const;

  // ---- datagrams that are no packets of an op; false for what is malformed
  bool on_ping(const wire::Ping& ping, std::span<const uint8_t> rest, Nanos now);
  void on_pong(const wire::Ping& ping, Nanos now);
  // `expected`: the next number of a lane here, which expands the peer's.
  template <class Expected>
  bool on_bye(std::span<const uint8_t> datagram, const Expected& expected) {
    const auto bye = wire::read_bye(datagram);
    if (!bye) return false;
    farewell.acknowledged |= bye->heard;
    if (!bye->leaves) return true;
    farewell.lanes(bye->lanes);
    wire::Reader numbers(bye->numbers);
    for (uint64_t lane = bye->first; !numbers.rest().empty(); ++lane)
      farewell.note(lane, wire::expand(numbers.get<uint32_t>(), expected(lane)));
    if (!farewell.told()) return true;
    farewell.answer = !bye->heard && !port.left;
    farewell.gone = true;
    return true;
  }
  // What an ERROR of the peer says; nothing when it is malformed.
  Failure read_error(std::span<const uint8_t> datagram) const;
  // Takes a fragment; returns the datagram that it completes, if any.
  std::span<const uint8_t> on_fragment(std::span<const uint8_t> datagram);
  // The kernel, or the peer, says that the route carries no longer datagrams than this.
  void lower_limit(uint32_t bytes, Nanos now);

  // ---- packets of ops that arrive
  // True for a new packet; false for one that has arrived before, or is damaged or forged.
  bool is_new(uint64_t number, const wire::Header& header);
  // Keeps a packet of an op that has not started here; false when there is no room.
  bool keep(uint64_t op, std::span<const uint8_t> datagram);
  // The packets kept of an op that starts now have announced so many, themselves included: the
  // others come now.
  void announced(size_t packets, size_t kept);
  // Run is new packets of one op and kind that were sent together, one after another, have arrived
  // together, and had the same fate.
  struct Run {
    Nanos arrival = 0;
    uint8_t ecn = 0;
    wire::Kind kind = wire::Kind::push;
    bool refused = false;
    bool limited = false;  // the sender has more to send, and no credit
    bool last = false;     // the sender has no more to send
    uint32_t sent_us = 0;
    uint64_t op = 0;
    uint64_t first = 0;  // packet number
    uint64_t packets = 0;
    uint64_t bytes = 0;  // on the wire

    // True when this packet would go on with it, if its fate is the same.
    bool continues(const wire::Header& header, uint64_t number) const {
      return packets && number == first + packets && header.send_time_us == sent_us &&
             header.op == static_cast<uint32_t>(op) && header.common.kind == kind;
    }
    void begin(const wire::Header& header, uint64_t id, uint64_t number, bool no_room) {
      kind = header.common.kind;
      sent_us = header.send_time_us;
      op = id;
      first = number;
      refused = no_room;
    }
    void add(const wire::Header& header, uint64_t size) {
      ++packets;
      bytes += size;
      limited |= header.flags & wire::kOutOfCredit;
      last = header.backlog == 0;
    }
  };
  // Measures and records a run, and says when it is acknowledged. Returns its queueing delay.
  Nanos record(const Run& run, Nanos now);
  // Takes what has arrived since the last time.
  void sample(Nanos now) { port.receiver.sample(peer, arriving, recovery.rtt, now); }
  // Computes the peer's share of the window anew; true when it should learn it at once.
  bool share_credit(Nanos now);
  // The peer can want no more than this, since a STOP has outdated what it asked for.
  bool outdated() const { return grant.outdated(recovery.rtt.minimum()); }
  void lower_demand(uint64_t most) { port.receiver.credit.lower(grant, most); }

  // ---- acknowledgements
  // Takes an ACK; false when it is malformed. Port::acked has the packets.
  bool on_ack(const wire::Ack& ack, Nanos now);
  // Judges the ACK once its packets are taken: Port::lost has what is lost. False when it
  // acknowledged nothing.
  bool judge(const wire::Ack& ack, Nanos now);
  // Has the window learn from the ACK. `windows`: the windows of all receivers in bytes.
  void teach(const wire::Ack& ack, const std::function<double()>& windows, Nanos now);
  // A packet has left flight without an acknowledgement. A control frame goes again; true when the
  // chunk of the packet may have to.
  bool lost(const Recovery::Lost& each);

  // ---- what is due
  // Adapts to a change of its state, or of the chunks that wait for it.
  void adapt(uint64_t backlog, Nanos now);
  // True when nothing of an op can be sent.
  bool closed() const { return farewell.gone || recovery.full(); }
  uint64_t credit() const { return allowed.left(recovery.next()); }
  // Why nothing goes of what waits for the peer; `other`: where that is no matter of this path.
  Timeline::What hindrance(Timeline::What other) const {
    if (closed()) return Timeline::What::window;
    return credit() == 0 && recovery.probes() == 0 ? Timeline::What::credit : other;
  }
  // The time of the next ACK, ping or farewell.
  Nanos next_send() const;
  // The time at which the peer counts as silent.
  Nanos silence_due() const;
  bool control_waits() { return control.waiting() && !recovery.full(); }
  // The time at which on_timer() has something to do. `now`: when it last had.
  Nanos next_check(Nanos now) const;
  // Sees what the time has brought: pings, then what the loss timer declares lost and trials of the
  // limit, then probe time-outs. Port::lost has what is lost now. `backlog`: the chunks that wait;
  // true at a time-out.
  void check_pings(Nanos now);
  void check(Nanos now);
  bool check_probes(uint64_t backlog, Nanos now);
  // Port::lost has what goes again under heavy loss, without waiting for an ACK. `full`: the window
  // admits nothing. Returns when the next is due.
  Nanos repeat(bool full, Copies& copies, Nanos now);
  bool farewell_over() const;
  // A peer that has left stays for a while to serve what others still need of it.
  bool listens(Nanos now) const { return !farewell.gone || now - life.last_heard < kHeardOf; }

  // ---- sending
  // Writes the next ACK, ping, ERROR or BYE; false when none is due.
  bool write_signal(const std::vector<Lane>& lanes, const Failure& failure, Nanos now,
                    Train& train);
  // Writes the next control frame; returns its op.
  uint64_t write_control(Nanos now, Train& train);
  // Counts the packets of a train that goes now.
  void sent(const Train& train, Nanos now);
  // The header of a packet. `backlog`: the chunks that still wait for the peer.
  wire::Header header_of(const SentPacket& packet, uint32_t chunk, uint64_t backlog,
                         Nanos now) const;
  // Splits the only datagram of a train into fragments that the path carries.
  void split(Train& train);

  // ---- chunks
  // True when the peer may not have started this op: no packet of it, or of a later op of its lane,
  // has arrived. A server has an op from the first OPEN on.
  bool is_early(uint64_t op) const { return port.config.servers == 0 && !started.contains(op); }
  // The peer has refused packets of this op, and has not started it since.
  bool refuses(uint64_t op) const { return is_early(op) && started.refused(op); }
  uint64_t early_room() const {
    return port.config.servers ? UINT64_MAX : started.early_room(most_early());
  }
  // The packets of the next train at most. `window`: those that the window admits.
  uint32_t most_packets(bool probe, uint64_t window) const;
  // True when its own pace holds it back: where several paths are long, each has its part of its
  // receiver's window. `until` becomes the first time at which one may go.
  bool holds(Nanos now, Nanos& until);
  // Counts a train that goes now. `apart`: several paths are long.
  void went(const Train& train, bool probe, bool apart);

 private:
  uint32_t fragments_of(std::span<const uint8_t> datagram, uint32_t length);
  size_t most_early() const;
  void limit_fell();
  bool write_ping(const std::vector<Lane>& lanes, Nanos now, Train& train);
  void put_ping(const std::vector<Lane>& lanes, bool pong, size_t bytes, Nanos now, Train& train);
  uint64_t next_id(const std::vector<Lane>& lanes);
  void write_ack(Nanos now, Train& train);
  bool write_bye(const std::vector<Lane>& lanes, Nanos now, Train& train);
};

// Writes the ERROR that reports a failure to a peer. Drivers need it where an endpoint cannot go
// on.
void write_error(const EndpointConfig& config, const Failure& failure, uint16_t peer, Train& train);

}  // namespace gradwire
