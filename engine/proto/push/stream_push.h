// StreamPush is the usual push: each chunk goes once, and those that get lost go again or are
// given up.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/fifo.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/chunk_sender.h"
#include "proto/push/push_list.h"

namespace gradwire {

class StreamPush : public ChunkSender {
 public:
  StreamPush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, PushList list);

  uint32_t backlog(bool fresh) const override;
  bool settled() const override { return open_ == 0; }
  bool next(uint32_t& chunk, bool& again, bool fresh) override;
  bool peek(uint32_t& chunk, bool fresh) override;
  bool in_last(double share) const override { return last_of(cursor_, list_.size(), share); }
  void acked(uint32_t chunk) override;
  void lost(uint32_t chunk, Again why) override;
  void forget(uint32_t chunk) override { settle(chunk, State::done); }
  bool stop_region(uint32_t region) override;
  std::vector<uint32_t> take_forgiven() override { return std::exchange(forgiven_, {}); }
  void finish() override;

 protected:
  // reserved: it goes only in place of another (SparePush).
  enum class State : uint8_t { idle, flight, acked, queued, reserved, done };
  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  virtual void settle(uint32_t chunk, State to);
  void queue(uint32_t chunk, bool forgivable);

  const Plan& plan_;
  const Grid& grid_;
  uint32_t begin_;
  std::vector<uint32_t> list_;
  std::vector<uint8_t> critical_;  // by chunk of the shard
  uint32_t open_;                  // chunks to send or in flight

 private:
  struct Ledger {
    uint64_t received = 0;  // elements acknowledged
    uint64_t forgiven = 0;
    bool stopped = false;
  };
  bool room(uint32_t chunk) const;
  void forgive_queued();
  // True when lost chunks go before fresh ones. Under spend nothing or anything a gap delays the
  // sum. Under spend late or lost the gap may still be forgiven, so fresh chunks go first.
  bool holes_first() const {
    return plan_.spend == Spend::nothing || plan_.spend == Spend::anything;
  }
  bool peek_lost(uint32_t& chunk);
  bool peek_fresh(uint32_t& chunk);

  size_t cursor_ = 0;
  std::vector<State> state_;
  ChunkFifo again_;  // chunks to be sent again, whatever the ledger allows
  ChunkFifo lost_;   // chunks to be sent again, or forgiven
  uint32_t queued_ = 0;
  std::vector<Ledger> ledger_;  // by region
  std::vector<uint32_t> forgiven_;
};

}  // namespace gradwire
