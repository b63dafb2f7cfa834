// What travels in several packets: plans, messages in parts, datagrams in fragments.
#include <map>
#include <vector>

#include "fuzz/input.h"
#include "proto/base/message.h"
#include "proto/base/reassembly.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "wire/packet.h"

namespace gradwire::fuzz {
namespace {

// Bytes are no plan, or a plan that is valid and gives the same bytes again.
void check_plan(std::span<const uint8_t> bytes) {
  Plan plan;
  if (!Plan::deserialize(bytes, plan)) return;
  expect(plan.validate().empty(), "a plan that was taken is valid");
  Plan again;
  expect(Plan::deserialize(plan.serialize(), again), "a plan reads as it was written");
  expect(plan.hash() == again.hash(), "a plan keeps its hash");
  if (plan.elements > 1u << 20 || plan.regions.size() > 64) return;
  const uint16_t aggregators =
      plan.shards.empty() ? 3 : static_cast<uint16_t>(std::min<size_t>(plan.shards.size(), 64));
  if (!plan.shards.empty() && plan.shards.size() != aggregators) return;
  const Grid grid(plan, wire::kMinDatagram, aggregators);
  expect(grid.offset.front() == 0 && grid.offset.back() == plan.elements, "chunks cover a plan");
  for (uint32_t chunk = 0; chunk < grid.chunks(); ++chunk)
    expect(grid.offset[chunk] < grid.offset[chunk + 1], "a chunk has elements");
  uint32_t at = 0;
  for (const Grid::Shard& shard : grid.shards) {
    expect(shard.begin == at && shard.end >= at, "shards follow each other");
    at = shard.end;
    std::vector<bool> seen(shard.size());
    for (const uint32_t chunk : send_order(plan, shard)) {
      expect(chunk >= shard.begin && chunk < shard.end && !seen[chunk - shard.begin],
             "an order names each chunk of its shard once");
      seen[chunk - shard.begin] = true;
    }
  }
  expect(at == grid.chunks(), "shards cover the chunks");
}

// Parts in any order, of any length. A message is whole only with all its bytes.
void check_message(Input& input) {
  const uint32_t part_bytes = input.below(64) + 1;
  const uint32_t total = input.below(1024) + 1;
  std::vector<uint8_t> whole(total);
  for (uint32_t i = 0; i < total; ++i) whole[i] = static_cast<uint8_t>(i * 7);
  MessageReceiver receiver;
  bool genuine = true;
  while (!input.done() && !receiver.done()) {
    auto index = input.number<uint32_t>(input.below(total / part_bytes + 1));
    const uint64_t at = uint64_t{index} * part_bytes;
    std::vector<uint8_t> payload(kPartPrefix);
    const auto claimed = input.number<uint32_t>(total);
    std::memcpy(payload.data(), &claimed, sizeof claimed);
    if (at < total)
      payload.insert(
          payload.end(), whole.begin() + static_cast<ptrdiff_t>(at),
          whole.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(at + part_bytes, total)));
    if (input.below(8) == 0) payload.resize(input.below(80));
    const auto took = receiver.part(index, payload, part_bytes, 4096);
    uint32_t said = 0;
    if (payload.size() >= sizeof said) std::memcpy(&said, payload.data(), sizeof said);
    if (took != MessageReceiver::Result::malformed && said != total) genuine = false;
    expect(receiver.held() <= MessageReceiver::cost(4096) + 128 * 4096, "a message has a limit");
  }
  if (!receiver.done()) return;
  const std::vector<uint8_t> got = receiver.take();
  if (genuine) expect(got == whole, "a message is whole");
}

// Fragments in any order: a datagram comes whole or not at all.
void check_fragments(Input& input) {
  Reassembly reassembly;
  std::map<uint32_t, std::vector<uint8_t>> wholes;
  while (!input.done()) {
    const uint32_t number = input.below(80);
    std::vector<uint8_t>& whole = wholes[number];
    if (whole.empty())
      for (uint32_t i = 0, total = 2 + number * 7; i < total; ++i)
        whole.push_back(static_cast<uint8_t>(i * 5 + number));
    const auto total = static_cast<uint32_t>(whole.size());
    const auto count = static_cast<uint8_t>(1 + input.below(std::min(total, 255U)));
    const wire::Fragment fragment{number, static_cast<uint16_t>(total),
                                  static_cast<uint8_t>(input.below(count)), count};
    if (input.below(8) == 0) {  // of other lengths, or beyond its end
      const std::vector<uint8_t> part = input.take(input.below(64));
      reassembly.add({number + 1000, static_cast<uint16_t>(input.number(total)),
                      static_cast<uint8_t>(input.below(256)), count},
                     part, 600);
      continue;
    }
    if (fragment.offset() >= total) continue;
    const uint32_t bytes = std::min(fragment.each(), total - fragment.offset());
    const auto got =
        reassembly.add(fragment, std::span(whole).subspan(fragment.offset(), bytes), 600);
    if (!got.empty())
      expect(std::equal(got.begin(), got.end(), whole.begin(), whole.end()),
             "a datagram of fragments is whole");
  }
}

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gradwire::fuzz;
  Input input(data, size);
  switch (input.below(3)) {
    case 0:
      check_plan(input.rest());
      break;
    case 1:
      check_message(input);
      break;
    default:
      check_fragments(input);
  }
  return 0;
}
