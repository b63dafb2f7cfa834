#include "proto/path/paths.h"

#include <algorithm>

namespace gradwire {

Paths::Paths(Port& port, Nanos now) : port_(port), by_peer_(port.config.endpoints()) {
  for (uint16_t e = 0; e < by_peer_.size(); ++e) {
    if (e == port.config.endpoint || !port.config.talks_to(e)) continue;
    by_peer_[e] = std::make_unique<Path>(e, port, now);
    all_.push_back(by_peer_[e].get());
  }
}

void Paths::adapt(Path& path, uint64_t backlog, Nanos now) {
  const Path::Standing before = path.standing;
  path.adapt(backlog, now);
  long_ += int{path.standing.spreads} - int{before.spreads};
  lossy_ += int{path.standing.lossy} - int{before.lossy};
}

SendController::LongPaths Paths::long_paths() const {
  SendController::LongPaths far;
  if (long_ == 0) return far;
  for (const Path* path : all_) {
    if (path->farewell.gone || path->standing.backlog == 0) continue;
    if (!path->standing.spreads) {
      ++far.near;
      continue;
    }
    ++far.count;
    far.rtprop = std::max(far.rtprop, path->recovery.rtt.minimum());
    far.round = std::max(far.round, path->recovery.rtt.smoothed());
    far.window += path->allowed.window;
  }
  return far;
}

SendController::Turn Paths::turn() const {
  SendController::Turn turn;
  if (port_.config.aggregates()) return turn;
  for (const Path* path : all_) {
    if (!path->allowed.turns || path->standing.backlog == 0 || path->closed()) continue;
    if (path->credit() == 0) continue;
    turn.bytes += static_cast<double>(path->credit()) * port_.config.wire_bytes();
    turn.rate += path->allowed.window * 1e9 / static_cast<double>(port_.config.delay_target);
  }
  return turn;
}

double Paths::windows(Nanos now) const {
  double total = 0;
  for (const Path* path : all_)
    if (path->loss_to.recent(now)) total += path->allowed.window;
  return total;
}

double Paths::unproven_rate(Nanos now) const {
  if (port_.sender.window().room() < 1 || port_.sender.window().rate_proven() ||
      port_.receiver.window().rate_proven())
    return 0;
  FirstRound first;
  for (const Path* path : all_)
    if (!path->farewell.gone)
      first.add(path->recovery.in_flight() > 0 ? path->recovery.rtt.smoothed() : 0,
                path->loss_to.recent(now) ? path->allowed.window : 0);
  return first.rate(port_.sender.window().bytes());
}

uint32_t Paths::longest_datagram() const {
  uint32_t longest = port_.config.datagram_bytes;
  for (const Path* path : all_) longest = std::min(longest, path->limit.both_ways());
  return longest;
}

Nanos Paths::rtprop() const {
  Nanos shortest = kNever;
  for (const Path* path : all_)
    if (path->recovery.rtt.any()) shortest = std::min(shortest, path->recovery.rtt.minimum());
  return shortest == kNever ? 0 : shortest;
}

const Path* Paths::left_before(uint64_t op) const {
  const auto found = std::ranges::find_if(
      all_, [op](const Path* path) { return path->farewell.gone && !path->farewell.complete(op); });
  return found == all_.end() ? nullptr : *found;
}

Nanos Paths::last_heard() const {
  Nanos last = 0;
  for (const Path* path : all_)
    if (path->life.heard && !path->farewell.gone) last = std::max(last, path->life.last_heard);
  return last;
}

bool Paths::farewells_over() const {
  return std::ranges::none_of(all_, [](const Path* path) {
    return path->farewell.errors_left || path->farewell.answer || !path->farewell_over();
  });
}

}  // namespace gradwire
