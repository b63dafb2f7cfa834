// The life of an op: made, started, failed, drained, freed.
#include <utility>

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

// The op's lane; a new one where none of its ops has been made.
const Lane& Endpoint::Impl::lane(uint64_t op) const {
  static const Lane kNew;
  return lane_of(op) < lanes.size() ? lanes[lane_of(op)] : kNew;
}

Lane& Endpoint::Impl::lane(uint64_t op) {
  if (lane_of(op) >= lanes.size()) lanes.resize(lane_of(op) + size_t{1});
  return lanes[lane_of(op)];
}

// The number in the op's lane that the next packets are most likely of.
uint64_t Endpoint::Impl::expected(uint64_t op) const {
  return config.endpoint < config.workers ? lane(op).next : lane(op).done_below;
}

bool Endpoint::Impl::finished(uint64_t op) const {
  return lane(op).finished(number_of(op));
}

Op& Endpoint::Impl::make_op(OpSpec spec, bool worker, Nanos now) {
  auto owned = std::make_unique<Op>();
  Op& op = *owned;
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
  op.aggregates = config.servers == 0 || config.endpoint >= config.workers;
  if (op.aggregates)
    op.shard =
        static_cast<uint16_t>(config.servers ? config.endpoint - config.workers : config.endpoint);
  set_classes(op);
  op.longest.resize(config.workers);
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
                                     op.spec.data, waiting_room, op.spec.priorities);
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
  if (const uint64_t next = std::as_const(*this).lane(spec.op).next; number_of(spec.op) != next)
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
  for (const auto& p : paths) {
    if (!p || !p->gone || p->gone_op > made) continue;
    fail({name(p->peer) + " has left the job; step " + std::to_string(spec.step) + " cannot start",
          p->peer, Cause::left},
         now);
    return failure;
  }
  ++lane(spec.op).next;
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
    send_open(to, op, op.grid.shards[a]);
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
  return {};
}

void Endpoint::Impl::fail_op(Op& op, const Failure& why) {
  if (!op.worker || op.done) return;
  abandoned = std::min(abandoned, op.place);
  op.done = true;
  op.deadline = kNever;
  Event event;
  event.type = Event::Type::op_done;
  event.report.op = op.id;
  event.report.step = op.spec.step;
  event.report.failure = why;
  events.push_back(std::move(event));
}

// False, and failed, when a peer left before this op was complete there.
bool Endpoint::Impl::still_possible(const Op& op, Nanos now) {
  for (const auto& p : paths) {
    if (!p || !p->gone || op.place < p->gone_op) continue;
    fail({name(p->peer) + " left the job in step " + std::to_string(op.spec.step) + " (" +
              op_name(op.id) + " is not complete)",
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
    if (p && !(p->gone && p->gone_op > op.place)) others_left = false;
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
    if (path.gone && path.gone_op > op.place) continue;
    if (op.lossy_pull ? !op.back[w].settled()
                      : op.back[w].acked_count() + op.withheld_count < results)
      return false;
  }
  return true;
}

// Frees what is drained, in any order, and lets a server admit what waits.
void Endpoint::Impl::retire(Nanos now) {
  retire_due = false;
  for (auto it = ops.begin(); it != ops.end();) {
    if (!drained(*it->second)) {
      ++it;
      continue;
    }
    lane(it->first).finish(number_of(it->first));
    it = ops.erase(it);
  }
  if (config.endpoint >= config.workers) admit(now);
}

}  // namespace gradwire
