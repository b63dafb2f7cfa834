// ShardSum is the arithmetic of one shard: it adds contributions to a chunk's sum, scales it, and
// encodes it as the result that every worker receives.
//
// Exact sums that nothing encodes are written where the own values were, and leave from there until
// the caller takes its memory back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "codec/elements.h"
#include "proto/base/memory.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"

namespace gradwire {

class ShardSum {
 public:
  // `own`: the values of the worker in this process, of the whole op; none at a server. `memory`
  // outlives this.
  ShardSum(const Plan& plan, const Grid& grid, const Grid::Shard& shard, codec::Elements own,
           Memory& memory);
  ~ShardSum() { memory_.keep(std::move(sum_), std::move(results_)); }
  ShardSum(const ShardSum&) = delete;
  ShardSum& operator=(const ShardSum&) = delete;

  // ---- contributions; chunks are counted from the shard's first
  // The first contribution.
  void start(uint32_t local, const uint8_t* payload);
  void add(uint32_t local, const uint8_t* payload);
  // Adds a payload to the own values, in one pass if they are plain, as the first two
  // contributions.
  void start_pair(uint32_t local, const uint8_t* payload);
  // The own worker's chunk as others would receive it; valid until the next call.
  const uint8_t* own(uint32_t local);

  // Adds contributions in their order, in one pass. `begun`: to the sum of those before. `factor`:
  // of the sum, where these are the last. Payloads are plain.
  void add_run(uint32_t local, bool begun, std::span<const void* const> parts,
               std::optional<double> factor);

  // ---- the result
  // Results are where the own values were.
  bool in_place() const { return in_place_; }
  // The caller takes its memory back. Results that may be asked for after that are kept before.
  void keep(uint32_t local);
  void leave() { in_place_ = false; }
  // Multiplies the sum by `factor` and encodes it, once: all replicas apply the same bytes.
  void finish(uint32_t local, double factor);
  const uint8_t* payload(uint32_t local) const {
    return encodes_    ? results_.data() + result_at_[local]
           : in_place_ ? own_memory(local)
                       : reinterpret_cast<const uint8_t*>(sum(local));
  }
  std::vector<float> result(uint32_t local) const;
  // The encoding's error by element of the shard; empty when results are not encoded, or are of the
  // own values' type, which keeps no more. Call it once, after all chunks are final.
  Zeroed<float> take_error() { return keeps_error() ? std::move(sum_) : Zeroed<float>{}; }

 private:
  uint32_t length(uint32_t local) const { return grid_.length(begin_ + local); }
  size_t place(uint32_t local) const { return grid_.offset[begin_ + local] - grid_.offset[begin_]; }
  const float* sum(uint32_t local) const { return sum_.data() + place(local); }
  float* sum(uint32_t local) { return sum_.data() + place(local); }
  uint8_t* own_memory(uint32_t local) const { return own_.at(grid_.offset[begin_ + local]); }
  bool keeps_error() const { return encodes_ && !own_.narrow; }
  void encode(uint32_t local);
  void need_sums();

  const Plan& plan_;
  const Grid& grid_;
  uint32_t begin_;
  codec::Elements own_;
  Memory& memory_;
  size_t elements_;  // of the shard
  bool encodes_;     // results are encoded
  bool in_place_;    // results are in the own values' memory
  // By element of the shard: the sum, or the results that are kept; after a result was encoded, the
  // encoding's error. It is empty at first where results are in place.
  Zeroed<float> sum_;
  Zeroed<uint8_t> results_;          // encoded results
  std::vector<uint64_t> result_at_;  // by chunk: its place in results_
  std::vector<float> decoded_;       // scratch: one chunk
  std::vector<uint8_t> payload_;     // scratch: one own chunk
  std::vector<const void*> parts_;   // scratch: contributions of one chunk
};

}  // namespace gradwire
