#include "proto/credit/receive_controller.h"

namespace gradwire {

namespace {
// Peers whose share is computed after each batch, beside those that sent it.
constexpr size_t kOthers = 8;

// The share of the port's rate at which each of two senders spends its turn. With half of it the
// port is idle whenever one of them is late; with all of it ports ten times as slow as their
// senders lose a tenth.
constexpr double kTurnPace = 0.6;
// The share of the wanted queue that sets the length of a turn at least. With half of it a turn of
// a short queue takes an ACK for nine packets; with all of it slow ports lose some per cent.
constexpr double kLeastTurn = 0.75;

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
      target_(setup.target),
      many_(setup.server && GrantSlots::serve(setup.senders)),
      window_(first_window(setup), {first_window(setup), setup.buffer, setup.target,
                                    LossLaw::kEvidence, smallest_window(setup)}),
      delay_(setup.endpoints),
      slots_(setup.endpoints) {}

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
bool ReceiveController::share(Credit& grant, const Sender& sender, Nanos now) {
  const bool before = std::exchange(grant.turns, takes_turns(sender.rtt.minimum(), now));
  if (grant.turns) return grant_slot(grant, sender, now) || !before;
  const bool stalled = server_ && sender.no_room;
  return credit.share(grant,
                      {sender.rtt.minimum(), sender.rtt.round(), sender.from.loss.share(now),
                       sender.from.rate.bytes_per_second(), sender.largest, stalled},
                      window_, wire_bytes_);
}

// A queue too short for all senders is known for a while, since turns keep its losses from showing
// again. On a longer path a turn would be over before its sender is heard again.
bool ReceiveController::takes_turns(Nanos rtprop, Nanos now) {
  if (!many_) return false;
  if (window_.overflows(now)) turns_until_ = now + WindowedMin::kWindow;
  return now < turns_until_ && 2 * rtprop < target_;
}

// A slot has its part of what the path and a part of the wanted queue hold, so that two at once
// leave half of that queue empty. The next turn is granted a round before this one ends. A sender
// that was not heard of since its last turn has told nothing new, and asks for no other.
bool ReceiveController::grant_slot(Credit& grant, const Sender& sender, Nanos now) {
  const uint64_t underway = std::max(grant.granted, sender.largest) - sender.largest;
  const auto wanted =
      static_cast<uint32_t>(grant.demand - std::min<uint64_t>(grant.demand, underway));
  const auto packets_in = [&](double nanos) { return window_.rate() * 1e-9 * nanos / wire_bytes_; };
  const auto target = static_cast<double>(target_);
  const double queue = std::max(static_cast<double>(window_.target()), kLeastTurn * target);
  const double takes = queue / GrantSlots::kSlots + static_cast<double>(sender.rtt.minimum());
  const double both = std::min(window_.bytes() / wire_bytes_, packets_in(takes));
  const uint32_t packets = std::max(2U, static_cast<uint32_t>(both / GrantSlots::kSlots));
  const double round = packets_in(static_cast<double>(sender.rtt.smoothed()));
  const auto ahead = static_cast<uint32_t>(std::min(packets / 2.0, round));
  if (grant.asked < sender.largest && !sender.no_room) {
    grant.asked = sender.largest;
    slots_.ask(sender.peer, grant.demand <= ahead ? UINT64_MAX : sender.largest + ahead, wanted);
  }
  if (grant.demand == 0) grant.granted = std::max(grant.granted, sender.largest + 1);
  const uint32_t turn = sender.no_room ? 0 : std::min(wanted, packets);
  const uint64_t end = std::max(grant.granted, sender.largest) + turn;
  const Nanos due = now + sender.rtt.round() + kHostDelay + static_cast<Nanos>(takes);
  if (!slots_.grant(sender.peer, end, turn ? due : now) || turn == 0) return false;
  grant.share = turn;
  const double paced = window_.ramps() ? UINT16_MAX : kTurnPace * packets_in(target);
  grant.part = static_cast<uint32_t>(std::clamp(paced, 1.0, 1.0 * UINT16_MAX));
  grant.granted = end;
  return true;
}

void ReceiveController::add_others(std::vector<uint16_t>& peers) {
  const auto arrived = static_cast<ptrdiff_t>(peers.size());
  for (size_t i = 0; i < std::min(kOthers, endpoints_); ++i) {
    other_ = other_ + 1 == endpoints_ ? 0 : other_ + 1;
    const auto peer = static_cast<uint16_t>(other_);
    const auto end = peers.begin() + arrived;
    if (std::find(peers.begin(), end, peer) == end) peers.push_back(peer);
  }
}

}  // namespace gradwire
