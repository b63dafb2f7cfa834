// What is due: each path's row of the scheduler and its times in the agendas are computed again
// once the path has changed, and only then.
#include <algorithm>
#include <utility>

#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

void Endpoint::Impl::settle() {
  for (const uint16_t peer : due.touched) {
    Path& path = *paths[peer];
    if (const Op* op = std::exchange(due.uncounted[peer], nullptr)) recount(*op, path);
    path.settled.touched = false;
    const bool spreads = path.recovery.rtt.profile().spreads;
    due.long_paths += int{spreads} - int{path.settled.spreads};
    path.settled.spreads = spreads;
    const bool is_lossy = path.loss(due.clock).heavy();
    due.lossy_paths += int{is_lossy} - int{path.settled.is_lossy};
    path.settled.is_lossy = is_lossy;
    if (!is_lossy) path.recovery.forget_control();
    settle_destination(path);
    due.controls.set(peer, path.control.waiting() && !path.recovery.full() ? 0 : kNever);
    due.sends.set(peer, next_send(path));
    due.checks.set(peer, next_check(path));
  }
  due.touched.clear();
}

void Endpoint::Impl::settle_destination(Path& path) {
  Scheduler::Destination to;
  to.backlog = backlog(path);
  to.closed = path.farewell.gone || path.recovery.full();
  to.credit = path.allowed.left(path.recovery.next());
  if (!to.closed && to.backlog == 0) {
    path.recovery.end_probes();
    path.recovery.feed();
  }
  to.probes = path.recovery.probes();
  if (!to.closed && to.backlog > 0 && to.credit == 0 && to.probes == 0 && !failure)
    path.recovery.starve(due.clock);
  scheduler.set_destination(path.peer, to);
}

// The time of the next ACK, ping or farewell.
Nanos Endpoint::Impl::next_send(Path& path) const {
  if (path.acks.hurried() || path.life.ping_now || path.life.pong_now || path.farewell.answer)
    return 0;
  Nanos next = path.acks.next_timer();
  if (!failure && !path.farewell.gone) next = std::min(next, path.limit.next_ping());
  const bool bye = leaving.begun && !leaving.over && !farewell_over(path);
  if (path.farewell.errors_left || bye) next = std::min(next, path.farewell.next);
  return next;
}

// The time at which on_timer() has something to do for a path.
Nanos Endpoint::Impl::next_check(Path& path) const {
  Nanos next = kNever;
  if (!path.farewell.gone) next = path.life.next_ping(ping_times(), bool(failure));
  if (failure) return next;
  if (!path.farewell.gone) {
    if (path.life.connected)
      next = std::min({next, path.life.last_heard + config.peer_timeout + 1,
                       path.limit.next_timer(path.recovery.rtt.round())});
    else if (path.life.first_ping && !path.limit.on_trial())
      next = std::min(next, path.life.first_ping + kTrialAfter + 1);
  }
  if (path.recovery.waiting())
    next = std::min({next, path.recovery.loss_due(),
                     path.recovery.next_timeout(path.life.last_heard, due.last_timer)});
  else if (path.recovery.timeouts() > 0)
    next = std::min(next, due.last_timer);
  return next;
}

}  // namespace gradwire
