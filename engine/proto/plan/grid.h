// Grid divides an op's elements into chunks, and the chunks among the aggregators. It is a pure
// function of plan, datagram size and number of aggregators, so all endpoints compute the same.
//
// Where several engines of a process share its ops, each has the grid of the whole op, and of each
// shard the part that is its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/plan/plan.h"

namespace gradwire {

struct Grid {
  struct Shard {
    uint32_t begin = 0;  // chunk ids [begin, end)
    uint32_t end = 0;
    uint32_t size() const { return end - begin; }
    bool contains(uint32_t chunk) const { return chunk >= begin && chunk < end; }
    // Those of these chunks that are in the shard, counted from its first.
    Bitmap set_of(std::span<const uint32_t> chunks) const {
      Bitmap set(size());
      for (const uint32_t c : chunks)
        if (contains(c)) set.set(c - begin);
      return set;
    }
    // The part of one of several engines: parts are alike within a chunk, and cover it in order.
    Shard part_of(uint16_t engine, uint16_t engines) const {
      const auto cut = [&](uint32_t n) {
        return begin + static_cast<uint32_t>(uint64_t{size()} * n / engines);
      };
      return {cut(engine), cut(engine + 1u)};
    }
  };

  uint32_t chunk_elements = 0;
  std::vector<uint64_t> offset;  // by chunk; one entry more than chunks
  std::vector<uint32_t> region;  // by chunk
  std::vector<Shard> shards;     // by aggregator: what of its shard is this engine's

  Grid() = default;
  Grid(const Plan& plan, uint32_t agreed, uint16_t aggregators, uint16_t engine = 0,
       uint16_t engines = 1);
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
