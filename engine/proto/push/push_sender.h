// The worker's half of a push: which chunk of one shard goes to its aggregator next.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/base/fifo.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/passes.h"

namespace gradwire {

// Spend anything, fraction one minus the bound, in a stream: a push ends where the close does.
bool eager_from_start(const Plan& plan);

// What a worker sends of one shard, in order: the critical chunks, then by its own priority classes
// (order priority), within a class in the shared order. Under an eager close from the start only as
// much of each region as the close asks for: every worker leaves out the same chunks, with classes
// those of its own last ones. `spares`: gets these, in the same order.
std::vector<uint32_t> push_list(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                                std::span<const uint32_t> critical,
                                std::span<const uint8_t> priorities = {},
                                std::vector<uint32_t>* spares = nullptr);

// Why a chunk goes again: it was declared lost; it came and found no room; silence; under heavy
// loss, before word can come.
enum class Again : uint8_t { lost, refused, probe, repeat };

class PushSender {
 public:
  // `may_differ`: under loss the push may go beyond its list: nobody pulls more because of that.
  PushSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
             std::span<const uint32_t> critical, std::span<const uint8_t> priorities,
             bool may_differ);

  // Chunks still to be sent or sent again; without `fresh` those to be sent again.
  uint32_t backlog(bool fresh = true) const {
    if (passes_) return fresh ? passes_->backlog() : 0;
    if (!open_) return 0;
    return fresh ? static_cast<uint32_t>(list_.size() - cursor_) + queued_ : queued_;
  }
  bool settled() const { return passes_ ? passes_->settled() : open_ == 0; }
  // False when there is nothing to send now.
  bool next(uint32_t& chunk, bool& again, bool fresh = true);
  // The chunk that next() would give.
  bool peek(uint32_t& chunk, bool fresh = true);
  // True for the chunk from which on less than 1 % of the list follows.
  bool in_tail() const {
    return passes_ ? passes_->in_tail() : cursor_ + list_.size() / 100 >= list_.size();
  }
  // Under control "probe", else null: then what is acknowledged or lost is nothing to the push.
  PassSender* passes() { return passes_ ? &*passes_ : nullptr; }

  void acked(uint32_t chunk);
  void lost(uint32_t chunk, Again why);
  // The aggregator needs no more of this region.
  void stop_region(uint32_t region);
  // The aggregator has decided about this chunk (its result came back).
  void decided(uint32_t chunk);
  void finish();
  // Chunks given up since the last call, within the ledger's room (spend lost).
  std::vector<uint32_t> take_forgiven();

 private:
  // spare: left out by an eager close, and not called so far. doubted: of its region others have
  // been sent since, in its place.
  enum class State : uint8_t { spare, idle, flight, acked, queued, doubted, done };
  struct Ledger {
    uint64_t received = 0;  // elements acknowledged
    uint64_t forgiven = 0;
    bool stopped = false;
  };
  // Of a region under an eager close: which of its chunks may go in place of one that is in doubt.
  struct Reserve {
    uint64_t need = 0;      // elements with which it closes
    uint64_t underway = 0;  // acknowledged, queued, in flight and not in doubt
    uint32_t head = kNone;  // FIFO: the spares, then the doubted
    uint32_t tail = kNone;
  };
  static constexpr uint32_t kNone = 0xffffffff;

  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  void settle(uint32_t chunk, State to);
  bool room(uint32_t chunk) const;
  void forgive_queued();
  // Where nothing may be spent a hole delays the sum, so it is filled first; else it may yet be
  // forgiven, and fresh chunks go first.
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
  std::vector<uint8_t> critical_;  // per chunk of the shard
  ChunkFifo again_;                // to be sent again, whatever the ledger says
  ChunkFifo lost_;                 // to be sent again, or forgiven
  uint32_t queued_ = 0;
  uint32_t open_ = 0;
  std::vector<Ledger> ledger_;    // per region
  std::vector<Reserve> reserve_;  // per region; empty where nothing was left out
  std::vector<uint32_t> behind_;  // the next in its region's reserve
  std::vector<uint8_t> unsent_;   // spares
  bool losing_ = false;           // something was declared lost
  std::vector<uint32_t> forgiven_;
  std::optional<PassSender> passes_;
};

}  // namespace gradwire
