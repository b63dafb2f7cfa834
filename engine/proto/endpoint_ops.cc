// Ops: from start (or a worker's OPEN, at a server) to the report.
#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "proto/endpoint_impl.h"
#include "proto/priority.h"
#include "reduce/accumulate.h"

namespace gradwire {

namespace {

const std::vector<uint32_t> kNoChunks;

// One op at a time may be larger than the memory limit, but not by more than this factor.
constexpr uint64_t kLargestShare = 64;

struct OpenFixed {
  uint64_t hash;
  uint64_t step;
  uint64_t elements;
  Stats stats;
  uint32_t plan_bytes;
  uint32_t has_critical;
};

std::vector<uint8_t> open_body(const OpSpec& spec, const Grid::Shard& shard, bool with_plan) {
  Body body;
  const std::vector<uint8_t> plan = with_plan ? spec.plan.serialize() : std::vector<uint8_t>{};
  Bitmap critical(shard.size());
  bool any = false;
  for (uint32_t c : spec.critical)
    if (c >= shard.begin && c < shard.end) any |= critical.set(c - shard.begin);
  body.put(spec.plan.hash()).put(spec.step).put(spec.plan.elements);
  for (double s : spec.stats) body.put(s);
  body.put(static_cast<uint32_t>(plan.size())).put(static_cast<uint32_t>(any));
  body.put_bytes(plan);
  if (any) body.put_bitmap(critical);
  return body.bytes();
}

bool read_open(wire::Reader& reader, OpenFixed& fixed) {
  fixed.hash = reader.get<uint64_t>();
  fixed.step = reader.get<uint64_t>();
  fixed.elements = reader.get<uint64_t>();
  for (double& s : fixed.stats) s = reader.get<double>();
  fixed.plan_bytes = reader.get<uint32_t>();
  fixed.has_critical = reader.get<uint32_t>();
  return reader.ok();
}

bool ends_with_close(const Plan& plan) {
  return !plan.exact() || plan.pull != Pull::exact;
}

// The longest message of an op whose shards have this many chunks: OPEN, or CLOSE. Whether
// something is critical differs between workers, and counts for all: they refuse alike.
uint64_t longest_message(const Plan& plan, uint64_t chunks, uint64_t plan_bytes) {
  const uint64_t bitmap = (chunks + 7) / 8;
  const uint64_t open = sizeof(OpenFixed) + plan_bytes + bitmap;
  const uint64_t close = (plan.pull == Pull::lossy ? 3 : 2) * bitmap;
  return ends_with_close(plan) ? std::max(open, close) : open;
}

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t memory_of(const Plan& plan, const EndpointConfig& config) {
  const uint64_t elements = plan.elements / config.aggregators();
  const codec::Format format = plan.result_format();
  const uint64_t encoded = format.plain() ? 0 : elements * format.bytes(1000) / 1000;
  return elements * 4 * 2 + encoded;
}

}  // namespace

Op* Endpoint::Impl::find(uint64_t op) {
  const auto it = ops.find(op);
  return it == ops.end() ? nullptr : it->second.get();
}

bool Endpoint::Impl::finished(uint64_t op) const {
  return op < done_below || done_ahead.contains(op);
}

Op& Endpoint::Impl::make_op(OpSpec spec, bool worker, Nanos now) {
  auto owned = std::make_unique<Op>();
  Op& op = *owned;
  op.id = spec.op;
  op.spec = std::move(spec);
  const Plan& plan = op.spec.plan;
  op.grid = Grid(plan, config.datagram_bytes, config.aggregators());
  op.exact = plan.exact();
  op.committed = plan.pull == Pull::committed;
  op.pulls = plan.pull != Pull::none;
  op.lossy_pull = plan.pull == Pull::lossy;
  op.probes = plan.control == Control::probe;
  op.has_close = ends_with_close(plan);
  op.started = now;
  op.worker = worker;
  op.aggregates = config.servers == 0 || config.endpoint >= config.workers;
  if (op.aggregates)
    op.shard =
        static_cast<uint16_t>(config.servers ? config.endpoint - config.workers : config.endpoint);
  set_classes(op);
  if (worker) {
    op.deadline = op.spec.timeout < kNever - now ? now + op.spec.timeout : kNever;
    op.push.reserve(op.grid.shards.size());
    // With a pull by several, each chunk that some left out and others sent is pulled by all, and
    // final only when the regions of those who did not send it have closed: that costs more.
    const bool may_differ = plan.pull == Pull::none || config.workers == 1;
    for (const Grid::Shard& shard : op.grid.shards) {
      op.push.emplace_back(plan, op.grid, shard, op.spec.critical, op.spec.priorities, may_differ);
      op.pull.emplace_back(shard);
      if (op.lossy_pull) op.ledgers.emplace_back(plan, op.grid, shard);
    }
    op.early.resize(op.grid.shards.size());
    op.pull_asked.resize(op.grid.shards.size());
    op.closes.resize(op.grid.shards.size());
    op.commits.resize(op.grid.shards.size());
  }
  if (op.aggregates) {
    const int self = worker ? config.endpoint : Aggregator::kNoSelf;
    op.aggregator =
        std::make_unique<Aggregator>(plan, op.grid, op.own_shard(), config.workers, self,
                                     op.spec.data, config.memory_limit / 2, op.spec.priorities);
    op.back.reserve(config.workers);
    for (uint16_t w = 0; w < config.workers; ++w)
      op.back.emplace_back(plan, op.grid, op.own_shard(),
                           op.pulls ? op.aggregator->finished() : kNoChunks);
    op.push_asked.resize(config.workers);
    op.opens.resize(config.workers);
    op.votes.resize(config.workers);
    op.withheld = Bitmap(op.own_shard().size());
    op.withheld_elements.resize(plan.regions.size());
  }
  return *ops.emplace(op.id, std::move(owned)).first->second;
}

// "" or which message of the op would be longer than any may be.
std::string Endpoint::Impl::check_messages(const OpSpec& spec) const {
  const uint64_t plan_bytes = config.servers ? spec.plan.serialize().size() : 0;
  const uint64_t all = Grid::count(spec.plan, config.datagram_bytes);
  if (longest_message(spec.plan, all, plan_bytes) <= kMaxMessage) return "";
  const Grid grid(spec.plan, config.datagram_bytes, config.aggregators());
  for (const Grid::Shard& shard : grid.shards) {
    const uint64_t longest = longest_message(spec.plan, shard.size(), plan_bytes);
    if (longest <= kMaxMessage) continue;
    return "op " + std::to_string(spec.op) + ": a shard of " + std::to_string(shard.size()) +
           " chunks has control messages of up to " + std::to_string(longest) + " bytes; at most " +
           std::to_string(kMaxMessage) +
           " are allowed: use longer datagrams, smaller buckets or more servers";
  }
  return "";
}

std::string Endpoint::Impl::start(OpSpec spec, Nanos now) {
  if (!failure.empty()) return failure;
  if (closing) return "the engine is closed";
  if (config.endpoint >= config.workers) return "a server starts no ops of its own";
  if (spec.op != next_op)
    return "op " + std::to_string(spec.op) + " is out of order; next is " + std::to_string(next_op);
  if (std::string wrong = spec.plan.validate(); !wrong.empty()) return "plan: " + wrong;
  if (!spec.data) return "data is null";
  if (std::string wrong = check_messages(spec); !wrong.empty()) return wrong;
  if (!spec.priorities.empty()) {
    const Grid grid(spec.plan, config.datagram_bytes, config.aggregators());
    if (std::string wrong = check_priorities(spec.plan, grid.chunks(), spec.priorities);
        !wrong.empty())
      return wrong;
  }
  for (const auto& p : paths) {
    if (!p || !p->gone || p->gone_op > spec.op) continue;
    fail(name(p->peer) + " has left the job; step " + std::to_string(spec.step) + " cannot start",
         p->peer, now);
    return failure;
  }
  ++next_op;
  Op& op = make_op(std::move(spec), true, now);
  for (uint16_t a = 0; a < config.aggregators(); ++a) {
    const uint16_t to = config.aggregator_endpoint(a);
    if (to == config.endpoint) {
      op.push[a].finish();
      continue;
    }
    if (op.grid.shards[a].size() == 0 && a != 0 && config.servers == 0) {
      op.push[a].finish();
    }
    send_message(to, op, wire::Kind::open,
                 open_body(op.spec, op.grid.shards[a], config.servers != 0));
  }
  const uint64_t id = op.id;
  if (op.aggregator) {
    op.votes[config.endpoint] = op.spec.stats;
    op.aggregator->open(config.endpoint, op.spec.critical, now);
    after_sum(op, now);
  }
  if (find(id)) replay(id, now);
  if (Op* alive = find(id)) {
    maybe_done(*alive, now);
    retire(now);
  }
  return "";
}

// A worker's OPEN of an op that this server does not have yet: the plan is in it.
bool Endpoint::Impl::serve_open(Path& path, const wire::Header& header, uint64_t op_id,
                                std::span<const uint8_t> payload, Nanos now) {
  if (path.peer >= config.workers || op_id >= done_below + 1024) return false;
  auto& waiting = waiting_opens[op_id];
  MessageReceiver& message = waiting[path.peer];
  const auto result = message.part(header.chunk, payload, part_bytes());
  if (result == MessageReceiver::Result::malformed) {
    ++counters.malformed;
    return false;
  }
  if (result == MessageReceiver::Result::complete) retire(now);  // admits what fits
  return true;
}

void Endpoint::Impl::on_open(Op& op, uint16_t worker, std::span<const uint8_t> bytes, Nanos now) {
  wire::Reader reader(bytes);
  OpenFixed fixed{};
  if (!read_open(reader, fixed)) {
    ++counters.malformed;
    return;
  }
  const uint64_t here = op.spec.plan.hash();
  if (fixed.hash != here || fixed.step != op.spec.step) {
    fail("op " + std::to_string(op.id) + ": " + name(worker) + " has plan " + hex(fixed.hash) +
             " for step " + std::to_string(fixed.step) + " (" + std::to_string(fixed.elements) +
             " elements), " + name(config.endpoint) + " has plan " + hex(here) + " for step " +
             std::to_string(op.spec.step) + " (" + std::to_string(op.spec.plan.elements) +
             " elements); all ranks must use the same policy, options and model",
         worker, now);
    return;
  }
  reader.take(fixed.plan_bytes);
  std::vector<uint32_t> critical;
  if (fixed.has_critical) {
    Bitmap bits(op.own_shard().size());
    const auto raw = reader.take(bits.byte_size());
    if (!reader.ok()) {
      ++counters.malformed;
      return;
    }
    bits.assign_bytes(raw.data());
    for (uint32_t i = 0; i < op.own_shard().size(); ++i)
      if (bits.test(i)) critical.push_back(op.own_shard().begin + i);
  }
  op.votes[worker] = fixed.stats;
  op.aggregator->open(worker, critical, now);
  after_sum(op, now);
  if (op.probes) answer_push(op, worker);
}

bool Endpoint::Impl::on_message(Op& op, uint16_t source, wire::Kind kind, MessageReceiver& message,
                                const wire::Header& header, std::span<const uint8_t> payload,
                                Nanos now) {
  const auto result = message.part(header.chunk, payload, part_bytes());
  if (result == MessageReceiver::Result::malformed) return false;
  if (result == MessageReceiver::Result::incomplete) return true;
  const std::span<const uint8_t> bytes(message.bytes());
  if (kind == wire::Kind::open) {
    on_open(op, source, bytes, now);
    return true;
  }
  wire::Reader reader(bytes);
  if (kind == wire::Kind::fold) {
    for (double& s : op.stats) s = reader.get<double>();
    if (!reader.ok()) return false;
    op.folded = true;
    maybe_done(op, now);
    return true;
  }
  const uint16_t aggregator = source;
  const Grid::Shard& shard = op.grid.shards[aggregator];
  Bitmap first(shard.size());
  const auto raw = reader.take(first.byte_size());
  if (!reader.ok()) return false;
  first.assign_bytes(raw.data());
  if (kind == wire::Kind::commit) {
    op.pull[aggregator].commit(std::move(first));
  } else {
    Bitmap applied(shard.size());
    const auto more = reader.take(applied.byte_size());
    if (!reader.ok()) return false;
    applied.assign_bytes(more.data());
    if (op.lossy_pull) {
      Bitmap needed(shard.size());
      const auto last = reader.take(needed.byte_size());
      if (!reader.ok()) return false;
      needed.assign_bytes(last.data());
      op.ledgers[aggregator].close(applied, needed);
      answer_pull(op, aggregator);
    }
    op.pull[aggregator].close(std::move(first), std::move(applied));
    op.push[aggregator].finish();
  }
  maybe_done(op, now);
  return true;
}

void Endpoint::Impl::send_message(uint16_t to, Op& op, wire::Kind kind,
                                  std::span<const uint8_t> bytes) {
  const uint32_t size = part_bytes();
  const auto total = static_cast<uint32_t>(bytes.size());
  for (uint32_t part = 0; uint64_t{part} * size < total; ++part) {
    const auto body =
        bytes.subspan(size_t{part} * size, std::min<size_t>(size, total - size_t{part} * size));
    ControlFrame frame;
    frame.op = op.id;
    frame.kind = kind;
    frame.part = part;
    frame.payload.resize(kPartPrefix + body.size());
    std::memcpy(frame.payload.data(), &total, kPartPrefix);
    std::memcpy(frame.payload.data() + kPartPrefix, body.data(), body.size());
    paths[to]->control.push(std::move(frame));
    ++op.control_open;
  }
}

void Endpoint::Impl::send_list(uint16_t to, Op& op, wire::Kind kind,
                               std::span<const uint32_t> values) {
  const size_t most = (config.datagram_bytes - wire::kHeaderBytes) / 4;
  for (size_t at = 0; at < values.size(); at += most) {
    const auto some = values.subspan(at, std::min(most, values.size() - at));
    ControlFrame frame;
    frame.op = op.id;
    frame.kind = kind;
    frame.payload.resize(some.size_bytes());
    std::memcpy(frame.payload.data(), some.data(), some.size_bytes());
    paths[to]->control.push(std::move(frame));
    ++op.control_open;
  }
}

// The statistics of all workers, folded in rank order: sums, then maxima (NaN wins).
void Endpoint::Impl::fold(Op& op, Nanos now) {
  if (op.fold_sent || op.shard != 0) return;
  for (uint16_t w = 0; w < config.workers; ++w)
    if (!op.aggregator->opened(w)) return;
  op.fold_sent = true;
  Stats folded = op.votes[0];
  for (uint16_t w = 1; w < config.workers; ++w) {
    const Stats& vote = op.votes[w];
    for (size_t i = 0; i < kStatSlots / 2; ++i) folded[i] += vote[i];
    for (size_t i = kStatSlots / 2; i < kStatSlots; ++i)
      if (!(folded[i] >= vote[i]) && folded[i] == folded[i]) folded[i] = vote[i];
  }
  Body body;
  for (double s : folded) body.put(s);
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (w == config.endpoint) {
      op.stats = folded;
      op.folded = true;
      continue;
    }
    send_message(w, op, wire::Kind::fold, body.bytes());
  }
  if (op.worker) maybe_done(op, now);
}

// Packets that a peer can still want to send to here: what is undecided of its pushes, and missing
// of its results. Of ops that have not started here nobody knows.
uint64_t Endpoint::Impl::most_wanted(const Path& path) const {
  if (!path.stash.empty()) return UINT64_MAX;
  for (const auto& [id, opens] : waiting_opens)
    if (opens.contains(path.peer)) return UINT64_MAX;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) {
    if (op->aggregator && path.peer < config.workers) total += op->aggregator->undecided(path.peer);
    if (!op->worker || op->done || !op->pulls) continue;
    for (uint16_t a = 0; a < config.aggregators(); ++a)
      if (config.aggregator_endpoint(a) == path.peer) total += op->pull[a].missing();
  }
  return total;
}

// What a worker said of its backlog before it heard of a STOP is void, and would take credit from
// those who need it until its next packet, which may be an op away. A push that ends where an eager
// close does leaves none but copies.
void Endpoint::Impl::void_backlog(const Op& op, uint16_t worker) {
  Path& path = *paths[worker];
  if (path.demand == 0 || !op.aggregator->stopped(worker)) return;
  // On a short path its next word comes at once, and what it must send again is no less than this.
  if (!long_path(path.rtt.minimum()) || eager_from_start(op.spec.plan)) return;
  path.demand = static_cast<uint16_t>(std::min<uint64_t>(path.demand, most_wanted(path)));
}

// Something was added, forgiven or closed: tells whom it concerns.
void Endpoint::Impl::after_sum(Op& op, Nanos now) {
  Aggregator& sum = *op.aggregator;
  std::vector<uint32_t> stopped;  // regions of one worker
  const std::vector<Aggregator::Stop> stops = sum.take_stops();
  for (size_t i = 0; i < stops.size(); ++i) {
    const uint16_t worker = stops[i].worker;
    stopped.push_back(stops[i].region);
    if (i + 1 < stops.size() && stops[i + 1].worker == worker) continue;
    if (worker == config.endpoint) {
      // It sends nothing to itself.
    } else if (op.probes) {
      answer_push(op, worker);
    } else {
      send_list(worker, op, wire::Kind::stop, stopped);
      void_backlog(op, worker);
    }
    stopped.clear();
  }
  if (op.worker && !op.done) {
    PullReceiver& own = op.pull[op.shard];
    const auto& finished = sum.finished();
    for (; op.passed_on < finished.size(); ++op.passed_on) {
      const uint32_t chunk = finished[op.passed_on];
      apply(op, chunk, sum.result_payload(chunk), now);
      own.insert(chunk);
    }
  }
  if (!op.fold_sent) fold(op, now);
  if (!sum.all_final() || (op.lossy_pull && !all_opened(op))) return;
  if (!op.close_sent) {
    op.close_sent = true;
    if (op.has_close) {
      Bitmap applied(op.own_shard().size());
      for (uint32_t c : sum.finished()) applied.set(c - op.own_shard().begin);
      const Bitmap needed = op.lossy_pull ? needed_results(op) : Bitmap();
      for (uint16_t w = 0; w < config.workers; ++w) {
        if (w == config.endpoint) {
          op.pull[op.shard].close(sum.counted(w), applied);
          continue;
        }
        Body body;
        body.put_bitmap(sum.counted(w)).put_bitmap(applied).put_bitmap(needed);
        if (!body.bytes().empty()) send_message(w, op, wire::Kind::close, body.bytes());
      }
    }
    if (op.committed) try_commit(op, now);
    if (op.lossy_pull)
      for (PullSender& back : op.back) back.seal();
  }
  if (op.worker) maybe_done(op, now);
}

// Committed pull: gives up a result for all workers alike, while the bound has room.
bool Endpoint::Impl::withhold(Op& op, uint32_t chunk) {
  const uint32_t local = chunk - op.own_shard().begin;
  if (op.withheld.test(local)) return true;
  if (op.commit_sent) return false;
  const uint32_t region = op.grid.region[chunk];
  const Plan& plan = op.spec.plan;
  if (plan.regions[region].bound == 0.0 && !op.exact) return false;
  for (uint16_t w = 0; w < config.workers; ++w)
    if (!op.aggregator->opened(w)) return false;  // what is critical is not known yet
  if (op.aggregator->critical(chunk)) return false;
  const uint64_t elements = op.aggregator->region_elements(region);
  const uint64_t spent = op.withheld_elements[region] + op.grid.length(chunk);
  if (static_cast<double>(spent) > plan.pull_bound * static_cast<double>(elements) + 1e-9)
    return false;
  const std::vector<float> result = op.aggregator->result(chunk);
  if (!reduce::all_finite(result.data(), result.size())) return false;
  op.withheld_elements[region] = spent;
  op.withheld.set(local);
  ++op.withheld_count;
  for (PullSender& back : op.back) back.forget(chunk);
  return true;
}

void Endpoint::Impl::try_commit(Op& op, Nanos now) {
  if (op.commit_sent || !op.aggregator->all_final() || !op.close_sent) return;
  const auto results = static_cast<uint32_t>(op.aggregator->finished().size());
  for (uint16_t w = 0; w < config.workers; ++w)
    if (w != config.endpoint && op.back[w].acked_count() + op.withheld_count < results) return;
  op.commit_sent = true;
  Bitmap committed(op.own_shard().size());
  for (uint32_t c : op.aggregator->finished()) {
    const uint32_t local = c - op.own_shard().begin;
    if (!op.withheld.test(local)) committed.set(local);
  }
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (w == config.endpoint) {
      op.pull[op.shard].commit(committed);
      continue;
    }
    Body body;
    body.put_bitmap(committed);
    if (!body.bytes().empty()) send_message(w, op, wire::Kind::commit, body.bytes());
  }
  if (op.worker) maybe_done(op, now);
}

// A result lands where the worker's own values were: they are decided by now.
void Endpoint::Impl::apply(Op& op, uint32_t chunk, const uint8_t* payload, Nanos now) {
  if (op.first_result == 0) op.first_result = now;
  codec::decode(op.spec.plan.result_format(), payload, op.grid.length(chunk),
                op.spec.data + op.grid.offset[chunk]);
}

void Endpoint::Impl::maybe_done(Op& op, Nanos now) {
  if (!op.worker || op.done) return;
  if (op.push_done == 0) {
    bool settled = !op.aggregator || op.aggregator->all_final();
    for (const PushSender& push : op.push) settled = settled && push.settled();
    if (settled) op.push_done = now;
  }
  if (!op.folded) return;
  for (uint16_t a = 0; a < op.pull.size(); ++a) {
    if (op.grid.shards[a].size() == 0) continue;
    const PullReceiver& pull = op.pull[a];
    const bool here = op.pulls || (op.aggregator && a == op.shard);
    if (here && !has_enough(op, a)) return;
    if (op.has_close && !pull.closed()) return;
    if (op.committed && !pull.committed()) return;
  }
  report(op, now);
}

void Endpoint::Impl::report(Op& op, Nanos now) {
  OpReport r;
  r.op = op.id;
  r.step = op.spec.step;
  const uint32_t chunks = op.grid.chunks();
  r.counted.resize(chunks);
  r.applied.resize(chunks);
  const Plan& plan = op.spec.plan;
  std::vector<uint64_t> counted(plan.regions.size());
  for (uint16_t a = 0; a < op.pull.size(); ++a) {
    const PullReceiver& pull = op.pull[a];
    for (uint32_t c = op.grid.shards[a].begin; c < op.grid.shards[a].end; ++c) {
      r.counted[c] = pull.counted(c);
      const bool here = op.pulls || (op.aggregator && a == op.shard);
      r.applied[c] = here && pull.wanted(c) && pull.has(c);
      if (r.counted[c]) counted[op.grid.region[c]] += op.grid.length(c);
      if (here && !r.applied[c])
        std::memset(op.spec.data + op.grid.offset[c], 0, codec::f32_bytes(op.grid.length(c)));
    }
  }
  for (uint32_t i = 0; i < plan.regions.size(); ++i) {
    const Region& region = plan.regions[i];
    const double fraction = static_cast<double>(counted[i]) / static_cast<double>(region.length);
    r.delivered.push_back(fraction);
    if (1.0 - fraction > region.bound + 1e-9) r.exceeded.push_back(i);
  }
  if (op.aggregator && op.withheld_count) {
    for (uint32_t c : op.aggregator->finished()) {
      if (!op.withheld.test(c - op.own_shard().begin)) continue;
      r.withheld_chunks.push_back(c);
      const std::vector<float> values = op.aggregator->result(c);
      r.withheld_values.insert(r.withheld_values.end(), values.begin(), values.end());
    }
  }
  if (op.aggregator) {
    r.result_error = op.aggregator->take_error();
    r.error_offset = op.grid.offset[op.own_shard().begin];
  }
  r.stats = op.stats;
  r.total = now - op.started;
  r.push = op.push_done ? op.push_done - op.started : r.total;
  r.pull = op.first_result ? now - op.first_result : 0;
  r.bytes_sent = op.bytes_sent;
  r.packets_sent = op.packets_sent;
  r.retransmissions = op.retransmissions;
  for (PushSender& push : op.push)
    if (push.passes()) r.passes = std::max(r.passes, push.passes()->pass());
  Nanos rtprop = kNever;
  for (const auto& p : paths)
    if (p && p->rtt.any()) rtprop = std::min(rtprop, p->rtt.minimum());
  r.rtprop = rtprop == kNever ? 0 : rtprop;
  r.btlbw = btlbw();
  counters.rtprop = r.rtprop;
  op.done = true;
  op.deadline = kNever;
  for (PushSender& push : op.push) push.finish();
  Event event;
  event.type = Event::Type::op_done;
  event.report = std::move(r);
  events.push_back(std::move(event));
}

void Endpoint::Impl::fail_op(Op& op, const std::string& text, int32_t rank) {
  if (!op.worker || op.done) return;
  abandoned = std::min(abandoned, op.id);
  op.done = true;
  op.deadline = kNever;
  Event event;
  event.type = Event::Type::op_done;
  event.report.op = op.id;
  event.report.step = op.spec.step;
  event.report.error = text;
  event.report.error_rank = rank;
  events.push_back(std::move(event));
}

// False, and failed, when a peer left before this op was complete there.
bool Endpoint::Impl::still_possible(const Op& op, Nanos now) {
  for (const auto& p : paths) {
    if (!p || !p->gone || op.id < p->gone_op) continue;
    fail(name(p->peer) + " left the job in step " + std::to_string(op.spec.step) + " (op " +
             std::to_string(op.id) + " is not complete)",
         p->peer, now);
    return false;
  }
  return true;
}

// Nothing of this op is needed from here any more.
bool Endpoint::Impl::drained(const Op& op) const {
  if (op.worker && !op.done) return false;
  bool others_left = true;
  for (const auto& p : paths)
    if (p && !(p->gone && p->gone_op > op.id)) others_left = false;
  if (others_left) return true;
  if (op.control_open) return false;
  if (!op.aggregator) return true;
  if (!op.aggregator->all_final() || !op.close_sent) return false;
  if (op.shard == 0 && !op.fold_sent) return false;
  if (op.committed && !op.commit_sent) return false;
  if (!op.pulls) return true;
  const auto results = static_cast<uint32_t>(op.aggregator->finished().size());
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (w == config.endpoint) continue;
    const Path& path = *paths[w];
    if (path.gone && path.gone_op > op.id) continue;
    if (op.lossy_pull ? !op.back[w].settled()
                      : op.back[w].acked_count() + op.withheld_count < results)
      return false;
  }
  return true;
}

// Frees what is drained, in any order, and lets a server admit what waits: always at least one.
void Endpoint::Impl::retire(Nanos now) {
  retire_due = false;
  for (auto it = ops.begin(); it != ops.end();) {
    if (!drained(*it->second)) {
      ++it;
      continue;
    }
    done_ahead.insert(it->first);
    it = ops.erase(it);
  }
  while (!done_ahead.empty() && *done_ahead.begin() == done_below) {
    done_ahead.erase(done_ahead.begin());
    ++done_below;
  }
  if (config.endpoint < config.workers) return;
  uint64_t used = 0;
  for (const auto& [id, op] : ops) used += memory_of(op->spec.plan, config);
  // In order: the pushes of an earlier op come first, and would never be taken if a later one held
  // the memory.
  uint64_t expected = done_below;
  for (auto it = waiting_opens.begin(); it != waiting_opens.end();) {
    while (finished(expected) || ops.contains(expected)) ++expected;
    if (it->first != expected) break;
    const MessageReceiver* ready = nullptr;
    uint16_t sender = 0;
    for (const auto& [worker, message] : it->second) {
      if (!message.done()) continue;
      ready = &message;
      sender = worker;
    }
    if (!ready) break;
    const std::span<const uint8_t> bytes(ready->bytes());
    wire::Reader reader(bytes);
    OpenFixed fixed{};
    OpSpec spec;
    if (!read_open(reader, fixed) || !Plan::deserialize(reader.take(fixed.plan_bytes), spec.plan)) {
      fail(name(sender) + " sent an OPEN of op " + std::to_string(it->first) +
               " that holds no valid plan",
           sender, now);
      return;
    }
    const uint64_t more = memory_of(spec.plan, config);
    if (more / kLargestShare > config.memory_limit) {
      fail(name(sender) + " asks for " + std::to_string(more) + " bytes in op " +
               std::to_string(it->first) + "; the memory limit here is " +
               std::to_string(config.memory_limit) + ": raise it, or use more servers",
           sender, now);
      return;
    }
    if (!ops.empty() && used + more > config.memory_limit) break;
    used += more;
    spec.op = it->first;
    spec.step = fixed.step;
    auto opens = std::move(it->second);
    it = waiting_opens.erase(it);
    Op& op = make_op(std::move(spec), false, now);
    const uint64_t id = op.id;
    if (!still_possible(op, now)) return;
    for (auto& [worker, message] : opens) {
      op.opens[worker] = std::move(message);
      if (op.opens[worker].done()) on_open(op, worker, op.opens[worker].bytes(), now);
      if (!failure.empty()) return;
    }
    replay(id, now);
    if (!failure.empty()) return;
  }
}

}  // namespace gradwire
