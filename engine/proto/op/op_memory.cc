#include "proto/op/op_memory.h"

#include <algorithm>

#include "proto/base/config.h"
#include "proto/op/op_messages.h"
#include "proto/plan/grid.h"

namespace gradwire {

namespace {

// The bytes of the encoded chunks of elements [begin, end), with one more chunk at each end.
uint64_t encoded_bytes(const Plan& plan, const codec::Format& format, uint64_t each, uint64_t begin,
                       uint64_t end) {
  const auto bytes = [&format](uint64_t elements) {
    return elements ? format.bytes(static_cast<uint32_t>(elements)) : 0;
  };
  uint64_t total = 2 * bytes(each);
  for (const Region& region : plan.regions) {
    const uint64_t first = std::max(region.offset, begin);
    const uint64_t last = std::min(region.offset + region.length, end);
    if (first >= last) continue;
    total += (last - first) / each * bytes(each) + bytes((last - first) % each);
  }
  return total;
}

}  // namespace

uint64_t memory_of(const Plan& plan, const EndpointConfig& config) {
  if (!config.aggregates()) return 0;
  const uint16_t aggregators = config.aggregators();
  const uint16_t shard = config.shard();
  const uint64_t workers = config.workers;
  const uint64_t regions = plan.regions.size();
  const codec::Format format = plan.result_format();
  const uint64_t each = Grid::elements_of_chunks(plan, config.datagram_bytes);
  const uint64_t begin = shard == 0 ? 0 : Grid::share_end(plan, aggregators, shard - 1);
  const uint64_t end = Grid::share_end(plan, aggregators, shard);
  const uint64_t all = Grid::count(plan, config.datagram_bytes);
  // The chunk at the boundary of two shares may belong to either shard. Engines divide a shard by
  // chunks, so a part has no more elements than its chunks can hold.
  const uint64_t in_shard = Grid::count(plan, config.datagram_bytes, end) -
                            Grid::count(plan, config.datagram_bytes, begin);
  const uint64_t chunks = std::min(all, (in_shard + config.engines) / config.engines);
  const uint64_t elements = std::min({plan.elements, end - begin + each, chunks * each});
  // Bytes by chunk: the arrays of Aggregator and Op.
  uint64_t of_chunk = 10;
  // Bytes by worker and chunk: bitmaps, and PullSender's states and lost chunks.
  uint64_t of_worker_and_chunk = 1 + 1 + 4;
  uint64_t scratch = 0;
  if (plan.exact()) of_chunk += 6;
  if (!plan.format.plain())
    scratch = codec::f32_bytes(each) + plan.format.bytes(static_cast<uint32_t>(each));
  uint64_t results = 0;
  if (!format.plain()) {
    of_chunk += 8;
    const uint64_t longest = format.bytes(static_cast<uint32_t>(each));
    results = std::min(encoded_bytes(plan, format, each, begin, end), (chunks + 2) * longest);
  }
  if (plan.pull == Pull::lossy && plan.control == Control::probe) of_worker_and_chunk += 5;
  const uint64_t of_worker = 1024 + longest_message(plan, chunks, config) + 25 * regions;
  return 4096 + codec::f32_bytes(elements) + results + scratch + 12 * all +
         8 * uint64_t{aggregators} + 72 * regions +
         chunks * (of_chunk + workers * of_worker_and_chunk) + workers * of_worker;
}

}  // namespace gradwire
