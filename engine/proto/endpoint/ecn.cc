// The endpoint's part of explicit congestion notification: marks on arriving packets, and the
// counts that peers echo for packets sent.
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

// Counts a packet that arrived for the first time. The receive window shrinks for marks too, once
// per round, because under incast it bounds all senders together.
void Endpoint::Impl::count_ecn(Path& path, uint8_t ecn, Nanos now) {
  if (path.ecn.seen.add(ecn)) path.acks.hurry();  // RFC 9000 §13.2.1
  if (ecn != kCe) return;
  ++counters.marked;
  if (receiver.cut != 0 && now - receiver.cut < path.recovery.rtt.round()) return;
  receiver.cut = now;
  receiver.window.marked();
  ++counters.mark_cuts;
}

void Endpoint::Impl::on_counts(Path& path, const wire::Ack& ack, Nanos now) {
  const bool marks = path.ecn.sent.told(ack.ect0, ack.ce);
  if (config.ecn && path.ecn.sent.failed() && !path.ecn.failure_counted) {
    path.ecn.failure_counted = true;
    ++counters.ecn_failed;
  }
  if (marks && sender.marked(path.recovery.largest_acked_sent(), now)) ++counters.mark_cuts;
}

}  // namespace gradwire
