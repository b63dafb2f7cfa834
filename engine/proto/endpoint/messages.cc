// An op's messages: OPEN, which starts it on other endpoints, those that end it, and lists. A
// server takes the plan from a worker's OPEN, and admits ops as memory allows.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {

struct OpenFixed {
  uint64_t hash;
  uint64_t step;
  uint64_t elements;
  Stats stats;
  uint32_t plan_bytes;
  uint16_t has_critical;
  uint16_t longest;  // the longest datagram of the worker's paths; 0: as agreed
};

// It travels as it stands, so it has no gaps.
static_assert(sizeof(OpenFixed) == 3 * 8 + sizeof(Stats) + 4 + 2 * 2);

std::vector<uint8_t> open_body(const Op& op, const Grid::Shard& shard,
                               std::span<const uint8_t> plan, uint16_t longest) {
  const OpSpec& spec = op.spec;
  Bitmap critical(shard.size());
  bool any = false;
  for (uint32_t c : spec.critical)
    if (c >= shard.begin && c < shard.end) any |= critical.set(c - shard.begin);
  Body body;
  body.put(OpenFixed{op.plan_hash, spec.step, spec.plan.elements, spec.stats,
                     static_cast<uint32_t>(plan.size()), any, longest});
  body.put_bytes(plan);
  if (any) body.put_bitmap(critical);
  return body.bytes();
}

bool read_open(wire::Reader& reader, OpenFixed& fixed) {
  fixed = reader.get<OpenFixed>();
  return reader.ok() && (fixed.longest == 0 || fixed.longest >= wire::kMinDatagram);
}

// Reads a bitmap of as many bits as it has; false when the message is too short.
bool read_bitmap(wire::Reader& reader, Bitmap& bitmap) {
  const auto bytes = reader.take(bitmap.byte_size());
  if (!reader.ok()) return false;
  bitmap.assign_bytes(bytes.data());
  return true;
}

bool on_fold(Op& op, wire::Reader& reader) {
  WorkerPart& part = *op.worker;
  part.stats = reader.get<Stats>();
  if (!reader.ok()) return false;
  if (!reader.rest().empty()) part.agreed = reader.get<uint16_t>();
  if (!reader.ok() || (part.agreed && part.agreed < wire::kMinDatagram)) return false;
  part.folded = true;
  return true;
}

bool on_commit(Op& op, uint16_t aggregator, wire::Reader& reader) {
  Bitmap committed(op.grid.shards[aggregator].size());
  if (!read_bitmap(reader, committed)) return false;
  op.worker->pull[aggregator].commit(std::move(committed));
  return true;
}

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

// Chunks may be critical at some workers only; the bitmap always counts, so that all refuse alike.
uint64_t longest_message(const Plan& plan, uint64_t chunks, uint64_t plan_bytes) {
  const uint64_t bitmap = (chunks + 7) / 8;
  const uint64_t open = sizeof(OpenFixed) + plan_bytes + bitmap;
  const uint64_t close = (plan.pull == Pull::lossy ? 3 : 2) * bitmap;
  return ends_with_close(plan) ? std::max(open, close) : open;
}

// An empty string, or which message of the op would exceed kMaxMessage.
std::string Endpoint::Impl::check_messages(const OpSpec& spec) const {
  const uint64_t plan_bytes = config.servers ? spec.plan.serialize().size() : 0;
  if (spec.plan.datagram_bytes > config.datagram_bytes)
    return "plan: datagram_bytes is " + std::to_string(spec.plan.datagram_bytes) + "; at most " +
           std::to_string(config.datagram_bytes) + " are agreed";
  const uint64_t all = Grid::count(spec.plan, config.datagram_bytes);
  if (longest_message(spec.plan, all, plan_bytes) <= kMaxMessage) return "";
  const Grid grid(spec.plan, config.datagram_bytes, config.aggregators());
  for (const Grid::Shard& shard : grid.shards) {
    const uint64_t longest = longest_message(spec.plan, shard.size(), plan_bytes);
    if (longest <= kMaxMessage) continue;
    return op_name(spec.op) + ": a shard of " + std::to_string(shard.size()) +
           " chunks has control messages of up to " + std::to_string(longest) + " bytes; at most " +
           std::to_string(kMaxMessage) +
           " are allowed: use longer datagrams, smaller buckets or more servers";
  }
  return "";
}

// `plan`: the serialized plan for a server, else empty.
void Endpoint::Impl::send_open(uint16_t to, Op& op, const Grid::Shard& shard,
                               std::span<const uint8_t> plan) {
  const uint32_t longest = longest_datagram();
  const auto limit = static_cast<uint16_t>(longest < config.datagram_bytes ? longest : 0);
  if (op.aggregator) op.aggregator->longest[config.endpoint] = limit;
  send_message(to, op, wire::Kind::open, open_body(op, shard, plan, limit));
}

// Takes a worker's OPEN of an op that this server does not have yet; it contains the plan.
Fate Endpoint::Impl::serve_open(Path& path, const wire::Header& header, uint64_t op_id,
                                std::span<const uint8_t> payload, Nanos now) {
  if (path.peer >= config.workers) {
    ++counters.malformed;
    return Fate::malformed;
  }
  const uint64_t cost = MessageReceiver::cost(payload.size());
  if (!memory.has_early(cost)) {
    // The OPENs of a lane's next op may take all free memory, because nothing goes on without that
    // op.
    const bool next = op_id == next_admitted(op_id);
    if (!next || memory.held() + cost > memory.limit) {
      if (next && stuck(op_id))
        fail({"memory_limit=" + std::to_string(memory.limit) + " at " + name(config.endpoint) +
                  ": it does not hold the OPENs of " + op_name(op_id) +
                  "; raise it, or use fewer regions",
              config.endpoint, Cause::memory},
             now);
      return Fate::refused;
    }
  }
  auto& messages = waiting.opens[op_id].messages;
  MessageReceiver& message = messages[path.peer];
  const size_t before = message.held();
  const auto result = message.part(header.chunk, payload, part_bytes());
  memory.early += message.held() - before;
  if (result == MessageReceiver::Result::malformed) {
    ++counters.malformed;
    if (message.held() == 0) messages.erase(path.peer);
    if (messages.empty()) waiting.opens.erase(op_id);
    return Fate::malformed;
  }
  if (result == MessageReceiver::Result::complete) retire(now);  // admits what fits
  return Fate::taken;
}

// Servers: the next op to admit in this op's lane.
uint64_t Endpoint::Impl::next_admitted(uint64_t op) const {
  uint64_t next = id_of(lane(op).done_below, lane_of(op));
  while (finished(next) || ops.contains(next)) next += kLanes;
  return next;
}

// Starts the ops whose OPENs have arrived, as far as memory allows. A lane's ops start in order:
// the pushes of an earlier op come first, and could not be taken if a later op held the memory.
void Endpoint::Impl::admit(Nanos now) {
  for (auto it = waiting.opens.begin(), next = it; it != waiting.opens.end(); it = next) {
    next = std::next(it);
    const uint64_t id = it->first;
    if (id != next_admitted(id)) continue;
    WaitingOps::Opens& opens = it->second;
    const auto ready =
        std::ranges::find_if(opens.messages, [](const auto& entry) { return entry.second.done(); });
    if (ready == opens.messages.end()) continue;
    uint64_t early = 0;
    for (const auto& [worker, message] : opens.messages) early += message.held();
    if (opens.need && room_for(id, opens.need, early) == Room::later) continue;
    OpSpec spec;
    if (!read_spec(id, ready->second.beginning(), spec)) {
      fail({name(ready->first) + " sent an OPEN of " + op_name(id) + " that holds no valid plan",
            ready->first, Cause::plan},
           now);
      return;
    }
    opens.need = memory_of(spec.plan, config);
    const Room room = room_for(id, opens.need, early);
    if (room == Room::later) continue;
    if (room == Room::never) {
      fail(too_large(id, spec.step, opens.need), now);
      return;
    }
    auto messages = std::move(opens.messages);
    waiting.opens.erase(it);
    memory.early -= early;
    start_served(std::move(spec), std::move(messages), now);
    if (failure) return;
  }
}

// Reads what an OPEN says of its op; false when it holds no valid plan.
bool Endpoint::Impl::read_spec(uint64_t id, std::span<const uint8_t> open, OpSpec& spec) const {
  wire::Reader reader(open);
  OpenFixed fixed{};
  if (!read_open(reader, fixed) || !Plan::deserialize(reader.take(fixed.plan_bytes), spec.plan) ||
      spec.plan.datagram_bytes > config.datagram_bytes ||
      (!spec.plan.shards.empty() && spec.plan.shards.size() != config.aggregators()))
    return false;
  spec.op = id;
  spec.step = fixed.step;
  return true;
}

// Starts an op at a server, with the OPENs that have arrived of it.
void Endpoint::Impl::start_served(OpSpec spec, std::map<uint16_t, MessageReceiver> opens,
                                  Nanos now) {
  Op& op = make_op(std::move(spec), false, now);
  const uint64_t id = op.id;
  if (!still_possible(op, now)) return;
  for (auto& [worker, message] : opens) {
    if (!same_plan(op, worker, message.beginning(), now)) return;
    const bool done = message.done();
    const std::vector<uint8_t> bytes = message.take();
    op.aggregator->opens[worker] = std::move(message);
    if (done && !on_open(op, worker, bytes, now)) ++counters.malformed;
    if (failure) return;
  }
  replay(id, now);
}

// Fails, and returns false, when an OPEN that begins with `bytes` has another plan. The first part
// is enough; the OPEN of another plan may be longer than what is kept here.
bool Endpoint::Impl::same_plan(const Op& op, uint16_t worker, std::span<const uint8_t> bytes,
                               Nanos now) {
  wire::Reader reader(bytes);
  OpenFixed fixed{};
  if (!read_open(reader, fixed)) return true;
  if (fixed.hash != op.plan_hash || fixed.step != op.spec.step) {
    fail({op_name(op.id) + ": " + name(worker) + " has plan " + hex(fixed.hash) + " for step " +
              std::to_string(fixed.step) + " (" + std::to_string(fixed.elements) + " elements), " +
              name(config.endpoint) + " has plan " + hex(op.plan_hash) + " for step " +
              std::to_string(op.spec.step) + " (" + std::to_string(op.spec.plan.elements) +
              " elements); all ranks must use the same policy, options and model",
          worker, Cause::plan},
         now);
    return false;
  }
  return true;
}

bool Endpoint::Impl::on_open(Op& op, uint16_t worker, std::span<const uint8_t> bytes, Nanos now) {
  wire::Reader reader(bytes);
  OpenFixed fixed{};
  if (!read_open(reader, fixed)) return false;
  reader.take(fixed.plan_bytes);
  std::vector<uint32_t> critical;
  if (fixed.has_critical) {
    Bitmap bits(op.own_shard().size());
    if (!read_bitmap(reader, bits)) return false;
    for (uint32_t i = 0; i < op.own_shard().size(); ++i)
      if (bits.test(i)) critical.push_back(op.own_shard().begin + i);
  }
  op.aggregator->votes[worker] = fixed.stats;
  op.aggregator->longest[worker] = fixed.longest;
  // A worker whose contributions have come before has begun earlier: this OPEN was lost at first.
  if (op.aggregator->sum.undecided(worker) == op.own_shard().size())
    op.waits.opened.note(worker, now - op.started);
  op.aggregator->sum.open(worker, critical, now);
  after_sum(op, now, worker);
  answer_push(op, worker);
  return true;
}

bool Endpoint::Impl::on_message(Op& op, uint16_t source, wire::Kind kind, MessageReceiver& message,
                                const wire::Header& header, std::span<const uint8_t> payload,
                                Nanos now) {
  const bool first_part = header.chunk == 0 && payload.size() >= kPartPrefix;
  if (kind == wire::Kind::open && first_part &&
      !same_plan(op, source, payload.subspan(kPartPrefix), now))
    return false;
  const auto result = message.part(header.chunk, payload, part_bytes(), op.longest_message);
  if (result != MessageReceiver::Result::complete)
    return result == MessageReceiver::Result::incomplete;
  const std::vector<uint8_t> bytes = message.take();
  if (kind == wire::Kind::open) return on_open(op, source, bytes, now);
  wire::Reader reader(bytes);
  const bool good = kind == wire::Kind::fold     ? on_fold(op, reader)
                    : kind == wire::Kind::commit ? on_commit(op, source, reader)
                                                 : on_close(op, source, reader);
  if (good) maybe_done(op, now);
  return good;
}

bool Endpoint::Impl::on_close(Op& op, uint16_t aggregator, wire::Reader& reader) {
  PullReceiver& pull = op.worker->pull[aggregator];
  const uint32_t size = op.grid.shards[aggregator].size();
  Bitmap counted(size);
  Bitmap applied(size);
  Bitmap needed(pull.ledger() ? size : 0);
  if (!read_bitmap(reader, counted) || !read_bitmap(reader, applied) ||
      !read_bitmap(reader, needed))
    return false;
  pull.close(std::move(counted), std::move(applied), needed);
  answer_pull(op, aggregator);
  op.worker->push[aggregator]->finish();
  recount(op, *paths[config.aggregator_endpoint(aggregator)]);
  return true;
}

void Endpoint::Impl::send_control(uint16_t to, Op& op, wire::Kind kind,
                                  std::vector<uint8_t> payload, uint32_t part) {
  paths[to]->control.push({op.id, kind, part, std::move(payload)});
  touch(*paths[to]);
  ++op.control_open;
}

// Sends a message in parts, each behind `prefix` and the length of the whole.
void Endpoint::Impl::send_message(uint16_t to, Op& op, wire::Kind kind,
                                  std::span<const uint8_t> bytes, std::span<const uint8_t> prefix) {
  const size_t size = part_bytes() - prefix.size();
  for (uint32_t part = 0; part * size < bytes.size(); ++part) {
    const size_t at = part * size;
    Body body;
    body.put_bytes(prefix).put(static_cast<uint32_t>(bytes.size()));
    body.put_bytes(bytes.subspan(at, std::min(size, bytes.size() - at)));
    send_control(to, op, kind, body.bytes(), part);
  }
}

void Endpoint::Impl::send_list(uint16_t to, Op& op, wire::Kind kind,
                               std::span<const uint32_t> values) {
  const size_t most = (config.datagram_bytes - wire::kHeaderBytes) / sizeof(uint32_t);
  for (; !values.empty(); values = values.subspan(std::min(most, values.size()))) {
    Body body;
    for (const uint32_t value : values.first(std::min(most, values.size()))) body.put(value);
    send_control(to, op, kind, body.bytes());
  }
}

}  // namespace gradwire
