// Outbox collects what follows from the events of one op. Its endpoint acts on it after each event,
// and empties it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/failure.h"
#include "proto/base/message.h"
#include "proto/op/op_report.h"
#include "proto/push/passes.h"
#include "wire/packet.h"

namespace gradwire {

class Outbox {
 public:
  // The bytes of a message in each of its parts.
  static uint32_t part_bytes(uint32_t datagram_bytes) {
    return datagram_bytes - static_cast<uint32_t>(wire::kHeaderBytes) - kPartPrefix;
  }

  explicit Outbox(uint32_t datagram_bytes) : datagram_bytes_(datagram_bytes) {}

  // Frame is a control packet for a peer, which goes until it is acknowledged.
  struct Frame {
    uint16_t to;
    wire::Kind kind;
    uint32_t part;
    std::vector<uint8_t> payload;
  };
  void frame(uint16_t to, wire::Kind kind, std::vector<uint8_t> payload, uint32_t part = 0) {
    frames.push_back({to, kind, part, std::move(payload)});
    ++unacknowledged;
  }
  // Sends a message in parts, each behind `prefix` and the length of the whole.
  void message(uint16_t to, wire::Kind kind, std::span<const uint8_t> bytes,
               std::span<const uint8_t> prefix = {}) {
    const size_t size = part_bytes(datagram_bytes_) - prefix.size();
    for (uint32_t part = 0; part * size < bytes.size(); ++part) {
      const size_t at = part * size;
      Body body;
      body.put_bytes(prefix).put(static_cast<uint32_t>(bytes.size()));
      body.put_bytes(bytes.subspan(at, std::min(size, bytes.size() - at)));
      frame(to, kind, body.bytes(), part);
    }
  }
  void list(uint16_t to, wire::Kind kind, std::span<const uint32_t> values) {
    const size_t most = (datagram_bytes_ - wire::kHeaderBytes) / sizeof(uint32_t);
    for (; !values.empty(); values = values.subspan(std::min(most, values.size()))) {
      Body body;
      for (const uint32_t value : values.first(std::min(most, values.size()))) body.put(value);
      frame(to, kind, body.bytes());
    }
  }
  void pass(uint16_t to, wire::Kind kind, const wire::Pass& pass) {
    std::vector<uint8_t> payload(wire::kPassBytes);
    wire::write_pass(payload.data(), pass);
    frame(to, kind, std::move(payload));
  }
  // Answers the sender of passes: with STOP once it needs to send nothing more, else with the
  // BITMAP of what is missing, if a PROBE has arrived. Packets that arrive after the STOP was sent
  // report an outdated backlog, which would take credit from other senders.
  template <class Missing>
  void answer(uint16_t to, wire::Way way, PassReceiver& passes, bool enough, Missing&& missing) {
    if (enough) satisfied.push_back(to);
    if (passes.stopped()) return;
    if (enough) {
      pass(to, wire::Kind::stop, {way, passes.stop()});
    } else if (passes.waiting()) {
      std::array<uint8_t, wire::kPassBytes> prefix{};
      wire::write_pass(prefix.data(), {way, passes.answer()});
      Body body;
      body.put_bitmap(missing());
      message(to, wire::Kind::bitmap, body.bytes(), prefix);
    }
  }
  // Other chunks than before wait for this peer, or for all.
  void recount(uint16_t peer) {
    if (std::ranges::find(recounts, peer) == recounts.end()) recounts.push_back(peer);
  }
  void fail(Failure why) {
    if (!failure) failure = std::move(why);
  }

  std::vector<Frame> frames;
  std::vector<uint16_t> recounts;  // peers
  bool recount_all = false;
  std::vector<uint16_t> outdated;   // peers that may want to send less than they have reported
  std::vector<uint16_t> satisfied;  // peers of which nothing more is needed
  bool changed = false;             // the op's timers; and it may be drained
  bool retires = false;             // it may be drained, and others may start in its place
  std::optional<OpReport> report;   // it is complete here
  Failure failure;                  // the job cannot go on
  uint32_t unacknowledged = 0;      // frames; this one is kept

  // All has been acted on.
  void clear() {
    frames.clear();
    recounts.clear();
    outdated.clear();
    satisfied.clear();
    recount_all = changed = retires = false;
    report.reset();
  }
  // True when there is something to act on.
  bool any() const {
    return changed || recount_all || !recounts.empty() || !frames.empty() || !satisfied.empty() ||
           !outdated.empty() || retires || report || failure;
  }

 private:
  uint32_t datagram_bytes_;
};

}  // namespace gradwire
