// Explicit congestion notification: what comes in marked, and what the peers say of ours.
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

// A packet that had not come before. The receiver's window, too, shrinks for marks, once per round:
// in an incast it is what bounds all senders together.
void Endpoint::Impl::count_ecn(Path& path, uint8_t ecn, Nanos now) {
  if (path.ecn_seen.add(ecn)) path.ack_now = true;  // RFC 9000, section 13.2.1
  if (ecn != kCe) return;
  ++counters.marked;
  if (receive_cut != 0 && now - receive_cut < path.rtt.round()) return;
  receive_cut = now;
  receive_window.marked();
  ++counters.mark_cuts;
}

// One congestion event per round (RFC 9002, section 7.3.2 and appendix B.6): marks on packets that
// were sent before the window shrank say nothing about what it is now.
void Endpoint::Impl::on_counts(Path& path, const wire::Ack& ack, Nanos now) {
  const bool marks = path.ecn.told(ack.ect0, ack.ce);
  check_ecn(path);
  if (!marks || path.largest_acked_sent <= send_cut) return;
  send_cut = now;
  send_window.marked();
  ++counters.mark_cuts;
}

void Endpoint::Impl::check_ecn(Path& path) {
  if (!config.ecn || !path.ecn.failed() || path.ecn_told) return;
  path.ecn_told = true;
  ++counters.ecn_failed;
}

}  // namespace gradwire
