// The life of an op: it is made, started, completed or failed, drained and freed.
#include <utility>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/plan/priority.h"

namespace gradwire {

namespace {

const std::vector<uint32_t> kNoChunks;

}  // namespace

Op* Endpoint::Impl::find(uint64_t op) {
  const auto it = ops.find(op);
  return it == ops.end() ? nullptr : it->second.get();
}

// The op's lane; an empty one where none of its ops has been made.
const Lane& Endpoint::Impl::lane(uint64_t op) const {
  static const Lane kNew;
  return lane_of(op) < lanes.size() ? lanes[lane_of(op)] : kNew;
}

Lane& Endpoint::Impl::lane(uint64_t op) {
  if (lane_of(op) >= lanes.size()) lanes.resize(lane_of(op) + size_t{1});
  return lanes[lane_of(op)];
}

// The number that the next packets of the op's lane most likely have; expands truncated ids.
uint64_t Endpoint::Impl::expected(uint64_t op) const {
  return config.endpoint < config.workers ? lane(op).next : lane(op).done_below;
}

bool Endpoint::Impl::finished(uint64_t op) const {
  return lane(op).finished(number_of(op));
}

Op& Endpoint::Impl::make_op(OpSpec spec, bool worker, Nanos now) {
  auto owned = std::make_unique<Op>();
  Op& op = *owned;
  op.reserved.emplace(memory, memory_of(spec.plan, config));
  op.id = spec.op;
  op.place = made++;
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
  op.aggregates = config.aggregates();
  if (op.aggregates) op.shard = config.shard();
  uint64_t chunks = 0;
  for (const Grid::Shard& shard : op.grid.shards) chunks = std::max<uint64_t>(chunks, shard.size());
  op.longest_message = longest_message(plan, chunks, config.servers ? plan.serialize().size() : 0);
  set_classes(op);
  op.longest.resize(config.workers);
  if (worker) {
    op.deadline = op.spec.timeout < kNever - now ? now + op.spec.timeout : kNever;
    op.push.reserve(op.grid.shards.size());
    // Extra chunks cost more than they save where several workers pull. A chunk that some workers
    // left out and others sent is pulled by all, and becomes final only when the regions of those
    // without it close.
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
    op.aggregator = std::make_unique<Aggregator>(plan, op.grid, op.own_shard(), config.workers,
                                                 self, op.spec.data, memory, op.spec.priorities);
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
  ops.emplace(op.id, std::move(owned));
  recount(op);
  return op;
}

Failure Endpoint::Impl::start(OpSpec spec, Nanos now) {
  if (failure) return failure;
  if (closing) return {"the engine is closed", -1, Cause::closed};
  if (config.endpoint >= config.workers) return {"a server starts no ops of its own"};
  const uint64_t next = std::as_const(*this).lane(spec.op).next +
                        static_cast<uint64_t>(std::ranges::count_if(
                            waiting_ops, [lane = lane_of(spec.op)](const Waiting& waiting) {
                              return lane_of(waiting.spec.op) == lane;
                            }));
  if (number_of(spec.op) != next)
    return {op_name(spec.op) + " is out of order; next is " + std::to_string(next)};
  if (std::string wrong = spec.plan.validate(); !wrong.empty())
    return {"plan: " + wrong, -1, Cause::plan};
  if (!spec.data) return {"data is null"};
  if (std::string wrong = check_messages(spec); !wrong.empty()) return {wrong};
  if (!spec.priorities.empty()) {
    const Grid grid(spec.plan, config.datagram_bytes, config.aggregators());
    if (std::string wrong = check_priorities(spec.plan, grid.chunks(), spec.priorities);
        !wrong.empty())
      return {wrong};
  }
  const uint64_t need = memory_of(spec.plan, config);
  waiting_ops.push_back({std::move(spec), need, now});
  retire(now);
  return {};
}

// Decides whether memory lets a lane's next op start; messages of that op already hold `early`
// bytes.
Endpoint::Impl::Room Endpoint::Impl::room_for(uint64_t op, uint64_t need, uint64_t early) const {
  const bool first = std::ranges::none_of(
      ops, [op](const auto& other) { return lane_of(other.first) == lane_of(op); });
  if (memory.has_op(need, first, early)) return Room::now;
  return need > memory.most_of_ops() || stuck(op) ? Room::never : Room::later;
}

// True when no op will free memory for this one. None of its own lane is under way, and those of
// other lanes may never end: some worker has not begun them, and may wait for this op first.
bool Endpoint::Impl::stuck(uint64_t op) const {
  return std::ranges::none_of(ops, [this, op](const auto& entry) {
    const Op& other = *entry.second;
    return lane_of(other.id) == lane_of(op) || (other.worker && other.done) ||
           (other.aggregator && all_opened(other));
  });
}

// Starts the own ops that wait, as far as memory allows; a lane's ops start in order.
void Endpoint::Impl::begin_waiting(Nanos now) {
  std::set<uint16_t> behind;  // lanes with an op that waits longer
  for (auto it = waiting_ops.begin(); it != waiting_ops.end();) {
    const OpSpec& spec = it->spec;
    const bool next = !behind.contains(lane_of(spec.op));
    const Room room = next ? room_for(spec.op, it->need) : Room::later;
    if (room == Room::later) {
      behind.insert(lane_of(spec.op));
      ++it;
      continue;
    }
    if (room == Room::never) {
      fail(too_large(spec.op, spec.step, it->need), now);
      return;
    }
    for (const auto& p : paths) {
      if (!p || !p->farewell.gone || p->farewell.gone_op > made) continue;
      fail(
          {name(p->peer) + " has left the job; step " + std::to_string(spec.step) + " cannot start",
           p->peer, Cause::left},
          now);
      return;
    }
    Waiting ready = std::move(*it);
    waiting_ops.erase(it);
    begin(std::move(ready.spec), ready.since, now);
    free_drained();
    behind.clear();
    it = waiting_ops.begin();
  }
}

void Endpoint::Impl::begin(OpSpec spec, Nanos since, Nanos now) {
  ++lane(spec.op).next;
  Op& op = make_op(std::move(spec), true, since);
  for (uint16_t a = 0; a < config.aggregators(); ++a) {
    const uint16_t to = config.aggregator_endpoint(a);
    if (to == config.endpoint) {
      op.push[a].finish();
      continue;
    }
    if (op.grid.shards[a].size() == 0 && a != 0 && config.servers == 0) {
      op.push[a].finish();
    }
    send_open(to, op, op.grid.shards[a]);
  }
  const uint64_t id = op.id;
  recount(op);
  if (op.aggregator) {
    op.votes[config.endpoint] = op.spec.stats;
    op.aggregator->open(config.endpoint, op.spec.critical, now);
    after_sum(op, now);
  }
  if (find(id)) replay(id, now);
  if (Op* alive = find(id)) maybe_done(*alive, now);
}

void Endpoint::Impl::fail_op(Op& op, const Failure& why) {
  if (!op.worker || op.done) return;
  abandoned = std::min(abandoned, op.place);
  op.done = true;
  op.deadline = kNever;
  report_failed(op.spec, why);
}

void Endpoint::Impl::report_failed(const OpSpec& spec, const Failure& why) {
  Event event;
  event.type = Event::Type::op_done;
  event.report.op = spec.op;
  event.report.step = spec.step;
  event.report.failure = why;
  events.push_back(std::move(event));
}

// Fails the ops that wait for memory.
void Endpoint::Impl::fail_waiting(const std::function<Failure(const OpSpec&)>& why) {
  if (!waiting_ops.empty()) abandoned = std::min(abandoned, made);
  for (const Waiting& waiting : waiting_ops) report_failed(waiting.spec, why(waiting.spec));
  waiting_ops.clear();
}

// The failure of an op that never gets its memory: it exceeds the limit alone, or beside ops of
// other lanes.
Failure Endpoint::Impl::too_large(uint64_t op, uint64_t step, uint64_t need) const {
  const bool alone = need > memory.most_of_ops();
  const uint64_t held = alone ? 0 : memory.ops + memory.waiting;
  return {"memory_limit=" + std::to_string(config.memory_limit) + " at " + name(config.endpoint) +
              ": step " + std::to_string(step) + ", " + op_name(op) + " needs at least " +
              std::to_string(Memory::least_limit(held + need)) + " bytes" +
              (alone ? "" : ", with what runs beside it") + "; raise it, or use smaller buckets" +
              (config.servers ? " or more servers" : ""),
          config.endpoint, Cause::memory};
}

// Fails, and returns false, when a peer left before this op was complete there.
bool Endpoint::Impl::still_possible(const Op& op, Nanos now) {
  for (const auto& p : paths) {
    if (!p || !p->farewell.gone || op.place < p->farewell.gone_op) continue;
    fail({name(p->peer) + " left the job in step " + std::to_string(op.spec.step) + " (" +
              op_name(op.id) + " is not complete)",
          p->peer, Cause::left},
         now);
    return false;
  }
  return true;
}

// True when no peer needs anything of this op from here any more.
bool Endpoint::Impl::drained(const Op& op) const {
  if (op.worker && !op.done) return false;
  bool others_left = true;
  for (const auto& p : paths)
    if (p && !(p->farewell.gone && p->farewell.gone_op > op.place)) others_left = false;
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
    if (path.farewell.gone && path.farewell.gone_op > op.place) continue;
    if (op.lossy_pull ? !op.back[w].settled()
                      : op.back[w].acked_count() + op.withheld_count < results)
      return false;
  }
  return true;
}

// Frees the drained ops, in any order.
void Endpoint::Impl::free_drained() {
  for (auto it = ops.begin(); it != ops.end();) {
    if (!drained(*it->second)) {
      ++it;
      continue;
    }
    drop(*it->second);
    lane(it->first).finish(number_of(it->first));
    it = ops.erase(it);
  }
}

// Frees the drained ops, and starts those that wait for memory.
void Endpoint::Impl::retire(Nanos now) {
  retire_due = false;
  free_drained();
  config.endpoint < config.workers ? begin_waiting(now) : admit(now);
}

}  // namespace gradwire
