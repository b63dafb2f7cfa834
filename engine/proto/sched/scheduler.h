// Scheduler knows what waits for each destination, and chooses the destination of the next train.
// Its counts are kept as ops and paths change; no op is searched for a train.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/plan/lanes.h"

namespace gradwire {

class Scheduler {
 public:
  // The destination of a choice where none can be sent to, and the id where no op follows.
  static constexpr uint16_t kNowhere = UINT16_MAX;
  static constexpr uint64_t kNoOp = UINT64_MAX;

  explicit Scheduler(size_t destinations)
      : queues_(destinations), table_(destinations), ready_bits_((destinations + 63) / 64) {}

  // ---- what waits
  // Waiting counts the chunks of one op for one destination. Early ones go only while there is room
  // for ops that have not started there.
  struct Waiting {
    uint32_t ready = 0;
    uint32_t early = 0;
    bool operator==(const Waiting&) const = default;
  };
  void set_waiting(uint16_t to, uint64_t op, Waiting waiting);
  uint64_t backlog(uint16_t to, bool room) const {
    return queues_[to].total.ready + (room ? queues_[to].total.early : 0);
  }
  bool any_early(uint16_t to) const { return queues_[to].total.early > 0; }
  // The lane of the next train. Lanes take turns, so that chunks which the destination cannot take
  // yet delay no other lane.
  uint16_t next_lane(uint16_t to, bool room);
  // A probe time-out has come. The next train goes from another lane than after the one before,
  // since a queue may have room for no more than the first packet of each probe.
  void timed_out(uint16_t to) {
    queues_[to].lane = queues_[to].probed;
    queues_[to].timed_out = true;
  }
  // The first op of that lane from `from` on that waits, or kNoOp.
  uint64_t next_op(uint16_t to, uint64_t from) const;

  // ---- the choice
  struct Destination {
    uint64_t backlog = 0;  // chunks that may go
    uint64_t credit = 0;   // packets that the receiver allows
    uint32_t probes = 0;   // packets that go without credit and window
    bool closed = true;    // nothing can be sent there now

    bool operator==(const Destination&) const = default;
    bool waits() const { return !closed && backlog > 0; }
    bool ready() const { return waits() && (credit > 0 || probes > 0); }
  };
  void set_destination(uint16_t to, const Destination& now);
  struct Choice {
    uint16_t to = kNowhere;
    bool probe = false;
    uint32_t stalled = 0;  // destinations with a backlog, and without credit
  };
  // The destination with the largest backlog that has credit, so that all destinations of an op are
  // served alike and end together; one after a probe time-out goes first. Equal ones take turns.
  // `open`: the window admits a packet; `held(to)`: this destination's own pace holds it back.
  template <class Held>
  Choice choose(bool open, Held&& held) const {
    Choice choice{kNowhere, false, waiting_ - ready_};
    if (ready_ == 0) return choice;
    uint64_t most = 0;
    const size_t words = ready_bits_.size();
    // The first word is met twice: its bits from first_ on, and at the end those before it.
    for (size_t i = 0; i <= words; ++i) {
      const size_t w = (first_ / 64 + i) % words;
      const uint64_t before = (uint64_t{1} << (first_ % 64)) - 1;
      uint64_t bits = ready_bits_[w];
      if (i == 0) bits &= ~before;
      if (i == words) bits &= before;
      for (; bits; bits &= bits - 1) {
        const auto to = static_cast<uint16_t>(w * 64 + size_t(std::countr_zero(bits)));
        const Destination& at = table_[to];
        if (at.probes) return {to, true, choice.stalled};
        if (!open || held(to) || at.backlog <= most) continue;
        choice.to = to;
        most = at.backlog;
      }
    }
    return choice;
  }
  // A train has gone to this destination: the next turn is the next one's.
  void went(uint16_t to) { first_ = (to + size_t{1}) % table_.size(); }

 private:
  struct Entry {
    uint64_t key;  // lane and number: the ops of a lane stand together, in order
    Waiting waiting;
  };
  struct Queue {
    std::vector<Entry> entries;  // in the order of keys
    Waiting total;
    uint16_t lane = 0;    // of the last train
    uint16_t probed = 0;  // of the first train after the last probe time-out
    bool timed_out = false;
  };
  // A key is an op's id with its lane, the low bits, above its number.
  static constexpr int kLaneBits = std::countr_zero(kLanes);
  static uint64_t key_of(uint64_t op) { return std::rotr(op, kLaneBits); }
  static uint64_t op_of(uint64_t key) { return std::rotl(key, kLaneBits); }

  std::vector<Queue> queues_;       // by destination
  std::vector<Destination> table_;  // by destination
  // By destination: it has a backlog, and credit or probes. Their number, and that of all with a
  // backlog.
  std::vector<uint64_t> ready_bits_;
  uint32_t ready_ = 0;
  uint32_t waiting_ = 0;
  size_t first_ = 0;
};

}  // namespace gradwire
