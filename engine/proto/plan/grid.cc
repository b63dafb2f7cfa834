#include "proto/plan/grid.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "wire/packet.h"

namespace gradwire {

namespace {

// Calls visit(region, offset, length) for each part of a region that chunks are cut of: all of it,
// or what of it one named shard holds.
template <class Visit>
void for_each_part(const Plan& plan, const Visit& visit) {
  size_t shard = 0;
  uint64_t end = plan.shards.empty() ? plan.elements : plan.shards[0];
  for (uint32_t r = 0; r < plan.regions.size(); ++r) {
    uint64_t at = plan.regions[r].offset;
    for (uint64_t left = plan.regions[r].length; left > 0;) {
      while (end <= at) end += plan.shards[++shard];
      const uint64_t length = std::min(left, end - at);
      visit(r, at, length);
      at += length;
      left -= length;
    }
  }
}

}  // namespace

uint64_t Grid::share_end(const Plan& plan, uint16_t aggregators, uint16_t aggregator) {
  const uint64_t count = aggregator + uint64_t{1};
  if (!plan.shards.empty())
    return std::accumulate(plan.shards.begin(), plan.shards.begin() + static_cast<ptrdiff_t>(count),
                           uint64_t{0});
  return plan.elements / aggregators * count + plan.elements % aggregators * count / aggregators;
}

uint32_t Grid::elements_of_chunks(const Plan& plan, uint32_t agreed) {
  const uint32_t bytes = plan.datagram_bytes ? plan.datagram_bytes : agreed;
  return plan.format.chunk_elements(bytes - wire::kHeaderBytes);
}

Grid::Grid(const Plan& plan, uint32_t agreed, uint16_t aggregators, uint16_t engine,
           uint16_t engines) {
  chunk_elements = elements_of_chunks(plan, agreed);
  const uint64_t count = Grid::count(plan, agreed);
  offset.reserve(count + 1);
  region.reserve(count);
  for_each_part(plan, [this](uint32_t r, uint64_t begin, uint64_t length) {
    for (uint64_t at = 0; at < length; at += chunk_elements) {
      offset.push_back(begin + at);
      region.push_back(r);
    }
  });
  offset.push_back(plan.elements);
  // Shards are cut by elements: regions of many short chunks then load no aggregator more than
  // others.
  shards.resize(aggregators);
  uint32_t chunk = 0;
  for (uint16_t a = 0; a < aggregators; ++a) {
    const uint64_t until = share_end(plan, aggregators, a);
    shards[a].begin = chunk;
    while (chunk < chunks() && offset[chunk] + length(chunk) / 2 < until) ++chunk;
    if (a + 1 == aggregators) chunk = chunks();
    shards[a].end = chunk;
  }
  if (engines == 1) return;
  for (Shard& shard : shards) shard = shard.part_of(engine, engines);
}

uint64_t Grid::count(const Plan& plan, uint32_t agreed, uint64_t until) {
  const uint64_t each = elements_of_chunks(plan, agreed);
  uint64_t chunks = 0;
  for_each_part(plan, [&](uint32_t, uint64_t begin, uint64_t length) {
    if (begin < until) chunks += (std::min(length, until - begin) + each - 1) / each;
  });
  return chunks;
}

namespace {

// splitmix64 shuffles by a seed that all workers share, so that all have the same order.
uint64_t mix(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<uint32_t> send_order(const Plan& plan, const Grid::Shard& shard) {
  std::vector<uint32_t> order(shard.size());
  std::iota(order.begin(), order.end(), shard.begin);
  if (plan.order != Order::sequential) {
    uint64_t state = plan.seed ^ (uint64_t{shard.begin} << 32);
    for (size_t i = order.size(); i > 1; --i) {
      // Multiply-shift is unbiased enough for sizes far below 2^32.
      const auto j = static_cast<size_t>(((mix(state) >> 32) * i) >> 32);
      std::swap(order[i - 1], order[j]);
    }
  }
  return order;
}

Grid::Shard Grid::part(const Shard& shard, uint32_t of_region) const {
  const auto [first, last] =
      std::equal_range(region.begin() + shard.begin, region.begin() + shard.end, of_region);
  return {static_cast<uint32_t>(first - region.begin()),
          static_cast<uint32_t>(last - region.begin())};
}

std::vector<ShardRegion> shard_regions(const Plan& plan, const Grid& grid,
                                       const Grid::Shard& shard) {
  std::vector<ShardRegion> out(plan.regions.size());
  for (uint32_t c = shard.begin; c < shard.end; ++c) {
    ShardRegion& r = out[grid.region[c]];
    r.elements += grid.length(c);
    if (r.chunks.size() == 0) r.chunks.begin = c;
    r.chunks.end = c + 1;
  }
  for (size_t r = 0; r < out.size(); ++r) {
    if (plan.spend == Spend::nothing) continue;
    // The small excess keeps rounding from turning 0.3 × 10 elements into 2.
    out[r].losable = static_cast<uint64_t>(
        std::floor(plan.regions[r].bound * static_cast<double>(out[r].elements) + 1e-9));
  }
  return out;
}

}  // namespace gradwire
