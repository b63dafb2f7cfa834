// The life of ops at an endpoint: they begin, what they ask for is done, and they end.
#include <algorithm>
#include <utility>

#include "proto/endpoint/endpoint.h"
#include "proto/plan/priority.h"

namespace gradwire {

Failure Endpoint::start(OpSpec spec, Nanos now) {
  if (failure_) return failure_;
  if (port_.leaving) return {"the engine is closed", -1, Cause::closed};
  if (port_.config.endpoint >= port_.config.workers) return {"a server starts no ops of its own"};
  if (Failure why = admission_.add(std::move(spec), now); why) return why;
  retire(now);
  catch_up();
  return {};
}

// Does what an op asks for after an event of it. Where that ends the job, the op is gone.
void Endpoint::act(Op& op, Nanos now) {
  Outbox& out = op.out;
  if (!out.any()) return;
  if (out.failure) return fail(Failure(std::move(out.failure)), now);
  for (Outbox::Frame& frame : out.frames) {
    Path& path = paths_.at(frame.to);
    path.control.push({op.id, frame.kind, frame.part, std::move(frame.payload)});
    changes_.touch(path);
  }
  for (const uint16_t peer : out.outdated) {
    Path& path = paths_.at(peer);
    // Packets of ops that have not started here are wanted, too.
    if (path.outdated() && path.stash.empty() && !admission_.awaits(peer))
      path.lower_demand(ops_.most_wanted(peer));
  }
  for (const uint16_t peer : out.satisfied) paths_.at(peer).lower_demand(0);
  for (const uint16_t peer : out.recounts) changes_.touch(paths_.at(peer), op);
  for (Path* path : paths_) {
    if (!out.recount_all) break;
    changes_.touch(*path, op);
  }
  if (out.changed) ops_.changed(op);
  due_.retire |= out.retires;
  if (out.report) {
    OpCost& cost = out.report->cost;
    cost.rtprop = paths_.rtprop();
    cost.btlbw = port_.btlbw();
    timeline_.note(now, Timeline::What::ended, Timeline::kNobody, static_cast<int64_t>(op.id));
    emit(Event::Type::op_done, 0, std::move(*out.report));
  }
  out.clear();
}

// ---- their beginning

Op& Endpoint::make_op(OpSpec spec, bool works, Nanos now) {
  Op& op = ops_.add(std::make_unique<Op>(std::move(spec), port_.config, port_.memory, works, now));
  port_.dscp = dscp_of(op.spec.plan, port_.config.dscp, 0);
  for (const Path* path : paths_)
    if (path->farewell.complete(op.id)) op.left(path->peer);
  act(op, now);
  return op;
}

// Begins an op of the own worker.
void Endpoint::begin(Admission::Own own, Nanos now) {
  const uint64_t id = own.spec.op;
  ++ops_.lane(id).next;
  timeline_.note(now, Timeline::What::begun, Timeline::kNobody, static_cast<int64_t>(id));
  Op& op = make_op(std::move(own.spec), true, own.since);
  op.begin(paths_.longest_datagram(), now);
  act(op, now);
  replay(id, now);
  if (Op* alive = ops_.find(id)) {
    alive->check(now);
    act(*alive, now);
  }
}

// Begins an op at a server, with the OPENs that have arrived of it.
void Endpoint::serve(Admission::Served served, Nanos now) {
  Op& op = make_op(std::move(served.spec), false, now);
  const uint64_t id = op.id;
  if (!still_possible(op, now)) return;
  for (auto& [worker, message] : served.opens) {
    if (op.same_plan(worker, message.beginning())) {
      const bool done = message.done();
      const std::vector<uint8_t> bytes = message.take();
      op.open_message(worker) = std::move(message);
      if (done && !op.on_open(worker, bytes, now)) ++port_.counters.malformed;
    }
    act(op, now);
    if (failure_) return;
  }
  replay(id, now);
}

// Hands the packets of an op that came before it began.
void Endpoint::replay(uint64_t id, Nanos now) {
  for (Path* path : paths_) {
    const std::vector<Stash::Datagram> kept = path->stash.take(id, port_.stashed, port_.memory);
    size_t told = 0;
    for (const std::span<const uint8_t> datagram : kept) {
      const wire::Header header = *wire::read_header(datagram);
      told = std::max<size_t>(told, header.backlog);
      Op* op = ops_.find(id);
      if (!op) continue;
      const auto payload = datagram.subspan(wire::kHeaderBytes);
      const Fate fate = op->take(path->peer, header, payload, now, true);
      op->follow(now);
      act(*op, now);
      port_.counters.malformed += fate == Fate::malformed && !failure_;
    }
    path->announced(told, kept.size());
  }
  // The packets held back come now, so every peer's share of the window is set at once.
  for (Path* path : paths_)
    if (path->share_credit(now)) changes_.touch(*path);
}

// Fails, and returns false, when a peer left before this op was complete there.
bool Endpoint::still_possible(const Op& op, Nanos now) {
  const Path* const path = paths_.left_before(op.id);
  if (!path) return true;
  fail({port_.config.name(path->peer) + " left the job in step " + std::to_string(op.spec.step) +
            " (" + op_name(op.id) + " is not complete)",
        path->peer, Cause::left},
       now);
  return false;
}

// ---- their end

// Ends an op at once; its caller learns why unless it has its result.
void Endpoint::abandon(Op& op, const Failure& why) {
  if (op.working()) {
    Lane& lane = ops_.lane(op.id);
    lane.abandoned = std::min(lane.abandoned, number_of(op.id));
    emit(Event::Type::op_done, 0, OpReport::failed(op.spec, why));
  }
  leave(op);
  ops_.remove(op.id);
}

// Nothing of this op waits any more.
void Endpoint::leave(const Op& op) {
  for (Path* path : paths_) {
    changes_.end(*path, op);
    path->started.forget_early(op.id);
  }
}

// Frees the drained ops, and starts those that wait for memory.
void Endpoint::retire(Nanos now) {
  due_.retire = false;
  ops_.free_drained([this](const Op& op) { leave(op); });
  Failure why;
  while (!failure_ && !why) {
    if (port_.config.endpoint >= port_.config.workers) {
      std::optional<Admission::Served> served = admission_.next_served(why);
      if (!served) break;
      serve(std::move(*served), now);
      continue;
    }
    const Admission::Own* const own = admission_.next_own(why);
    if (!own || why) break;
    if (const Path* gone = paths_.left_before(own->spec.op)) {
      why = {port_.config.name(gone->peer) + " has left the job; step " +
                 std::to_string(own->spec.step) + " cannot start",
             gone->peer, Cause::left};
      break;
    }
    begin(admission_.take(*own), now);
    ops_.free_drained([this](const Op& op) { leave(op); });
  }
  if (why) fail(std::move(why), now);
}

}  // namespace gradwire
