// Aggregator is the receiving half of a push. It sums one shard of one op as chunks arrive, keeps
// each worker's ledger of what counted and what was given up, closes regions, and lists the final
// chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/memory.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/close_rule.h"
#include "proto/push/shard_sum.h"
#include "proto/push/turns.h"

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
             int self, codec::Elements own, Memory& memory,
             std::span<const uint8_t> priorities = {});
  Aggregator(const Aggregator&) = delete;
  Aggregator& operator=(const Aggregator&) = delete;

  // Takes a worker's OPEN. `critical`: this worker's chunks of the shard that must count.
  void open(uint16_t worker, Bitmap critical, Nanos now);
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
  Nanos next_timer() const { return rule_.next_timer(); }
  // True for plans whose regions close by count and clock at all.
  bool closes_regions() const { return rule_.applies(); }

  // The chunks that are final and have a result, in the order in which they became final.
  const std::vector<uint32_t>& finished() const { return finished_; }
  bool all_final() const { return undecided_ == 0; }
  // The encoded result that every worker receives, the own one included.
  const uint8_t* result_payload(uint32_t chunk) const { return sum_.payload(chunk - shard_.begin); }
  // The own worker's results are where its values were.
  bool in_place() const { return sum_.in_place(); }
  // The own worker's memory is its caller's again. Only results that are kept may go after that.
  void keep(uint32_t chunk) { sum_.keep(chunk - shard_.begin); }
  void leave() { sum_.leave(); }
  // The result as the workers decode it.
  std::vector<float> result(uint32_t chunk) const { return sum_.result(chunk - shard_.begin); }
  // The encoding's error (ShardSum::take_error).
  Zeroed<float> take_error() { return sum_.take_error(); }
  // True when every worker must have the result: the chunk is critical for some worker, or values
  // are not finite, which a loss scaler must find on all workers.
  bool needed_by_all(uint32_t chunk) const;
  uint64_t region_elements(uint32_t region) const { return rule_.region(region).elements; }
  const Bitmap& counted(uint16_t worker) const { return worker_[worker].counted; }

  struct Stop {
    uint16_t worker;
    std::vector<uint32_t> regions;
  };
  // The regions that closed with chunks missing since the last call.
  std::vector<Stop> take_stops() { return std::exchange(stops_, {}); }
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
    uint32_t undecided = 0;  // chunks
    Bitmap counted;
    Bitmap decided;
    Bitmap critical;
    Zeroed<RegionLedger> regions;
  };

  Added take(uint16_t worker, uint32_t local, std::span<const uint8_t> payload, bool stashed);
  void add_in_order(uint16_t worker, uint32_t local, std::span<const uint8_t> payload);
  bool waits(uint16_t worker, uint32_t local, std::span<const uint8_t> payload) const;
  void add_own(uint32_t local);
  void add_payload(uint32_t local, const uint8_t* payload);
  void count(uint16_t worker, uint32_t local);
  void decide(uint16_t worker, uint32_t local);
  void finish(uint32_t local);
  void accept_own(Nanos now);
  void try_close(uint16_t worker, uint32_t region, Nanos now);
  void close_due(CloseRule::Concerns concerns, uint16_t worker, Nanos now);

  const Plan& plan_;
  const Grid& grid_;
  Grid::Shard shard_;
  uint16_t workers_;
  int self_;
  std::span<const uint8_t> own_priorities_;
  ShardSum sum_;
  std::optional<Turns> turns_;  // exact plans: contributions are added in the order of ranks
  CloseRule rule_;
  // By chunk: contributions in the sum, and workers that it is decided for.
  Zeroed<uint16_t> contributors_;
  Zeroed<uint16_t> decided_;
  Zeroed<uint8_t> own_left_;      // the own contribution begins the sum once another one arrives
  std::vector<const void*> run_;  // contributions to one chunk, whose turn has come
  std::vector<Worker> worker_;
  uint16_t opened_ = 0;  // workers
  std::vector<uint32_t> finished_;
  uint32_t undecided_;  // chunks
  std::vector<Stop> stops_;
};

}  // namespace gradwire
