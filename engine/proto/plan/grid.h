// Grid divides an op's elements into chunks, and the chunks among the aggregators. It is a pure
// function of plan, datagram size and number of aggregators, so all endpoints compute the same.
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
  std::vector<uint64_t> offset;  // by chunk; one entry more than chunks
  std::vector<uint32_t> region;  // by chunk
  std::vector<Shard> shards;     // by aggregator

  Grid() = default;
  Grid(const Plan& plan, uint32_t agreed, uint16_t aggregators);
  // The elements of the longest chunk. `agreed`: the datagram size of plans that name none.
  static uint32_t elements_of_chunks(const Plan& plan, uint32_t agreed);
  // The number of chunks, or of those that begin before element `until`.
  static uint64_t count(const Plan& plan, uint32_t agreed, uint64_t until = UINT64_MAX);
  // The end of an aggregator's share of the elements. Its shard ends there if the plan names the
  // shards, else at a chunk boundary nearby.
  static uint64_t share_end(const Plan& plan, uint16_t aggregators, uint16_t aggregator);

  uint32_t chunks() const { return static_cast<uint32_t>(region.size()); }
  uint32_t length(uint32_t chunk) const {
    return static_cast<uint32_t>(offset[chunk + 1] - offset[chunk]);
  }
  uint16_t aggregator_of(uint32_t chunk) const;
  // The chunks of a region inside a shard.
  Shard part(const Shard& shard, uint32_t of_region) const;
};

// The order in which every worker sends the chunks of one shard. All workers share it, so that an
// eager close leaves out the same chunks of each. Under order "priority" push_list() sorts by the
// worker's classes first.
std::vector<uint32_t> send_order(const Plan& plan, const Grid::Shard& shard);

// A region's elements inside one shard, and how many of them may stay uncounted: floor(bound ×
// elements). Chunks are lost whole, so the real loss is that number rounded down to whole chunks.
struct ShardRegion {
  uint64_t elements = 0;
  uint64_t losable = 0;
  Grid::Shard chunks;  // its part of the shard
};
std::vector<ShardRegion> shard_regions(const Plan& plan, const Grid& grid,
                                       const Grid::Shard& shard);

}  // namespace gradwire
