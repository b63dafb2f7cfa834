// The chunk grid: which elements travel in which datagram, and who aggregates them. A pure function
// of plan, datagram size and number of aggregators, hence alike on all endpoints.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/plan/plan.h"

namespace gradwire {

struct Grid {
  struct Shard {
    uint32_t begin = 0;  // chunk ids [begin, end)
    uint32_t end = 0;
    uint32_t size() const { return end - begin; }
  };

  uint32_t chunk_elements = 0;
  std::vector<uint64_t> offset;  // per chunk; one more entry than chunks
  std::vector<uint32_t> region;  // per chunk
  std::vector<Shard> shards;     // per aggregator

  Grid() = default;
  Grid(const Plan& plan, uint32_t agreed, uint16_t aggregators);
  // Elements of the longest chunk. `agreed`: the datagram size of plans that name none.
  static uint32_t elements_of_chunks(const Plan& plan, uint32_t agreed);
  // How many chunks it would have, or how many begin before element `until`.
  static uint64_t count(const Plan& plan, uint32_t agreed, uint64_t until = UINT64_MAX);
  // Where an aggregator's share of the elements ends; its shard ends with a chunk nearby.
  static uint64_t share_end(uint64_t elements, uint16_t aggregators, uint16_t aggregator) {
    return elements / aggregators * (aggregator + 1) +
           elements % aggregators * (aggregator + 1) / aggregators;
  }

  uint32_t chunks() const { return static_cast<uint32_t>(region.size()); }
  uint32_t length(uint32_t chunk) const {
    return static_cast<uint32_t>(offset[chunk + 1] - offset[chunk]);
  }
  uint16_t aggregator_of(uint32_t chunk) const;
};

// The order in which every worker sends the chunks of one shard: shared by all workers, so that
// what an eager close leaves out is the same for everybody. (Under order "priority" a worker's
// classes come before it: push_list.)
std::vector<uint32_t> send_order(const Plan& plan, const Grid::Shard& shard);

// Elements of each region inside a shard, and how many of them may go uncounted: floor(bound ×
// elements). Chunks are given up whole, so what really can be lost is this rounded down to chunks.
struct ShardRegion {
  uint64_t elements = 0;
  uint64_t losable = 0;
  uint32_t chunks = 0;
};
std::vector<ShardRegion> shard_regions(const Plan& plan, const Grid& grid,
                                       const Grid::Shard& shard);

}  // namespace gradwire
