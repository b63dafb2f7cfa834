#include "proto/credit/credit.h"

#include <algorithm>

namespace gradwire {

// A single sender gets half of the first window, so that its peer's other paths may begin.
uint32_t CreditPool::standing_for(uint32_t senders, uint32_t engines) {
  return std::max(1U, kFirstWindow / std::max(2U, senders) / engines);
}

void CreditPool::ask(Credit& credit, uint64_t demand) {
  const auto wanted = static_cast<uint16_t>(demand);
  squares_ += uint64_t{wanted} * wanted - uint64_t{credit.demand} * credit.demand;
  idle_ += uint32_t{wanted == 0} - uint32_t{credit.demand == 0};
  credit.demand = wanted;
}

// Shares follow the square of what each sender still has to send: a sender that lags catches up,
// and all end together. Even shares would favour senders whose ACKs return soonest.
bool CreditPool::share(Credit& credit, const Sender& sender, const DelayWindow& window,
                       uint32_t wire_bytes) const {
  const auto packets = static_cast<uint32_t>(window.bytes() / wire_bytes);
  // Standing credit must fit a window that losses have made small.
  const uint32_t standing = std::min(standing_, std::max(2U, packets / senders_));
  const uint32_t pool = packets - std::min(packets / 2, idle_ * standing);
  const uint32_t wanted = credit.demand;
  const double part =
      wanted ? static_cast<double>(uint64_t{wanted} * wanted) / static_cast<double>(squares_) : 0.0;
  const PathProfile& profile = profile_of(sender.rtprop);
  uint32_t unasked = standing;
  credit.part = std::max(standing, static_cast<uint32_t>(part * pool));
  if (profile.spreads) {
    // To ask for credit takes a round, so the window is granted unasked. A lone sender gets half of
    // it: with all, an op would be sent before its sender hears of heavy loss.
    unasked = std::max(standing,
                       static_cast<uint32_t>(profile.unasked * packets / std::max(senders_, 2U)));
    // The sender paces by `part`, so it is the port's rate even while the window is smaller than
    // what the path holds.
    const double known =
        window.rate() * 1e-9 / wire_bytes * static_cast<double>(sender.rtprop + window.target());
    credit.part = std::max(unasked, static_cast<uint32_t>((wanted ? part : 1.0 / senders_) *
                                                          std::max<double>(pool, known)));
  }
  credit.share = std::max(unasked, std::min(wanted, static_cast<uint32_t>(part * pool)));
  // Packets lost on the path do not fill this port, so shares stretch by the loss. They stretch to
  // what this port carries, or to a higher rate if the sender has shown one.
  const double stretch = window.stretch(sender.loss);
  if (stretch > 1) {
    const double shown =
        sender.rate * 1e-9 / wire_bytes * static_cast<double>(sender.round + window.target());
    const double most =
        window.ramps() ? UINT16_MAX : std::max<double>({shown, 1.0 * packets, 1.0 * credit.part});
    credit.share = static_cast<uint32_t>(std::min(credit.share * stretch, most));
    credit.part = static_cast<uint32_t>(std::min(credit.part * stretch, most));
  }
  if (sender.stalled) return false;
  credit.granted = std::max(credit.granted, sender.largest + credit.share);
  const uint64_t untold = credit.granted - credit.granted_sent;
  return wanted && credit.granted_sent <= sender.largest + credit.share / 2 && untold >= 2;
}

}  // namespace gradwire
