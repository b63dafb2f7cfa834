// StreamPull and LossyPull carry an aggregator's results to one worker. The list of finished chunks
// is shared by the aggregator's senders.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/stream_sender.h"

namespace gradwire {

// The strategy with which results go back, as the plan has it.
std::unique_ptr<ChunkSender> make_pull_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              const std::vector<uint32_t>& finished);

// StreamPull sends each result until it is acknowledged or forgotten.
class StreamPull : public StreamSender {
 public:
  StreamPull(const Grid& grid, const Grid::Shard& shard, const std::vector<uint32_t>& finished,
             bool holes_first = true)
      : StreamSender(grid, shard, finished, shard.size(), holes_first) {}

  uint32_t backlog(bool) const override {
    return static_cast<uint32_t>(unsent() + holes_.again.size());
  }
  void lost(uint32_t chunk, Again) override {
    if (in_flight(chunk)) queue(chunk, false);
  }

 protected:
  size_t due() const override { return list_.size(); }
};

// LossyPull ends once the worker says that it has enough. It may never need a lost result, so fresh
// ones go first.
class LossyPull : public StreamPull {
 public:
  LossyPull(const Grid& grid, const Grid::Shard& shard, const std::vector<uint32_t>& finished)
      : StreamPull(grid, shard, finished, false), over_(shard.size() == 0) {}

  bool settled() const override { return over_; }
  void finish() override {
    over_ = true;
    for (const uint32_t chunk : list_) forget(chunk);
  }

 private:
  bool over_;
};

}  // namespace gradwire
