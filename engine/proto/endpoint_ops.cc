// The life of an op: made, started, failed, drained, freed.
#include "proto/endpoint_impl.h"
#include "proto/priority.h"

namespace gradwire {

namespace {

const std::vector<uint32_t> kNoChunks;

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
  op.reserved.emplace(memory, memory_of(spec.plan, config));
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
  op.aggregates = config.aggregates();
  if (op.aggregates) op.shard = config.shard();
  uint64_t chunks = 0;
  for (const Grid::Shard& shard : op.grid.shards) chunks = std::max<uint64_t>(chunks, shard.size());
  op.longest = longest_message(plan, chunks, config.servers ? plan.serialize().size() : 0);
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
  return *ops.emplace(op.id, std::move(owned)).first->second;
}

Failure Endpoint::Impl::start(OpSpec spec, Nanos now) {
  if (failure) return failure;
  if (closing) return {"the engine is closed", -1, Cause::closed};
  if (config.endpoint >= config.workers) return {"a server starts no ops of its own"};
  if (const uint64_t next = next_op + waiting_ops.size(); spec.op != next)
    return {"op " + std::to_string(spec.op) + " is out of order; next is " + std::to_string(next)};
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
  if (need > memory.most_of_ops()) {
    fail(too_large(spec.op, spec.step, need), now);
    return failure;
  }
  waiting_ops.push_back({std::move(spec), need, now});
  retire(now);
  return {};
}

// Starts the own ops that wait, in order, as far as memory allows: always at least one.
void Endpoint::Impl::begin_waiting(Nanos now) {
  while (!waiting_ops.empty() && memory.has_op(waiting_ops.front().need)) {
    const OpSpec& spec = waiting_ops.front().spec;
    for (const auto& p : paths) {
      if (!p || !p->gone || p->gone_op > spec.op) continue;
      fail(
          {name(p->peer) + " has left the job; step " + std::to_string(spec.step) + " cannot start",
           p->peer, Cause::left},
          now);
      return;
    }
    Waiting next = std::move(waiting_ops.front());
    waiting_ops.pop_front();
    begin(std::move(next.spec), next.since, now);
    free_drained();
  }
}

void Endpoint::Impl::begin(OpSpec spec, Nanos since, Nanos now) {
  ++next_op;
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
  op.done = true;
  op.deadline = kNever;
  report_failed(op.spec, why);
}

void Endpoint::Impl::report_failed(const OpSpec& spec, const Failure& why) {
  abandoned = std::min(abandoned, spec.op);
  Event event;
  event.type = Event::Type::op_done;
  event.report.op = spec.op;
  event.report.step = spec.step;
  event.report.failure = why;
  events.push_back(std::move(event));
}

// An op that would not fit even if nothing else were held.
Failure Endpoint::Impl::too_large(uint64_t op, uint64_t step, uint64_t need) const {
  return {"memory_limit=" + std::to_string(config.memory_limit) + " at " + name(config.endpoint) +
              ": step " + std::to_string(step) + ", op " + std::to_string(op) + " needs at least " +
              std::to_string(Memory::least_limit(need)) +
              " bytes; raise it, or use smaller buckets" +
              (config.servers ? " or more servers" : ""),
          config.endpoint, Cause::memory};
}

// False, and failed, when a peer left before this op was complete there.
bool Endpoint::Impl::still_possible(const Op& op, Nanos now) {
  for (const auto& p : paths) {
    if (!p || !p->gone || op.id < p->gone_op) continue;
    fail({name(p->peer) + " left the job in step " + std::to_string(op.spec.step) + " (op " +
              std::to_string(op.id) + " is not complete)",
          p->peer, Cause::left},
         now);
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

// Frees what is drained, in any order.
void Endpoint::Impl::free_drained() {
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
}

// Frees what is drained, and starts what waits for memory.
void Endpoint::Impl::retire(Nanos now) {
  retire_due = false;
  free_drained();
  config.endpoint < config.workers ? begin_waiting(now) : admit(now);
}

}  // namespace gradwire
