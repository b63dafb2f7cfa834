// Liveness: pings, when a silent peer counts as dead, when an op has taken too long, and which rank
// the error names.
#include <algorithm>

#include "proto/base/text.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// Peers whose last packets arrived within this time of each other count as dead together.
constexpr Nanos kMoment = kSecond / 4;

// When the first of these peers was heard last.
Nanos longest_silent(const std::vector<const Path*>& peers) {
  Nanos first = kNever;
  for (const Path* path : peers) first = std::min(first, path->life.last_heard);
  return first;
}
}  // namespace

// Pings the peers that are due, and fails where one has been silent for too long.
void Endpoint::Impl::check_life(const std::vector<Path*>& checked, Nanos now) {
  bool late = false;
  for (Path* path : checked) {
    late |= path->life.connected && now - path->life.last_heard > config.peer_timeout;
    if (!path->life.ping_due(ping_times(), bool(failure), now)) continue;
    path->life.last_ping = now;
    // A path on trial has pings of its own until it is connected.
    path->life.ping_now = !path->farewell.gone && (path->life.connected || !path->limit.on_trial());
  }
  if (late || leaving.any_gone) check_silence(now);
}

void Endpoint::Impl::check_silence(Nanos now) {
  // The peers that have to speak. One that said goodbye, and owes nothing, may be silent.
  std::vector<const Path*> silent;
  for (auto& p : paths)
    if (p && p->life.connected && (!p->farewell.gone || waits_for(p->peer)))
      silent.push_back(p.get());
  if (failure || silent.empty()) return;
  const Nanos last = longest_silent(silent);
  if (now - last <= config.peer_timeout) return;
  // The peers that died in one moment need not have sent their last packets at the same time.
  const Nanos moment = std::min(kMoment, config.peer_timeout / 8);
  // Peers that fall silent within this time have one common reason.
  const Nanos together = std::min(kSecond, config.peer_timeout / 2);
  const size_t peers = silent.size();
  const bool all = std::ranges::all_of(silent, [&](const Path* path) {
    return now - path->life.last_heard > config.peer_timeout - together;
  });
  std::erase_if(silent, [=](const Path* path) { return path->life.last_heard > last + moment; });
  fail(silence_of(silent, peers, all, now), now);
}

// The failure that names the silent ones of the peers that have to speak. If all of several are
// silent, this host or its switch is cut off. With a single one either side may be the cause, so no
// rank is named.
Failure Endpoint::Impl::silence_of(const std::vector<const Path*>& silent, size_t peers, bool all,
                                   Nanos now) const {
  const Path& first = *silent.front();
  const Nanos silence = now - longest_silent(silent);
  std::string step;
  if (!ops.empty()) step = "step " + std::to_string(ops.begin()->second->spec.step) + ": ";
  const std::string setting_text = " (" + setting("peer_timeout", config.peer_timeout) + ")";
  if (first.farewell.gone) {
    const Op* op = waits_for(first.peer);
    return {name(first.peer) + " left the job and has sent nothing for " + seconds(silence) +
                setting_text + ", but step " + std::to_string(op->spec.step) +
                " still needs results of it",
            first.peer, Cause::left};
  }
  if (peers > 1 && all)
    return {step + name(config.endpoint) + " hears none of its " + std::to_string(peers) +
                " peers since " + seconds(silence) + setting_text +
                ": its host, or the switch that it is at, is cut off",
            config.endpoint, Cause::silence};
  std::string text = step + name(config.endpoint) + " has heard nothing of ";
  for (size_t i = 0; i < silent.size(); ++i) text += (i == 0 ? "" : ", ") + name(silent[i]->peer);
  text += " for " + seconds(silence) + setting_text;
  if (peers == 1)
    return {text + ": that process is dead or frozen, or the network between the two is cut", -1,
            Cause::silence};
  return {text + ", but hears the others: " +
              (silent.size() == 1 ? "that process is" : "those processes are") +
              " dead or frozen, or cut off from the network",
          first.peer, Cause::silence};
}

// The workers that are not known to have started an op, with the time since their last packet.
std::string Endpoint::Impl::not_begun(const Op& op, int32_t& rank, Nanos now) const {
  std::string text;
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (!paths[w] || paths[w]->started.contains(op.id)) continue;
    if (rank < 0) rank = w;
    text += (text.empty() ? "" : ", ") + name(w) + " has not begun it and was last heard " +
            seconds(now - paths[w]->life.last_heard) + " ago";
  }
  return text;
}

void Endpoint::Impl::check_deadlines(Nanos now) {
  for (auto& [id, op] : ops) {
    if (!op->working() || now < op->deadline) continue;
    std::string text = "step " + std::to_string(op->spec.step) + ", " + op_name(id) +
                       ": not complete after " + seconds(now - op->started) + " (" +
                       setting("timeout", op->spec.timeout);
    if (!op->spec.timeout_from.empty()) text += ", " + op->spec.timeout_from;
    int32_t rank = -1;
    const std::string missing = missing_of(*op, rank, now);
    fail({text + "): " + missing, rank, Cause::timeout}, now);
    return;
  }
}

// Who keeps an op from its end; `rank` becomes the first of them.
std::string Endpoint::Impl::missing_of(const Op& op, int32_t& rank, Nanos now) const {
  std::string text = not_begun(op, rank, now);
  if (!text.empty()) return text;
  const auto add = [&](const char* first, uint16_t e) {
    if (rank < 0) rank = e;
    text += (text.empty() ? first : ", ") + name(e);
    if (paths[e]) text += " (last heard " + seconds(now - paths[e]->life.last_heard) + " ago)";
  };
  if (op.aggregator && !op.aggregator->sum.all_final())
    for (const uint16_t w : op.aggregator->sum.waiting_for())
      add("a part of the gradients is missing of ", w);
  if (!text.empty()) return text;
  for (uint16_t a = 0; a < config.aggregators(); ++a)
    if (!op.worker->pull[a].complete())
      add("results are missing of ", config.aggregator_endpoint(a));
  return text;
}

}  // namespace gradwire
