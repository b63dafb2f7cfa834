// Whose train goes next: ACKs, pings and farewells first, then control frames, then chunks.
#include <algorithm>

#include "proto/endpoint/endpoint.h"
#include "proto/path/train_writer.h"

namespace gradwire {

bool Endpoint::transmit(Nanos now, Train& train, bool urgent) {
  due_.clock = now;
  train.whole = false;
  const bool any = next_train(now, train, urgent);
  if (any) {
    Path& path = paths_.at(train.destination);
    changes_.touch(path);
    if (train.segment_bytes > path.limit.bytes() && !train.whole && path.life.connected)
      path.split(train);
  }
  catch_up();
  if (!timeline_.on()) return any;
  if (any) {
    const int64_t beside = int64_t{train.count} * (port_.config.tag_bytes + kOverhead);
    timeline_.note(now, train.of_op() ? Timeline::What::sent : Timeline::What::signal,
                   train.destination, train.total_bytes + beside);
  } else if (!urgent) {
    for (const Path* path : paths_)
      timeline_.stop(now,
                     path->standing.backlog > 0         ? path->hindrance(hindrance_)
                     : scheduler_.any_early(path->peer) ? Timeline::What::peer
                                                        : ops_.hindrance(),
                     path->peer);
  }
  return any;
}

bool Endpoint::next_train(Nanos now, Train& train, bool urgent) {
  catch_up();
  for (size_t i = 0; (i = due_.sends.due(now, i)) != Agenda::kNone; ++i) {
    changes_.touch(paths_.at(i));
    if (paths_.at(i).write_signal(ops_.lanes(), failure_, now, train)) return true;
  }
  if (failure_ || urgent) return false;
  if (ops_.in_passes()) {
    for (auto& [id, op] : ops_.all()) {
      for (const Path* path : paths_) op->end_passes(path->peer, path->farewell.gone);
      act(*op, now);
    }
  }
  repeat(now);
  catch_up();
  for (size_t i = 0; (i = due_.controls.due(now, i)) != Agenda::kNone; ++i) {
    Path& path = paths_.at(i);
    if (!path.listens(now) || !path.control_waits()) continue;
    if (Op* op = ops_.find(path.write_control(now, train))) op->traffic.add(train.total_bytes);
    return true;
  }
  return next_chunks(now, train);
}

// Sends packets in flight again on paths with heavy loss. It does so when nothing else can be sent.
void Endpoint::repeat(Nanos now) {
  due_.repeat = kNever;
  const double unproven = paths_.any_lossy() ? paths_.unproven_rate(now) : 0;
  Copies& copies = port_.sender.copies(port_.btlbw(), unproven, now);
  if (!paths_.any_lossy()) return;
  const bool full = port_.sender.room(now) <= 0;
  for (Path* path : paths_) {
    due_.repeat = std::min(due_.repeat, path->repeat(full, copies, now));
    lost(*path, now);
  }
  if (copies.lacking()) port_.sender.limited();
}

bool Endpoint::next_chunks(Nanos now, Train& train) {
  for (;;) {
    catch_up();
    const SendController::LongPaths far = paths_.long_paths();
    const double rate = port_.btlbw();
    port_.sender.pace(far, rate, rate > 0 ? paths_.unproven_rate(now) : 0, paths_.turn(), now);
    due_.pace = 0;
    const double space = port_.sender.room(now);
    const uint64_t window =
        space > 0 ? static_cast<uint64_t>(space / port_.config.wire_bytes()) + 1 : 0;
    const bool apart = far.apart() && port_.config.pacing;
    Nanos held = kNever;
    const Scheduler::Choice choice = scheduler_.choose(
        window > 0, [&](uint16_t to) { return apart && paths_.at(to).holds(now, held); });
    port_.counters.credit_stalls += choice.stalled;
    hindrance_ = Timeline::What::pace;
    if (window == 0 && !choice.probe) {
      hindrance_ = Timeline::What::window;
      ++port_.counters.window_stalls;
      port_.sender.limited();
    }
    if (choice.to == Scheduler::kNowhere) {
      if (held != kNever) due_.pace = held;
      return false;
    }
    Path& path = paths_.at(choice.to);
    const Nanos wait = port_.sender.wait(now);
    if (wait) {
      due_.pace = wait;
      return false;
    }
    TrainWriter writer(path, path.most_packets(choice.probe, window), encoded_, now, train);
    const uint16_t lane = scheduler_.next_lane(path.peer, writer.has_early_room());
    uint64_t id = scheduler_.next_op(path.peer, id_of(0, lane));
    for (; id != Scheduler::kNoOp && !writer.full();
         id = scheduler_.next_op(path.peer, id + kLanes)) {
      Op& op = *ops_.find(id);
      writer.fill(op);
      changes_.count(path, op);
    }
    // The backlog may have had chunks that were decided meanwhile; then the choice is made again.
    changes_.touch(path);
    if (train.count == 0) continue;
    path.sent(train, now);
    path.went(train, choice.probe, apart);
    if (!choice.probe) scheduler_.went(path.peer);
    return true;
  }
}

}  // namespace gradwire
