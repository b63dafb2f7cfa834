// PushSender is the sending half of a push: it decides which chunk of one shard a worker sends
// next.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/base/again.h"
#include "proto/base/fifo.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/passes.h"

namespace gradwire {

// True for plans whose regions close from the start at one minus the bound (spend anything, control
// stream). Such a push sends no more than the close needs.
bool eager_from_start(const Plan& plan);

// The chunks that a worker sends of one shard, in order: the critical ones first, then by its own
// priority classes (order priority), then in the order that all workers share. When the plan closes
// eagerly from the start, the list has only as much of each region as the close asks for. All
// workers then leave out the same chunks, or with classes each its own last ones; `spares` receives
// these.
std::vector<uint32_t> push_list(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                                std::span<const uint32_t> critical,
                                std::span<const uint8_t> priorities = {},
                                std::vector<uint32_t>* spares = nullptr);

class PushSender {
 public:
  // `may_differ`: under loss, the push may send chunks beyond its list. This is for plans where
  // that makes no worker pull more.
  PushSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
             std::span<const uint32_t> critical, std::span<const uint8_t> priorities,
             bool may_differ);

  // The chunks still to be sent or sent again; without `fresh` only those to be sent again.
  uint32_t backlog(bool fresh = true) const {
    if (passes_) return fresh ? passes_->backlog() : 0;
    if (!open_) return 0;
    return fresh ? static_cast<uint32_t>(list_.size() - cursor_) + queued_ : queued_;
  }
  bool settled() const { return passes_ ? passes_->settled() : open_ == 0; }
  // Returns false when there is nothing to send now.
  bool next(uint32_t& chunk, bool& again, bool fresh = true);
  // The chunk that next() would return.
  bool peek(uint32_t& chunk, bool fresh = true);
  // True for the chunk from which on less than 1 % of the list follows.
  bool in_tail() const {
    return passes_ ? passes_->in_tail() : cursor_ + list_.size() / 100 >= list_.size();
  }
  // The passes under control "probe", else null. With passes, ACKs and losses do not matter to the
  // push.
  PassSender* passes() { return passes_ ? &*passes_ : nullptr; }
  const PassSender* passes() const { return passes_ ? &*passes_ : nullptr; }

  void acked(uint32_t chunk);
  void lost(uint32_t chunk, Again why);
  // The aggregator needs no more chunks of this region.
  void stop_region(uint32_t region);
  // The aggregator has decided about this chunk: its result arrived.
  void decided(uint32_t chunk);
  void finish();
  // The chunks given up within the ledger's room since the last call (spend lost).
  std::vector<uint32_t> take_forgiven();

 private:
  // spare: the eager close leaves it out, and it has not been used yet. doubted: it was sent, may
  // be lost, and other chunks of its region have been queued in its place.
  enum class State : uint8_t { spare, idle, flight, acked, queued, doubted, done };
  struct Ledger {
    uint64_t received = 0;  // elements acknowledged
    uint64_t forgiven = 0;
    bool stopped = false;
  };
  // Reserve holds the chunks of one region that may go in place of doubted ones, under an eager
  // close.
  struct Reserve {
    uint64_t need = 0;      // elements with which the region closes
    uint64_t underway = 0;  // elements acknowledged, queued or in flight, without doubted ones
    uint32_t head = kNone;  // FIFO: the spares, then the doubted
    uint32_t tail = kNone;
  };
  // The end of a reserve's list.
  static constexpr uint32_t kNone = 0xffffffff;

  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  void settle(uint32_t chunk, State to);
  bool room(uint32_t chunk) const;
  void forgive_queued();
  // True when lost chunks go before fresh ones. Under spend nothing or anything a gap delays the
  // sum. Under spend late or lost the gap may still be forgiven, so fresh chunks go first.
  bool holes_first() const {
    return plan_.spend == Spend::nothing || plan_.spend == Spend::anything;
  }
  bool peek_lost(uint32_t& chunk);
  bool pop_lost(uint32_t& chunk);
  void queue(uint32_t chunk, bool forgivable);
  void keep_in_reserve(uint32_t chunk);
  void doubt(uint32_t chunk);

  const Plan& plan_;
  const Grid& grid_;
  uint32_t begin_;
  std::vector<uint32_t> list_;
  size_t cursor_ = 0;
  std::vector<State> state_;
  std::vector<uint8_t> critical_;  // by chunk of the shard
  ChunkFifo again_;                // chunks to be sent again, whatever the ledger allows
  ChunkFifo lost_;                 // chunks to be sent again, or forgiven
  uint32_t queued_ = 0;
  uint32_t open_ = 0;
  std::vector<Ledger> ledger_;    // by region
  std::vector<Reserve> reserve_;  // by region; empty where nothing was left out
  std::vector<uint32_t> behind_;  // by chunk: the next in its region's reserve
  std::vector<uint8_t> unsent_;   // by chunk: a spare that has not been sent
  bool losing_ = false;           // a chunk of this push was declared lost
  std::vector<uint32_t> forgiven_;
  std::optional<PassSender> passes_;
};

}  // namespace gradwire
