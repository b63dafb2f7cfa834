#include "proto/path/silence.h"

#include <algorithm>

#include "proto/base/text.h"
#include "proto/path/liveness.h"

namespace gradwire {

namespace {
// Peers whose last packets arrived within this time of each other count as dead together: those
// that died in one moment need not have sent their last packets at the same time.
constexpr Nanos kMoment = kSecond / 4;
}  // namespace

Failure failure_of_silence(std::vector<Listened> peers, const EndpointConfig& config,
                           const std::string& step, Nanos now) {
  if (peers.empty()) return {};
  const Nanos last = std::ranges::min(peers, {}, &Listened::last_heard).last_heard;
  if (now - last <= config.peer_timeout) return {};
  const Nanos moment = std::min(kMoment, config.peer_timeout / 8);
  // A peer that lives is heard within about this time, so one that was not need not live. Pings go
  // more often only after it, and need a moment to be answered.
  const Nanos together = Liveness::long_silence(config);
  const size_t all = peers.size();
  const bool cut_off = all > 1 && std::ranges::all_of(peers, [&](const Listened& each) {
                         return now - each.last_heard > config.peer_timeout - together + moment;
                       });
  std::erase_if(peers, [=](const Listened& each) { return each.last_heard > last + moment; });
  const Listened& first = peers.front();
  const std::string time =
      seconds(now - last) + " (" + setting("peer_timeout", config.peer_timeout) + ")";
  if (first.left)
    return {config.name(first.peer) + " left the job and has sent nothing for " + time +
                ", but step " + std::to_string(first.step) + " still needs results of it",
            first.peer, Cause::left};
  if (cut_off)
    return {step + config.name(config.endpoint) + " hears none of its " + std::to_string(all) +
                " peers since " + time + ": its host, or the switch that it is at, is cut off",
            config.endpoint, Cause::silence};
  std::string text = step + config.name(config.endpoint) + " has heard nothing of ";
  for (size_t i = 0; i < peers.size(); ++i)
    text += (i == 0 ? "" : ", ") + config.name(peers[i].peer);
  text += " for " + time;
  if (all == 1)
    return {text + ": that process is dead or frozen, or the network between the two is cut", -1,
            Cause::silence};
  return {text + ", but hears the others: " +
              (peers.size() == 1 ? "that process is" : "those processes are") +
              " dead or frozen, or cut off from the network",
          first.peer, Cause::silence};
}

}  // namespace gradwire
