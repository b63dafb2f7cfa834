// StreamPull and LossyPull carry an aggregator's results to one worker. The list of finished chunks
// is shared by the aggregator's senders.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/base/fifo.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/chunk_sender.h"

namespace gradwire {

// The strategy with which results go back, as the plan has it.
std::unique_ptr<ChunkSender> make_pull_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              const std::vector<uint32_t>& finished);

// StreamPull sends each result until it is acknowledged or forgotten.
class StreamPull : public ChunkSender {
 public:
  StreamPull(const Grid::Shard& shard, const std::vector<uint32_t>& finished)
      : begin_(shard.begin), finished_(finished), state_(shard.size()) {}

  uint32_t backlog(bool fresh) const override;
  bool settled() const override { return over_ >= finished_.size(); }
  bool next(uint32_t& chunk, bool& again, bool fresh) override;
  bool peek(uint32_t& chunk, bool fresh) override;
  bool in_last(double share) const override { return last_of(cursor_, state_.size(), share); }
  void acked(uint32_t chunk) override { end(chunk, State::acked); }
  void lost(uint32_t chunk, Again why) override;
  void forget(uint32_t chunk) override { end(chunk, State::forgotten); }
  // True while the chunk is sent and neither acknowledged nor lost. A chunk sent twice may have
  // arrived.
  bool in_flight(uint32_t chunk) const override { return state_[chunk - begin_] == State::flight; }

 protected:
  bool peek_lost(uint32_t& chunk);
  bool peek_fresh(uint32_t& chunk);
  uint32_t begin_;

 private:
  enum class State : uint8_t { idle, flight, acked, queued, forgotten };
  void end(uint32_t chunk, State how);

  const std::vector<uint32_t>& finished_;
  Zeroed<State> state_;
  size_t cursor_ = 0;
  ChunkFifo lost_;     // chunks to be sent again
  uint32_t over_ = 0;  // chunks acknowledged or forgotten
};

// LossyPull ends region by region, once the worker has enough of each.
class LossyPull : public StreamPull {
 public:
  LossyPull(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
            const std::vector<uint32_t>& finished);

  bool settled() const override { return regions_left_ == 0; }
  bool peek(uint32_t& chunk, bool fresh) override;
  bool stop_region(uint32_t region) override;

 private:
  const Grid& grid_;
  uint32_t end_;               // chunk
  std::vector<uint8_t> open_;  // by region: more is needed
  uint32_t regions_left_ = 0;
};

}  // namespace gradwire
