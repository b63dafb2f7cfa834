// Results: from sums to closing, committing, results and the report.
#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"
#include "reduce/accumulate.h"

namespace gradwire {

namespace {
// The statistics of all workers in rank order: sums, then maxima (NaN wins).
Stats folded_stats(const std::vector<Stats>& votes) {
  Stats folded = votes[0];
  for (size_t w = 1; w < votes.size(); ++w) {
    for (size_t i = 0; i < kStatSlots / 2; ++i) folded[i] += votes[w][i];
    for (size_t i = kStatSlots / 2; i < kStatSlots; ++i)
      if (!(folded[i] >= votes[w][i]) && folded[i] == folded[i]) folded[i] = votes[w][i];
  }
  return folded;
}

// The results that every worker must have: those with a contribution that is critical for its
// worker, and those that are not finite, which a loss scaler must find on all workers.
Bitmap needed_results(const Op& op) {
  Bitmap needed(op.own_shard().size());
  for (const uint32_t chunk : op.aggregator->sum.finished()) {
    const std::vector<float> result = op.aggregator->sum.result(chunk);
    if (op.aggregator->sum.critical(chunk) || !reduce::all_finite(result.data(), result.size()))
      needed.set(chunk - op.own_shard().begin);
  }
  return needed;
}

// Reports which chunks counted and were applied, and what was delivered of each region.
void report_chunks(Op& op, OpReport& r) {
  const uint32_t chunks = op.grid.chunks();
  r.counted.resize(chunks);
  r.applied.resize(chunks);
  const Plan& plan = op.spec.plan;
  std::vector<uint64_t> counted(plan.regions.size());
  for (uint16_t a = 0; a < op.worker->pull.size(); ++a) {
    const PullReceiver& pull = op.worker->pull[a];
    for (uint32_t c = op.grid.shards[a].begin; c < op.grid.shards[a].end; ++c) {
      r.counted[c] = pull.counted(c);
      r.applied[c] = pull.wanted(c) && pull.has(c);
      if (r.counted[c]) counted[op.grid.region[c]] += op.grid.length(c);
      if (pull.takes_results() && !r.applied[c])
        std::memset(op.spec.data.at(op.grid.offset[c]), 0,
                    op.spec.data.width() * op.grid.length(c));
    }
  }
  for (uint32_t i = 0; i < plan.regions.size(); ++i) {
    const Region& region = plan.regions[i];
    const double fraction = static_cast<double>(counted[i]) / static_cast<double>(region.length);
    r.delivered.push_back(fraction);
    if (1.0 - fraction > region.bound + 1e-9) r.exceeded.push_back(i);
  }
}

// Reports what the results of the own shard leave to its residuals.
void report_own_shard(Op& op, OpReport& r) {
  AggregatorPart& part = *op.aggregator;
  r.result_error = part.sum.take_error();
  r.error_offset = op.grid.offset[op.own_shard().begin];
  if (!part.committed) return;
  for (uint32_t c : part.sum.finished()) {
    if (!part.committed->withheld(c)) continue;
    r.withheld_chunks.push_back(c);
    const std::vector<float> values = part.sum.result(c);
    r.withheld_values.insert(r.withheld_values.end(), values.begin(), values.end());
  }
}

}  // namespace

// Folds what all workers' OPENs carry, and sends FOLD.
void Endpoint::Impl::fold(Op& op, Nanos now) {
  AggregatorPart& part = *op.aggregator;
  if (part.fold_sent || part.shard != 0 || !part.sum.all_opened()) return;
  part.fold_sent = true;
  op_changed(op);
  const Stats folded = folded_stats(part.votes);
  uint16_t agreed = 0;
  for (const uint16_t longest : part.longest)
    if (longest && (agreed == 0 || longest < agreed)) agreed = longest;
  Body body;
  body.put(folded);
  if (agreed) body.put(agreed);
  for (uint16_t w = 0; w < config.workers; ++w)
    if (w != config.endpoint) send_message(w, op, wire::Kind::fold, body.bytes());
  if (!op.worker) return;
  op.worker->stats = folded;
  op.worker->agreed = agreed;
  op.worker->folded = true;
  maybe_done(op, now);
}

// Acts on what was added, forgiven or closed, and sends what follows to the workers concerned.
// `by`: the worker whose packet led to it.
void Endpoint::Impl::after_sum(Op& op, Nanos now, uint16_t by) {
  AggregatorPart& part = *op.aggregator;
  op_changed(op);
  stop_regions(op);
  pass_on(op, now);
  fold(op, now);
  const bool lossy = op.spec.plan.pull == Pull::lossy;
  if (part.sum.all_final() && !part.close_sent && op.waits.pushed.value == 0)
    op.waits.pushed = {by, now - op.started};
  if (!part.sum.all_final() || (lossy && !part.sum.all_opened())) return;
  if (!part.close_sent) {
    part.close_sent = true;
    if (op.has_close) send_close(op);
    if (part.committed) {
      part.committed->closed();
      try_commit(op, now);
    }
    for (const auto& back : part.back)
      if (PassSender* passes = back->passes()) passes->seal();
    if (lossy) recount(op);
  }
  if (op.worker) maybe_done(op, now);
}

// Tells workers which regions have closed: they need not send more of these.
void Endpoint::Impl::stop_regions(Op& op) {
  const std::vector<Aggregator::Stop> stops = op.aggregator->sum.take_stops();
  for (size_t i = 0; i < stops.size();) {
    const uint16_t worker = stops[i].worker;
    std::vector<uint32_t> regions;
    for (; i < stops.size() && stops[i].worker == worker; ++i) regions.push_back(stops[i].region);
    if (worker == config.endpoint) continue;  // a worker sends no STOP to itself
    if (op.aggregator->passes.empty()) send_list(worker, op, wire::Kind::stop, regions);
    answer_push(op, worker);
  }
}

// Applies finished results for the own worker, and lets the others have them.
void Endpoint::Impl::pass_on(Op& op, Nanos now) {
  AggregatorPart& part = *op.aggregator;
  const auto& finished = part.sum.finished();
  for (; op.working() && part.passed_on < finished.size(); ++part.passed_on) {
    const uint32_t chunk = finished[part.passed_on];
    apply(op, chunk, part.sum.result_payload(chunk), now);
    op.worker->pull[part.shard].insert(chunk);
  }
  if (part.counted == finished.size()) return;
  part.counted = finished.size();
  for (auto& p : paths)
    if (p) count_later(op, *p);
}

// Sends CLOSE to each worker: which of its chunks counted, which chunks have a result and, for a
// lossy pull, which results every worker must have.
void Endpoint::Impl::send_close(Op& op) {
  const Aggregator& sum = op.aggregator->sum;
  Bitmap applied(op.own_shard().size());
  for (uint32_t c : sum.finished()) applied.set(c - op.own_shard().begin);
  const Bitmap needed = op.spec.plan.pull == Pull::lossy ? needed_results(op) : Bitmap();
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (w == config.endpoint) {
      op.worker->pull[op.aggregator->shard].close(sum.counted(w), applied, needed);
      continue;
    }
    Body body;
    body.put_bitmap(sum.counted(w)).put_bitmap(applied).put_bitmap(needed);
    send_message(w, op, wire::Kind::close, body.bytes());
  }
}

// Committed pull: a result was lost. True when no worker needs it any more.
bool Endpoint::Impl::withhold(Op& op, uint32_t chunk) {
  if (!op.aggregator->committed->lost(chunk)) return false;
  for (const auto& back : op.aggregator->back) back->forget(chunk);
  recount(op);
  return true;
}

// Sends COMMIT once every worker has the results that are not withheld.
void Endpoint::Impl::try_commit(Op& op, Nanos now) {
  AggregatorPart& part = *op.aggregator;
  if (!results_taken(op)) return;
  const std::optional<Bitmap> applied = part.committed->settled();
  if (!applied) return;
  op_changed(op);
  Body body;
  body.put_bitmap(*applied);
  for (uint16_t w = 0; w < config.workers; ++w)
    if (w != config.endpoint) send_message(w, op, wire::Kind::commit, body.bytes());
  if (!op.worker) return;
  op.worker->pull[part.shard].commit(*applied);
  maybe_done(op, now);
}

// Writes a result over the worker's own values, which are decided by now.
void Endpoint::Impl::apply(Op& op, uint32_t chunk, const uint8_t* payload, Nanos now) {
  if (op.worker->first_result == 0) op.worker->first_result = now;
  const codec::Format format = op.spec.plan.result_format();
  uint8_t* const to = op.spec.data.at(op.grid.offset[chunk]);
  const uint32_t length = op.grid.length(chunk);
  if (op.spec.data.are_payloads(format))
    std::memcpy(to, payload, format.bytes(length));
  else
    codec::decode(format, payload, length, reinterpret_cast<float*>(to));
}

// The first op that lacks something which only this peer can send, or null.
const Op* Endpoint::Impl::waits_for(uint16_t peer) const {
  for (const auto& [id, op] : ops) {
    if (!op->working() || !pulls_from(*op, peer)) continue;
    const uint16_t aggregator = config.aggregator_at(peer);
    if (!op->worker->pull[aggregator].complete() || (aggregator == 0 && !op->worker->folded))
      return op.get();
  }
  return nullptr;
}

void Endpoint::Impl::maybe_done(Op& op, Nanos now) {
  if (!op.working()) return;
  WorkerPart& part = *op.worker;
  const auto shards = static_cast<uint16_t>(part.push.size());
  if (part.push_done == 0 && (!op.aggregator || op.aggregator->sum.all_final())) {
    while (part.settled < shards && part.push[part.settled]->settled()) ++part.settled;
    if (part.settled == shards) part.push_done = now;
  }
  if (!part.folded) return;
  while (part.complete < shards && part.pull[part.complete].complete()) ++part.complete;
  if (part.complete == shards) report(op, now);
}

// Reports a completed op; its data belong to the caller again.
void Endpoint::Impl::report(Op& op, Nanos now) {
  const WorkerPart& part = *op.worker;
  OpReport r;
  r.op = op.id;
  r.step = op.spec.step;
  report_chunks(op, r);
  if (op.aggregator) report_own_shard(op, r);
  r.stats = part.stats;
  r.datagram_bytes = part.agreed ? part.agreed : config.datagram_bytes;
  OpCost& cost = r.cost;
  cost.total = now - op.started;
  cost.push = part.push_done ? part.push_done - op.started : cost.total;
  cost.pull = part.first_result ? now - part.first_result : 0;
  cost.traffic = op.traffic;
  cost.waits = std::move(op.waits);
  for (const auto& push : part.push)
    if (const PassSender* passes = push->passes())
      cost.passes = std::max(cost.passes, passes->pass());
  Nanos shortest = kNever;
  for (const auto& p : paths)
    if (p && p->recovery.rtt.any()) shortest = std::min(shortest, p->recovery.rtt.minimum());
  cost.rtprop = counters.now.rtprop = shortest == kNever ? 0 : shortest;
  cost.btlbw = btlbw();
  op.worker->done = true;
  op.deadline = kNever;
  op_changed(op);
  for (const auto& push : op.worker->push) push->finish();
  recount(op);
  emit(Event::Type::op_done, 0, std::move(r));
}

}  // namespace gradwire
