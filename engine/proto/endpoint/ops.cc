// The life of an op: it is made, started, completed or failed, drained and freed.
#include <algorithm>
#include <utility>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/plan/priority.h"
#include "proto/pull/pull_sender.h"
#include "proto/push/push_sender.h"

namespace gradwire {

namespace {
const Lane kNewLane;

// The classes of an op's results at first. A result has the first class that any worker gave its
// chunk, as far as pushes have arrived.
std::vector<uint8_t> result_classes(const Op& op) {
  if (op.spec.plan.class_dscp.empty()) return {};
  const std::vector<uint8_t>& own = op.spec.priorities;
  const Grid::Shard& shard = op.own_shard();
  if (own.empty())
    return std::vector<uint8_t>(shard.size(),
                                op.worker ? uint8_t{0} : uint8_t{kPriorityClasses - 1});
  return {own.begin() + shard.begin, own.begin() + shard.end};
}

}  // namespace

Op* Endpoint::Impl::look_up(uint64_t op) {
  const auto it = ops.find(op);
  if (it == ops.end()) return nullptr;
  last_found = it->second.get();
  return last_found;
}

// The id of an op of which the low bits have arrived.
uint64_t Endpoint::Impl::full_id(uint32_t low) const {
  if (last_found && static_cast<uint32_t>(last_found->id) == low) return last_found->id;
  return wire::expand(low, id_of(expected(low), lane_of(low)));
}

// The op's lane; an empty one where none of its ops has been made.
const Lane& Endpoint::Impl::lane(uint64_t op) const {
  return lane_of(op) < lanes.size() ? lanes[lane_of(op)] : kNewLane;
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
  auto owned = std::make_unique<Op>(std::move(spec), config, memory, now);
  Op& op = *owned;
  uint64_t chunks = 0;
  for (const Grid::Shard& shard : op.grid.shards) chunks = std::max<uint64_t>(chunks, shard.size());
  const Plan& plan = op.spec.plan;
  op.longest_message = longest_message(plan, chunks, config.servers ? plan.serialize().size() : 0);
  set_classes(op);
  if (worker) make_worker_part(op, now);
  if (config.aggregates()) make_aggregator_part(op);
  ops.emplace(op.id, std::move(owned));
  op_agenda.in_passes += plan.control == Control::probe;
  recount(op);
  op_changed(op);
  return op;
}

void Endpoint::Impl::make_worker_part(Op& op, Nanos now) {
  const Plan& plan = op.spec.plan;
  op.worker = std::make_unique<WorkerPart>();
  op.deadline = op.spec.timeout < kNever - now ? now + op.spec.timeout : kNever;
  // Extra chunks cost more than they save where several workers pull. A chunk that some workers
  // left out and others sent is pulled by all, and becomes final only when the regions of those
  // without it close.
  const bool may_differ = plan.pull == Pull::none || config.workers == 1;
  const size_t shards = op.grid.shards.size();
  op.worker->push.reserve(shards);
  for (const Grid::Shard& shard : op.grid.shards) {
    const bool own = op.worker->push.size() == config.aggregator_at(config.endpoint);
    op.worker->push.push_back(
        make_push_sender(plan, op.grid, shard, op.spec.critical, op.spec.priorities, may_differ));
    op.worker->pull.emplace_back(plan, op.grid, shard, own);
  }
  op.worker->early.resize(shards);
  op.worker->closes.resize(shards);
  op.worker->commits.resize(shards);
}

void Endpoint::Impl::make_aggregator_part(Op& op) {
  const Plan& plan = op.spec.plan;
  const int self = op.worker ? config.endpoint : Aggregator::kNoSelf;
  op.aggregator = std::make_unique<AggregatorPart>(plan, op.grid, config.shard(), config.workers,
                                                   self, op.spec.data, memory, op.spec.priorities);
  AggregatorPart& part = *op.aggregator;
  part.back.reserve(config.workers);
  for (uint16_t w = 0; w < config.workers; ++w)
    part.back.push_back(make_pull_sender(plan, op.grid, op.own_shard(), part.sum.finished()));
  if (op.commits()) part.committed.emplace(plan, op.grid, op.own_shard(), part.sum);
  part.result_class = result_classes(op);
}

Failure Endpoint::Impl::start(OpSpec spec, Nanos now) {
  if (failure) return failure;
  if (leaving.begun) return {"the engine is closed", -1, Cause::closed};
  if (config.endpoint >= config.workers) return {"a server starts no ops of its own"};
  const uint64_t next = std::as_const(*this).lane(spec.op).next +
                        static_cast<uint64_t>(std::ranges::count_if(
                            waiting.ops, [lane = lane_of(spec.op)](const WaitingOps::Own& own) {
                              return lane_of(own.spec.op) == lane;
                            }));
  if (number_of(spec.op) != next)
    return {op_name(spec.op) + " is out of order; next is " + std::to_string(next)};
  if (std::string wrong = spec.plan.validate(); !wrong.empty())
    return {"plan: " + wrong, -1, Cause::plan};
  if (const size_t shards = spec.plan.shards.size(); shards && shards != config.aggregators())
    return {"plan: shards has " + std::to_string(shards) + " entries; one for each of " +
                std::to_string(config.aggregators()) + " aggregators is needed",
            -1, Cause::plan};
  if (!spec.data.bytes) return {"data is null"};
  if (std::string wrong = check_messages(spec); !wrong.empty()) return {wrong};
  const uint64_t chunks = Grid::count(spec.plan, config.datagram_bytes);
  if (std::string wrong = check_priorities(spec.plan, chunks, spec.priorities); !wrong.empty())
    return {wrong};
  const uint64_t need = memory_of(spec.plan, config);
  waiting.ops.push_back({std::move(spec), need, now});
  retire(now);
  return {};
}

// Decides whether memory lets a lane's next op start; messages of that op already hold `early`
// bytes.
Room Endpoint::Impl::room_for(uint64_t op, uint64_t need, uint64_t early) const {
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
    return lane_of(other.id) == lane_of(op) || (other.done()) ||
           (other.aggregator && other.aggregator->sum.all_opened());
  });
}

// Starts the own ops that wait, as far as memory allows; a lane's ops start in order.
void Endpoint::Impl::begin_waiting(Nanos now) {
  std::set<uint16_t> behind;  // lanes with an op that waits longer
  for (auto it = waiting.ops.begin(); it != waiting.ops.end();) {
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
      if (!p || !p->farewell.gone || p->farewell.complete(spec.op)) continue;
      fail(
          {name(p->peer) + " has left the job; step " + std::to_string(spec.step) + " cannot start",
           p->peer, Cause::left},
          now);
      return;
    }
    WaitingOps::Own ready = std::move(*it);
    waiting.ops.erase(it);
    begin(std::move(ready.spec), ready.since, now);
    free_drained();
    behind.clear();
    it = waiting.ops.begin();
  }
}

void Endpoint::Impl::begin(OpSpec spec, Nanos since, Nanos now) {
  ++lane(spec.op).next;
  Op& op = make_op(std::move(spec), true, since);
  std::vector<uint8_t> plan;  // workers have it, servers do not
  if (config.servers) plan = op.spec.plan.serialize();
  for (uint16_t a = 0; a < config.aggregators(); ++a) {
    const uint16_t to = config.aggregator_endpoint(a);
    if (to == config.endpoint) {
      op.worker->push[a]->finish();
      continue;
    }
    send_open(to, op, op.grid.shards[a], plan);
  }
  const uint64_t id = op.id;
  recount(op);
  if (op.aggregator) {
    op.aggregator->votes[config.endpoint] = op.spec.stats;
    op.aggregator->sum.open(config.endpoint, op.spec.critical, now);
    after_sum(op, now);
  }
  if (find(id)) replay(id, now);
  if (Op* alive = find(id)) maybe_done(*alive, now);
}

void Endpoint::Impl::fail_op(Op& op, const Failure& why) {
  if (!op.working()) return;
  Lane& own = lane(op.id);
  own.abandoned = std::min(own.abandoned, number_of(op.id));
  op.worker->done = true;
  op.deadline = kNever;
  op_changed(op);
  report_failed(op.spec, why);
}

void Endpoint::Impl::report_failed(const OpSpec& spec, const Failure& why) {
  OpReport report;
  report.op = spec.op;
  report.step = spec.step;
  report.failure = why;
  emit(Event::Type::op_done, 0, std::move(report));
}

// Fails the ops that wait for memory.
void Endpoint::Impl::fail_waiting(const std::function<Failure(const OpSpec&)>& why) {
  for (const WaitingOps::Own& own : waiting.ops) report_failed(own.spec, why(own.spec));
  waiting.ops.clear();
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
    if (!p || !p->farewell.gone || p->farewell.complete(op.id)) continue;
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
  if (op.working()) return false;
  const auto complete = [&op](const auto& p) { return !p || p->farewell.complete(op.id); };
  if (std::ranges::all_of(paths, complete)) return true;
  if (op.control_open) return false;
  if (!op.aggregator) return true;
  const AggregatorPart& part = *op.aggregator;
  const bool ended = part.sum.all_final() && part.close_sent &&
                     (part.shard != 0 || part.fold_sent) &&
                     (!part.committed || part.committed->over());
  return ended && results_taken(op);
}

// True when every worker has the results that it needs of this aggregator.
bool Endpoint::Impl::results_taken(const Op& op) const {
  for (uint16_t w = 0; w < config.workers; ++w)
    if (w != config.endpoint && !paths[w]->farewell.complete(op.id) &&
        !op.aggregator->back[w]->settled())
      return false;
  return true;
}

// Notes that an op may be drained, or that its timers may have changed.
void Endpoint::Impl::op_changed(Op& op) {
  const Nanos due =
      op.aggregator ? std::min(op.deadline, op.aggregator->sum.next_timer()) : op.deadline;
  if (due != op.due) {
    op_agenda.timers.erase({op.due, op.id});
    op_agenda.timers.emplace(due, op.id);
    op.due = due;
  }
  may_be_drained(op);
}

// Frees the drained ones among the ops that have changed.
void Endpoint::Impl::free_drained() {
  for (const uint64_t id : op_agenda.changed) {
    const auto it = ops.find(id);
    if (it == ops.end()) continue;
    it->second->changed = false;
    if (!drained(*it->second)) continue;
    drop(*it->second);
    lane(id).finish(number_of(id));
    ops.erase(it);
  }
  op_agenda.changed.clear();
}

// Frees the drained ops, and starts those that wait for memory.
void Endpoint::Impl::retire(Nanos now) {
  op_agenda.retire = false;
  free_drained();
  config.endpoint < config.workers ? begin_waiting(now) : admit(now);
}

}  // namespace gradwire
