// Aggregator is the receiving half of a push. It sums one shard of one op as chunks arrive, keeps
// each worker's ledger of what counted and what was given up, closes regions, and lists the final
// chunks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/memory.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"

namespace gradwire {

class Aggregator {
 public:
  enum class Added : uint8_t { counted, ignored, no_memory, malformed };
  // The value of `self` where no worker runs in this process (a server).
  static constexpr int kNoSelf = -1;

  // `self`: the worker in this process; `own`: its values, of the whole op. `priorities`: the
  // classes of its chunks when the plan's order is priority. Spans and references outlive the
  // aggregator.
  Aggregator(const Plan& plan, const Grid& grid, const Grid::Shard& shard, uint16_t workers,
             int self, const float* own, Memory& memory, std::span<const uint8_t> priorities = {});
  ~Aggregator() { memory_.waiting -= waiting_bytes_; }
  Aggregator(const Aggregator&) = delete;
  Aggregator& operator=(const Aggregator&) = delete;

  // Takes a worker's OPEN. `critical`: the ids of this worker's chunks that must count.
  void open(uint16_t worker, std::span<const uint32_t> critical, Nanos now);
  bool opened(uint16_t worker) const { return worker_[worker].opened; }
  // True when every worker's OPEN has arrived. Only then is it known which chunks are critical.
  bool all_opened() const { return opened_ == workers_; }
  // Takes one chunk of a worker. `stashed`: the packet was acknowledged and stored before the op
  // started, so it is taken even when the memory limit is reached.
  Added add(uint16_t worker, uint32_t chunk, std::span<const uint8_t> payload, bool tail, Nanos now,
            bool stashed = false);
  // Gives a chunk up for a worker. False when its ledger has no room: the worker breaks the plan.
  bool forgive(uint16_t worker, uint32_t chunk);
  // Closes the regions that the schedule lets close by now.
  void on_timer(Nanos now);
  Nanos next_timer() const { return timer_; }

  // The chunks that are final and have a result, in the order in which they became final.
  const std::vector<uint32_t>& finished() const { return finished_; }
  bool all_final() const { return undecided_ == 0; }
  // The encoded result that every worker receives, the own one included.
  const uint8_t* result_payload(uint32_t chunk) const {
    return encodes_ ? results_.data() + result_at_[chunk - shard_.begin]
                    : reinterpret_cast<const uint8_t*>(sum(chunk));
  }
  // The result as the workers decode it.
  std::vector<float> result(uint32_t chunk) const;
  // The encoding's error by element of the shard; empty when results are not encoded. Call it once,
  // after all chunks are final.
  Zeroed<float> take_error() { return encodes_ ? std::move(sum_) : Zeroed<float>{}; }
  // True when the chunk is critical for some worker, so that its result must be applied.
  bool critical(uint32_t chunk) const;
  uint64_t region_elements(uint32_t region) const { return regions_[region].elements; }
  bool counted(uint16_t worker, uint32_t chunk) const {
    return worker_[worker].counted.test(chunk - shard_.begin);
  }
  const Bitmap& counted(uint16_t worker) const { return worker_[worker].counted; }

  struct Stop {
    uint16_t worker;
    uint32_t region;
  };
  // The regions that closed with chunks missing since the last call.
  std::vector<Stop> take_stops();
  // True once a region of this worker has closed with chunks missing.
  bool stopped(uint16_t worker) const { return worker_[worker].stopped; }
  // The number of this worker's chunks that are neither counted, forgiven nor left out by a close.
  uint32_t undecided(uint16_t worker) const { return worker_[worker].undecided; }
  Bitmap missing(uint16_t worker) const;
  // The workers that still have undecided chunks.
  std::vector<uint16_t> waiting_for() const;

 private:
  struct RegionLedger {
    uint64_t counted = 0;  // elements
    uint64_t forgiven = 0;
    uint32_t critical_left = 0;
    bool closed = false;
  };
  struct Worker {
    bool opened = false;
    bool stopped = false;
    Nanos open_time = kNever;
    Nanos first_arrival = kNever;
    Nanos tail = kNever;
    uint32_t undecided = 0;  // chunks
    Bitmap counted;
    Bitmap decided;
    Bitmap critical;
    Zeroed<RegionLedger> regions;
  };
  // A contribution that arrived ahead of its turn.
  struct Waiting {
    uint32_t next;
    uint16_t rank;
    std::vector<uint8_t> bytes;
  };
  // No entry of waiting_.
  static constexpr uint32_t kNone = 0;

  Added take(uint16_t worker, uint32_t local, std::span<const uint8_t> payload, bool stashed);
  void add_in_order(uint16_t worker, uint32_t local, std::span<const uint8_t> payload);
  void add_on_arrival(uint32_t local, const uint8_t* payload);
  void count(uint16_t worker, uint32_t local);
  void decide(uint16_t worker, uint32_t local);
  void finish(uint32_t local);
  void accept_own(Nanos now);
  double fraction(const Worker& worker, Nanos now, Nanos& next) const;
  void try_close(uint16_t worker, uint32_t region, Nanos now);
  void try_close(uint16_t worker, Nanos now);
  void close_all(Nanos now);
  void started(Clock clock, uint16_t worker, Nanos now);
  Nanos clock_time(Clock clock, const Worker& worker) const;
  uint64_t need(uint32_t region, double fraction) const;
  // The own worker's chunk as others would receive it; valid until the next call.
  const float* own(uint32_t chunk);
  void start_with_own(uint32_t chunk);
  void start_sum(uint32_t chunk, const uint8_t* payload);
  void encode_result(uint32_t chunk);
  const float* sum(uint32_t chunk) const {
    return sum_.data() + (grid_.offset[chunk] - grid_.offset[shard_.begin]);
  }
  float* sum(uint32_t chunk) {
    return sum_.data() + (grid_.offset[chunk] - grid_.offset[shard_.begin]);
  }

  const Plan& plan_;
  const Grid& grid_;
  Grid::Shard shard_;
  uint16_t workers_;
  int self_;
  const float* own_;
  std::span<const uint8_t> own_priorities_;
  Memory& memory_;
  bool exact_;
  bool scheduled_;  // regions close by count and clock
  bool encodes_;    // results are encoded
  // By element of the shard: the sum; after a result was encoded, the encoding's error.
  Zeroed<float> sum_;
  Zeroed<uint8_t> results_;          // encoded results
  std::vector<uint64_t> result_at_;  // by chunk: its place in results_
  std::vector<float> decoded_;       // scratch: one chunk
  std::vector<float> own_values_;    // scratch: one chunk
  std::vector<uint8_t> payload_;     // scratch: one chunk
  Zeroed<uint16_t> contributors_;
  Zeroed<uint16_t> decided_;
  Zeroed<uint16_t> turn_;     // exact plans: the rank whose contribution is next
  Zeroed<uint8_t> own_left_;  // lossy plans: the own contribution is not yet in the sum
  Zeroed<uint32_t> waiting_head_;
  std::vector<Waiting> waiting_;  // entry 0 stands for none
  uint32_t waiting_free_ = kNone;
  uint64_t waiting_bytes_ = 0;  // this op's part of memory_.waiting
  std::vector<ShardRegion> regions_;
  std::vector<uint64_t> least_need_;  // by region: elements below which no schedule step closes it
  std::vector<Grid::Shard> region_chunks_;  // by region: its chunk ids inside the shard
  std::vector<Worker> worker_;
  uint16_t opened_ = 0;  // workers
  std::vector<uint32_t> finished_;
  uint32_t undecided_ = 0;
  std::vector<Stop> stops_;
  Nanos timer_ = kNever;
};

}  // namespace gradwire
