// Results on their way back. The aggregator keeps one PullSender per worker over one shared list of
// finished chunks; a worker keeps one PullReceiver per aggregator.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/fifo.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/aggregator.h"
#include "proto/push/passes.h"

namespace gradwire {

class PullSender {
 public:
  PullSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
             const std::vector<uint32_t>& finished);

  uint32_t backlog() const {
    const size_t fresh = finished_->size() - cursor_;
    if (passes_) return passes_->settled() ? 0 : static_cast<uint32_t>(fresh) + passes_->backlog();
    return static_cast<uint32_t>(fresh + lost_.size());
  }
  bool next(uint32_t& chunk, bool& again);
  // The chunk that next() would give.
  bool peek(uint32_t& chunk);
  void acked(uint32_t chunk);
  void lost(uint32_t chunk);
  void forget(uint32_t chunk);  // nobody needs it any more
  // Nobody knows yet whether it has arrived: of a chunk that went twice a copy may have.
  bool in_flight(uint32_t chunk) const { return state_[chunk - begin_] == State::flight; }
  uint32_t acked_count() const { return acked_; }

  // ---- a lossy pull
  // Under control "probe", else null.
  PassSender* passes() { return passes_ ? &*passes_ : nullptr; }
  // No results follow.
  void seal();
  // ENOUGH: the worker needs no more of this region.
  void stop_region(uint32_t region);
  // The worker needs nothing more of this shard.
  bool settled() const { return passes_ ? passes_->settled() : regions_left_ == 0; }

 private:
  void join();
  bool pop_lost(uint32_t& chunk);
  bool pop_fresh(uint32_t& chunk);

  enum class State : uint8_t { idle, flight, acked, queued, forgotten };
  uint32_t begin_;
  const Grid* grid_;
  bool lossy_;
  const std::vector<uint32_t>* finished_;
  Zeroed<State> state_;
  size_t cursor_ = 0;
  ChunkFifo lost_;  // to be sent again
  uint32_t acked_ = 0;
  std::vector<uint8_t> region_open_;  // of a lossy pull
  uint32_t regions_left_ = 0;
  std::optional<PassSender> passes_;
};

class PullReceiver {
 public:
  explicit PullReceiver(const Grid::Shard& shard)
      : begin_(shard.begin), missing_(shard.size()), arrived_(shard.size()) {}

  // True when this chunk had not arrived before.
  bool insert(uint32_t chunk);
  bool has(uint32_t chunk) const { return arrived_.test(chunk - begin_); }
  // CLOSE: this worker's counted chunks, and which chunks have a result at all.
  void close(Bitmap counted, Bitmap applied);
  // COMMIT: the results that all workers apply.
  void commit(Bitmap committed);

  bool closed() const { return closed_; }
  bool committed() const { return committed_; }
  // Wanted chunks that have not arrived: all of the shard until CLOSE or COMMIT says less.
  uint32_t missing() const { return missing_; }
  bool counted(uint32_t chunk) const { return !closed_ || counted_mask_.test(chunk - begin_); }
  bool wanted(uint32_t chunk) const { return !narrowed_ || wanted_.test(chunk - begin_); }

 private:
  void want(Bitmap wanted);

  uint32_t begin_;
  uint32_t missing_;
  bool closed_ = false;
  bool committed_ = false;
  bool narrowed_ = false;
  Bitmap arrived_;
  Bitmap counted_mask_;
  Bitmap wanted_;
};

}  // namespace gradwire
