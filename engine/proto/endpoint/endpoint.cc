// The life of an endpoint: its clock, what is due when, and how it ends.
#include "proto/endpoint/endpoint.h"

#include <algorithm>
#include <utility>

#include "proto/base/text.h"
#include "proto/path/silence.h"

namespace gradwire {

Endpoint::Endpoint(const EndpointConfig& config, Nanos now)
    : port_(config),
      paths_(port_, now),
      ops_(port_.config),
      admission_(port_.config, ops_, port_.memory),
      scheduler_(config.endpoints()),
      due_(config.endpoints(), now),
      changes_(scheduler_, config.endpoints()) {
  for (uint16_t e = 0; e < config.endpoints(); ++e) {
    if (Path* path = paths_.find(e))
      changes_.touch(*path);
    else if (e != config.endpoint)  // the two exchange no packets, so the driver need not wait
      emit(Event::Type::connected, e);
  }
  scheduler_.went(config.endpoint);  // the first turn is the next one's
  catch_up();
}

void Endpoint::emit(Event::Type type, uint16_t endpoint, OpReport report) {
  events_.push_back({type, endpoint, std::move(report)});
}

bool Endpoint::next_event(Event& event) {
  if (events_.empty()) return false;
  event = std::move(events_.front());
  events_.pop_front();
  return true;
}

Counters Endpoint::counters() const {
  Counters counters = port_.counters;
  const DelayWindow& receives = port_.receiver.window();
  counters.now = {.memory = port_.memory.held(),
                  .rtprop = paths_.rtprop(),
                  .queue_delay = receives.queue_delay(),
                  .btlbw = port_.btlbw(),
                  .send_window = port_.sender.window().bytes(),
                  .receive_window = receives.bytes(),
                  .path_limit = paths_.longest_datagram()};
  return counters;
}

std::vector<PeerState> Endpoint::peers(Nanos now) const {
  std::vector<PeerState> found;
  for (const Path* p : paths_)
    found.push_back({p->peer, p->life.connected, p->life.heard, p->farewell.gone,
                     now - p->life.last_heard, p->started.by_lane(), p->state(now)});
  return found;
}

void Endpoint::limit(uint16_t peer, uint32_t bytes, Nanos now) {
  Path* path = paths_.find(peer);
  if (!path) return;
  path->lower_limit(bytes, now);
  act(*path, now);
  catch_up();
}

// ---- the clock

void Endpoint::on_timer(Nanos now) {
  if (timeline_.on()) {
    // What was due before the last call is not late: it became due meanwhile.
    const Nanos due = next_timer();
    timeline_.note(now, Timeline::What::timer, Timeline::kNobody,
                   due > due_.last_timer ? std::min(due, now) : now);
  }
  // This process was suspended, so the silence is its own and not its peers'.
  if (now - due_.last_timer > port_.config.ping_interval * 4) {
    for (Path* path : paths_) {
      path->life.last_heard = now;
      changes_.touch(*path);
    }
  }
  due_.last_timer = due_.clock = now;
  port_.sender.on_timer(now);
  catch_up();
  std::vector<Path*> checked;
  bool late = false;
  for (size_t i = 0; (i = due_.checks.due(now, i)) != Agenda::kNone; ++i) {
    Path& path = paths_.at(i);
    checked.push_back(&path);
    changes_.touch(path);
    late |= path.silence_due() <= now;
    path.check_pings(now);
  }
  const auto gone = [](const Path* path) { return path->farewell.gone; };
  if (!port_.leaving && (late || std::ranges::any_of(paths_, gone))) check_silence(now);
  if (!failure_) {
    const bool ops_due = ops_.earliest() <= now;
    if (ops_due) check_deadlines(now);
    for (Path* path : checked) {
      path->check(now);
      act(*path, now);
      if (path->check_probes(changes_.backlog(*path), now)) scheduler_.timed_out(path->peer);
      lost(*path, now);
    }
    for (auto& [id, op] : ops_.all()) {
      if (!ops_due) break;
      op->on_timer(now);
      act(*op, now);
    }
    retire(now);
  }
  finish_close(now);
  flush(now);
}

Nanos Endpoint::next_timer() const {
  Nanos next = std::min({due_.last_timer + port_.config.ping_interval, due_.sends.earliest(),
                         due_.checks.earliest(), ops_.earliest()});
  if (!failure_) next = std::min({next, due_.repeat, port_.receiver.slot_due()});
  if (due_.pace > due_.last_timer) next = std::min(next, due_.pace);
  if (port_.leaving && !port_.left) {
    const bool served = failure_ || ops_.all().empty();
    next = std::min(next, served && paths_.farewells_over() ? due_.last_timer : leaving_.deadline);
  }
  return next;
}

// Lets the paths that changed adapt, and looks anew at what is due for them. Each event of the
// endpoint ends with it, but receive(), which flush() follows.
void Endpoint::catch_up() {
  changes_.take([this](uint16_t peer) {
    Path& path = paths_.at(peer);
    const uint64_t backlog = changes_.backlog(path);
    paths_.adapt(path, backlog, due_.clock);
    scheduler_.set_destination(peer,
                               {backlog, path.credit(), path.recovery.probes(), path.closed()});
    due_.controls.set(peer, path.control_waits() ? 0 : kNever);
    due_.sends.set(peer, path.next_send());
    due_.checks.set(peer, path.next_check(due_.last_timer));
  });
}

// ---- silence and deadlines

void Endpoint::check_silence(Nanos now) {
  std::vector<Listened> peers;
  for (const Path* path : paths_) {
    if (!path->life.connected) continue;
    Listened each{path->peer, path->life.last_heard, path->farewell.gone};
    if (each.left) {
      const auto needs = std::ranges::find_if(
          ops_.all(), [path](const auto& entry) { return entry.second->needs(path->peer); });
      if (needs == ops_.all().end()) continue;
      each.step = needs->second->spec.step;
    }
    peers.push_back(each);
  }
  std::string step;
  if (!ops_.all().empty())
    step = "step " + std::to_string(ops_.all().begin()->second->spec.step) + ": ";
  if (Failure why = failure_of_silence(std::move(peers), port_.config, step, now); why)
    fail(std::move(why), now);
}

// Fails where an op was not complete in time. The error names who keeps it from its end: workers
// that have not begun it, before those of which something is missing.
void Endpoint::check_deadlines(Nanos now) {
  const auto late = std::ranges::find_if(
      ops_.all(), [now](const auto& entry) { return now >= entry.second->deadline(); });
  if (late == ops_.all().end()) return;
  const Op& op = *late->second;
  std::string text = "step " + std::to_string(op.spec.step) + ", " + op_name(op.id) +
                     ": not complete after " + seconds(now - op.started) + " (" +
                     setting("timeout", op.spec.timeout);
  if (!op.spec.timeout_from.empty()) text += ", " + op.spec.timeout_from;
  int32_t rank = -1;
  std::string missing;
  const auto ago = [now](const Path* path) {
    return seconds(now - path->life.last_heard) + " ago";
  };
  for (uint16_t w = 0; w < port_.config.workers; ++w) {
    const Path* path = paths_.find(w);
    if (!path || path->started.contains(op.id)) continue;
    if (rank < 0) rank = w;
    missing += (missing.empty() ? "" : ", ") + port_.config.name(w) +
               " has not begun it and was last heard " + ago(path);
  }
  const Op::Missing lacks = op.missing();
  for (const uint16_t e : rank < 0 ? lacks.endpoints : std::vector<uint16_t>{}) {
    const Path* path = paths_.find(e);
    if (missing.empty()) rank = e;
    missing += (missing.empty() ? lacks.what : ", ") + port_.config.name(e);
    if (path) missing += " (last heard " + ago(path) + ")";
  }
  fail({text + "): " + missing, rank, Cause::timeout}, now);
}

// ---- the end

void Endpoint::give_up(Failure why, Nanos now) {
  fail(std::move(why), now);
  catch_up();
}

void Endpoint::fail(Failure why, Nanos now) {
  if (failure_) return;
  failure_ = std::move(why);
  port_.failed = true;
  while (!ops_.all().empty()) abandon(*ops_.all().begin()->second, failure_);
  for (const Admission::Own& own : admission_.take_all())
    emit(Event::Type::op_done, 0, OpReport::failed(own.spec, failure_));
  emit(Event::Type::failed, 0, OpReport::failed(OpSpec(), failure_));
  for (Path* path : paths_) {
    changes_.touch(*path);
    if (!path->farewell.gone) path->farewell.fail(now);
  }
}

void Endpoint::close(Nanos now, Nanos linger) {
  if (port_.leaving) return;
  port_.leaving = true;
  leaving_ = {now + linger, now + std::max(linger, port_.config.peer_timeout)};
  const auto why = [this](const OpSpec& spec) -> Failure {
    return {port_.config.name(port_.config.endpoint) + ", step " + std::to_string(spec.step) +
                ": the engine was closed in mid-step",
            -1, Cause::closed};
  };
  // A failed op returns its memory to the caller, so nothing here may read it any more.
  std::vector<Op*> working;
  for (auto& [id, op] : ops_.all())
    if (op->working()) working.push_back(op.get());
  for (Op* op : working) abandon(*op, why(op->spec));
  for (const Admission::Own& own : admission_.take_all())
    emit(Event::Type::op_done, 0, OpReport::failed(own.spec, why(own.spec)));
  for (Path* path : paths_) {
    path->farewell.leave(path->loss_to.share(now) <= kHeavyLoss, now);
    changes_.touch(*path);
  }
  finish_close(now);
  catch_up();
}

void Endpoint::finish_close(Nanos now) {
  if (!port_.leaving || port_.left) return;
  const bool served = failure_ || ops_.all().empty();
  if (now < leaving_.deadline && !(served && paths_.farewells_over())) return;
  // Results that no other endpoint has wait for peers that do not count as dead.
  const Nanos later =
      std::min(paths_.last_heard() + port_.config.peer_timeout, leaving_.last_deadline);
  if (!served && now < later) {
    leaving_.deadline = later;
    return;
  }
  port_.left = true;
  for (Path* path : paths_) changes_.touch(*path);
  emit(Event::Type::closed);
}

}  // namespace gradwire
