// StreamPush and SparePush carry a worker's chunks to one aggregator.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/push_list.h"
#include "proto/push/stream_sender.h"

namespace gradwire {

// The strategy with which a worker sends one shard, as its plan has it. `may_differ`: under loss,
// the push may send chunks beyond its list. This is for plans where that makes no worker pull more.
std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard, PushList list,
                                              bool may_differ);

// StreamPush is the usual push: each chunk goes once, and those that get lost go again or are
// given up.
class StreamPush : public StreamSender {
 public:
  StreamPush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, PushList list);

  uint32_t backlog(bool fresh) const override;
  void acked(std::span<const uint32_t> chunks) override;
  void lost(uint32_t chunk, Again why) override;
  bool stop_region(uint32_t region) override;
  std::vector<uint32_t> take_forgiven() override { return std::exchange(forgiven_, {}); }
  void finish() override;

 protected:
  size_t due() const override { return due_; }

  const Plan& plan_;
  std::vector<uint32_t> sent_;
  Bitmap critical_;  // chunks of the shard
  size_t due_;       // chunks of the list, and spares that have gone

 private:
  struct Ledger {
    uint64_t received = 0;  // elements acknowledged
    uint64_t forgiven = 0;
  };
  bool room(uint32_t chunk) const;
  void forgive_queued();
  uint32_t end() const { return begin_ + static_cast<uint32_t>(critical_.size()); }

  std::vector<Ledger> ledger_;  // by region
  std::vector<uint32_t> forgiven_;
};

// SparePush is a push under an eager close that also sends chunks beyond its list: once something
// was declared lost, they go in place of chunks that may be lost.
class SparePush : public StreamPush {
 public:
  SparePush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, const PushList& list);

  Slice next(size_t most, bool fresh) override;
  void lost(uint32_t chunk, Again why) override;

 private:
  // Reserve holds the chunks of one region that may go in place of doubted ones. Doubted chunks
  // were sent and may be lost, and others of their region have been queued in their place.
  struct Reserve {
    uint64_t need = 0;      // elements with which the region closes
    uint64_t underway = 0;  // elements acknowledged, queued or in flight, without doubted ones
    ChunkFifo waiting;      // the spares, then the doubted
  };
  void leave_reserve(uint32_t chunk) override;
  void put_back(uint32_t chunk);
  void doubt(uint32_t chunk);

  std::vector<Reserve> reserve_;  // by region
  std::vector<uint8_t> unsent_;   // by chunk: a spare that has not been sent
  bool losing_ = false;           // a chunk of this push was declared lost
};

}  // namespace gradwire
