// StreamSender sends each chunk of a list once, and again those that get lost: the course that
// StreamPush and StreamPull have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/base/fifo.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/push/chunk_sender.h"

namespace gradwire {

class StreamSender : public ChunkSender {
 public:
  bool settled() const override { return over_ >= due(); }
  Slice next(size_t most, bool fresh) override;
  bool peek(uint32_t& chunk, bool fresh) override;
  bool in_last(double share) const override { return last_of(cursor_, whole_, share); }
  // A chunk that was sent twice may have arrived, so it is not in flight.
  bool in_flight(uint32_t chunk) const override { return state_[chunk - begin_] == State::flight; }
  bool needs(uint32_t chunk) const override { return !over(chunk); }
  void acked(std::span<const uint32_t> chunks) override {
    for (const uint32_t chunk : chunks) settle(chunk, State::acked);
  }
  void forget(uint32_t chunk) override { settle(chunk, State::done); }

 protected:
  // reserved: it goes only in place of another (SparePush).
  enum class State : uint8_t { idle, flight, acked, queued, reserved, done };

  // `list` may grow, and outlives this as `grid` does. `whole`: the chunks that it has in the end.
  // `holes_first`: lost chunks go before fresh ones.
  StreamSender(const Grid& grid, const Grid::Shard& shard, const std::vector<uint32_t>& list,
               size_t whole, bool holes_first)
      : grid_(grid),
        begin_(shard.begin),
        list_(list),
        whole_(whole),
        holes_first_(holes_first),
        state_(shard.size()) {}

  // The chunks that must be acknowledged, given up or forgotten.
  virtual size_t due() const = 0;
  // The receiver needs the chunk no more, or has it.
  void settle(uint32_t chunk, State to) {
    if (over(chunk)) return;
    State& now = state(chunk);
    if (now == State::reserved) leave_reserve(chunk);
    holes_.queued -= now == State::queued;
    ++over_;
    now = to;
  }
  virtual void leave_reserve(uint32_t /*chunk*/) {}
  // The chunk goes again. `forgivable`: after those that go in any case.
  void queue(uint32_t chunk, bool forgivable);
  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  bool over(uint32_t chunk) const {
    const State now = state_[chunk - begin_];
    return now == State::acked || now == State::done;
  }
  size_t unsent() const { return list_.size() - cursor_; }

  const Grid& grid_;
  uint32_t begin_;
  const std::vector<uint32_t>& list_;
  // Holes is what is sent again.
  struct Holes {
    ChunkFifo again;
    ChunkFifo forgivable;  // sent again, or forgiven
    uint32_t queued = 0;   // of both, without those that are over meanwhile
    uint32_t next = 0;     // the chunk that goes
  };
  Holes holes_;

 private:
  bool peek_again(uint32_t& chunk);
  bool peek_fresh(uint32_t& chunk);

  size_t whole_;
  bool holes_first_;
  Zeroed<State> state_;  // by chunk of the shard
  size_t cursor_ = 0;
  size_t over_ = 0;  // chunks
};

}  // namespace gradwire
