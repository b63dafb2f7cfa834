// StreamPush is the usual push: each chunk goes once, and those that get lost go again or are
// given up.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/push_list.h"
#include "proto/push/stream_sender.h"

namespace gradwire {

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

}  // namespace gradwire
