// The answer of a receiver of passes to their sender (proto/push/passes.h).
#pragma once

#include <array>

#include "proto/op/outbox.h"
#include "proto/push/passes.h"

namespace gradwire {

// Answers with STOP once the sender needs to send nothing more, else with the BITMAP if a PROBE has
// arrived. Packets that arrive after the STOP was sent report an outdated backlog, which would take
// credit from other senders.
template <class Missing>
void answer_pass(Outbox& out, uint16_t to, wire::Way way, PassReceiver& passes, bool enough,
                 Missing&& missing) {
  if (enough) out.satisfied.push_back(to);
  if (passes.stopped()) return;
  if (enough) {
    out.pass(to, wire::Kind::stop, {way, passes.stop()});
  } else if (passes.waiting()) {
    std::array<uint8_t, wire::kPassBytes> prefix{};
    wire::write_pass(prefix.data(), {way, passes.answer()});
    Body body;
    body.put_bitmap(missing());
    out.message(to, wire::Kind::bitmap, body.bytes(), prefix);
  }
}

}  // namespace gradwire
