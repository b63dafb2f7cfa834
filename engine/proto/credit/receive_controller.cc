#include "proto/credit/receive_controller.h"

namespace gradwire {

namespace {
// Peers whose share is computed after each batch, beside those that sent it.
constexpr size_t kTurns = 8;

// Packets lost here, or expected to be, before a trial is judged; a sender waits for more, so that
// its receivers find out first what their ports bear.
constexpr double kEvidence = 32;

// Bytes: the first window, and the smallest one. Several engines divide them. The first covers what
// peers may send without having asked.
double first_window(const ReceiveController::Setup& setup) {
  const double packets = std::max(kFirstWindow, setup.workers);
  return packets / setup.engines * setup.wire_bytes;
}
double smallest_window(const ReceiveController::Setup& setup) {
  const double packets = std::max(2U, setup.senders);
  return packets / setup.engines * setup.wire_bytes;
}
}  // namespace

// Where packets are lost the smallest window has one for each sender. A sender's own window keeps
// its size and target, because its pace follows losses.
ReceiveController::ReceiveController(const Setup& setup)
    : credit(setup.senders, CreditPool::standing_for(setup.senders, setup.engines)),
      endpoints_(setup.endpoints),
      wire_bytes_(setup.wire_bytes),
      server_(setup.server),
      window_(first_window(setup),
              {first_window(setup), setup.buffer, setup.target, kEvidence, smallest_window(setup)}),
      delay_(setup.endpoints) {}

bool ReceiveController::marked(Nanos round, Nanos now) {
  if (cut_ != 0 && now - cut_ < round) return false;
  cut_ = now;
  window_.marked();
  return true;
}

void ReceiveController::sample(size_t peer, Arriving& from, const Rtt& rtt, Nanos now) {
  const auto mean = static_cast<Nanos>(from.queued / static_cast<double>(from.bytes));
  const Nanos queue = delay_.add(peer, mean, from.bytes, now).delay;
  window_.sample(from.bytes, queue, rtt.round(), rtt.minimum(), from.loss.share(now) > kHeavyLoss,
                 now);
  from.queued = 0;
  from.bytes = 0;
}

// A server gives no credit for packets that it has no room for. A worker goes on: its peers limit
// by themselves what they send early, and need credit for the results of earlier ops.
bool ReceiveController::share(Credit& grant, const Sender& sender, Nanos now) const {
  const bool stalled = server_ && sender.no_room;
  return credit.share(grant,
                      {sender.rtt.minimum(), sender.rtt.round(), sender.from.loss.share(now),
                       sender.from.rate.bytes_per_second(), sender.largest, stalled},
                      window_, wire_bytes_);
}

void ReceiveController::add_turns(std::vector<uint16_t>& peers) {
  const auto arrived = static_cast<ptrdiff_t>(peers.size());
  for (size_t i = 0; i < std::min(kTurns, endpoints_); ++i) {
    turn_ = turn_ + 1 == endpoints_ ? 0 : turn_ + 1;
    const auto peer = static_cast<uint16_t>(turn_);
    const auto end = peers.begin() + arrived;
    if (std::find(peers.begin(), end, peer) == end) peers.push_back(peer);
  }
}

}  // namespace gradwire
