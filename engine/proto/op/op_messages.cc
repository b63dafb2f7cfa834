#include "proto/op/op_messages.h"

#include <algorithm>

#include "proto/base/message.h"
#include "proto/plan/lanes.h"
#include "proto/pull/pull_receiver.h"

namespace gradwire {

// It travels as it stands, so it has no gaps.
static_assert(sizeof(Open) == 3 * 8 + sizeof(Stats) + 4 + 2 * 2);

std::vector<uint8_t> open_body(const OpSpec& spec, uint64_t hash, const Grid::Shard& shard,
                               std::span<const uint8_t> plan, uint16_t longest) {
  const Bitmap critical = shard.set_of(spec.critical);
  const bool any = critical.any();
  Body body;
  body.put(Open{hash, spec.step, spec.plan.elements, spec.stats, static_cast<uint32_t>(plan.size()),
                any, longest});
  body.put_bytes(plan);
  if (any) body.put_bitmap(critical);
  return body.bytes();
}

bool read_open(wire::Reader& reader, Open& open) {
  open = reader.get<Open>();
  return reader.ok() && (open.longest == 0 || open.longest >= wire::kMinDatagram);
}

bool read_spec(uint64_t id, std::span<const uint8_t> open, const EndpointConfig& config,
               OpSpec& spec) {
  wire::Reader reader(open);
  Open fixed{};
  if (!read_open(reader, fixed) || !Plan::deserialize(reader.take(fixed.plan_bytes), spec.plan) ||
      spec.plan.datagram_bytes > config.datagram_bytes ||
      (!spec.plan.shards.empty() && spec.plan.shards.size() != config.aggregators()))
    return false;
  spec.op = id;
  spec.step = fixed.step;
  return true;
}

bool read_bitmap(wire::Reader& reader, Bitmap& bitmap) {
  const auto bytes = reader.take(bitmap.byte_size());
  if (!reader.ok()) return false;
  bitmap.assign_bytes(bytes.data());
  return true;
}

std::vector<uint8_t> fold_body(const Fold& fold) {
  Body body;
  body.put(fold.stats);
  if (fold.agreed) body.put(fold.agreed);
  return body.bytes();
}

bool read_fold(wire::Reader& reader, Fold& fold) {
  fold.stats = reader.get<Stats>();
  if (!reader.ok()) return false;
  if (!reader.rest().empty()) fold.agreed = reader.get<uint16_t>();
  return reader.ok() && (!fold.agreed || fold.agreed >= wire::kMinDatagram);
}

// Chunks may be critical at some workers only; the bitmap always counts, so that all refuse alike.
uint64_t longest_message(const Plan& plan, uint64_t chunks, const EndpointConfig& config) {
  const uint64_t bitmap = (chunks + 7) / 8;
  const uint64_t plan_bytes = config.servers ? plan.serialize().size() : 0;
  const uint64_t open = sizeof(Open) + plan_bytes + bitmap;
  const uint64_t close = (plan.pull == Pull::lossy ? 3 : 2) * bitmap;
  return ends_with_close(plan) ? std::max(open, close) : open;
}

std::string check_messages(const OpSpec& spec, const EndpointConfig& config) {
  if (spec.plan.datagram_bytes > config.datagram_bytes)
    return "plan: datagram_bytes is " + std::to_string(spec.plan.datagram_bytes) + "; at most " +
           std::to_string(config.datagram_bytes) + " are agreed";
  const uint64_t chunks = Grid::count(spec.plan, config.datagram_bytes);
  const uint64_t longest = longest_message(spec.plan, chunks, config);
  if (longest <= kMaxMessage) return "";
  return op_name(spec.op) + ": " + std::to_string(chunks) +
         " chunks may have control messages of " + std::to_string(longest) + " bytes; at most " +
         std::to_string(kMaxMessage) + " are allowed: use longer datagrams or smaller buckets";
}

}  // namespace gradwire
