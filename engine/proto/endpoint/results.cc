// Results: from sums to closing, committing, results and the report.
#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"
#include "reduce/accumulate.h"

namespace gradwire {

// Folds the statistics of all workers in rank order: sums, then maxima (NaN wins), and sends FOLD.
void Endpoint::Impl::fold(Op& op, Nanos now) {
  AggregatorPart& part = *op.aggregator;
  if (part.fold_sent || part.shard != 0 || !part.sum.all_opened()) return;
  part.fold_sent = true;
  op_changed(op);
  Stats folded = part.votes[0];
  for (uint16_t w = 1; w < config.workers; ++w) {
    const Stats& vote = part.votes[w];
    for (size_t i = 0; i < kStatSlots / 2; ++i) folded[i] += vote[i];
    for (size_t i = kStatSlots / 2; i < kStatSlots; ++i)
      if (!(folded[i] >= vote[i]) && folded[i] == folded[i]) folded[i] = vote[i];
  }
  uint16_t agreed = 0;
  for (const uint16_t longest : part.longest)
    if (longest && (agreed == 0 || longest < agreed)) agreed = longest;
  Body body;
  for (double s : folded) body.put(s);
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
void Endpoint::Impl::after_sum(Op& op, Nanos now) {
  op_changed(op);
  Aggregator& sum = op.aggregator->sum;
  std::vector<uint32_t> stopped;  // regions of one worker
  const std::vector<Aggregator::Stop> stops = sum.take_stops();
  for (size_t i = 0; i < stops.size(); ++i) {
    const uint16_t worker = stops[i].worker;
    stopped.push_back(stops[i].region);
    if (i + 1 < stops.size() && stops[i + 1].worker == worker) continue;
    if (worker == config.endpoint) {
      // A worker sends no STOP to itself.
    } else if (op.rules.probes) {
      answer_push(op, worker);
    } else {
      send_list(worker, op, wire::Kind::stop, stopped);
      void_backlog(op, worker);
    }
    stopped.clear();
  }
  if (op.working()) {
    PullReceiver& own = op.worker->pull[op.aggregator->shard];
    const auto& finished = sum.finished();
    for (; op.aggregator->passed_on < finished.size(); ++op.aggregator->passed_on) {
      const uint32_t chunk = finished[op.aggregator->passed_on];
      apply(op, chunk, sum.result_payload(chunk), now);
      own.insert(chunk);
    }
  }
  if (op.aggregator->counted != sum.finished().size()) {
    op.aggregator->counted = sum.finished().size();
    recount(op);
  }
  if (!op.aggregator->fold_sent) fold(op, now);
  if (!sum.all_final() || (op.rules.lossy_pull && !sum.all_opened())) return;
  if (!op.aggregator->close_sent) {
    op.aggregator->close_sent = true;
    if (op.rules.has_close) {
      Bitmap applied(op.own_shard().size());
      for (uint32_t c : sum.finished()) applied.set(c - op.own_shard().begin);
      const Bitmap needed = op.rules.lossy_pull ? needed_results(op) : Bitmap();
      for (uint16_t w = 0; w < config.workers; ++w) {
        if (w == config.endpoint) {
          op.worker->pull[op.aggregator->shard].close(sum.counted(w), applied);
          continue;
        }
        Body body;
        body.put_bitmap(sum.counted(w)).put_bitmap(applied).put_bitmap(needed);
        if (!body.bytes().empty()) send_message(w, op, wire::Kind::close, body.bytes());
      }
    }
    if (op.rules.committed) try_commit(op, now);
    if (op.rules.lossy_pull) {
      for (PullSender& back : op.aggregator->back) back.seal();
      recount(op);
    }
  }
  if (op.worker) maybe_done(op, now);
}

// Committed pull: leaves a result out for all workers alike, while the bound has room.
bool Endpoint::Impl::withhold(Op& op, uint32_t chunk) {
  const uint32_t local = chunk - op.own_shard().begin;
  if (op.aggregator->withheld.chunks.test(local)) return true;
  if (op.aggregator->commit_sent) return false;
  const uint32_t region = op.grid.region[chunk];
  const Plan& plan = op.spec.plan;
  if (plan.regions[region].bound == 0.0 && !op.rules.exact) return false;
  if (!op.aggregator->sum.all_opened()) return false;  // the critical chunks are not known yet
  if (op.aggregator->sum.critical(chunk)) return false;
  const uint64_t elements = op.aggregator->sum.region_elements(region);
  const uint64_t spent = op.aggregator->withheld.elements[region] + op.grid.length(chunk);
  if (static_cast<double>(spent) > plan.pull_bound * static_cast<double>(elements) + 1e-9)
    return false;
  const std::vector<float> result = op.aggregator->sum.result(chunk);
  if (!reduce::all_finite(result.data(), result.size())) return false;
  op.aggregator->withheld.elements[region] = spent;
  op.aggregator->withheld.chunks.set(local);
  ++op.aggregator->withheld.count;
  for (PullSender& back : op.aggregator->back) back.forget(chunk);
  recount(op);
  return true;
}

void Endpoint::Impl::try_commit(Op& op, Nanos now) {
  if (op.aggregator->commit_sent || !op.aggregator->sum.all_final() || !op.aggregator->close_sent)
    return;
  const auto results = static_cast<uint32_t>(op.aggregator->sum.finished().size());
  for (uint16_t w = 0; w < config.workers; ++w)
    if (w != config.endpoint &&
        op.aggregator->back[w].acked_count() + op.aggregator->withheld.count < results)
      return;
  op.aggregator->commit_sent = true;
  op_changed(op);
  Bitmap committed(op.own_shard().size());
  for (uint32_t c : op.aggregator->sum.finished()) {
    const uint32_t local = c - op.own_shard().begin;
    if (!op.aggregator->withheld.chunks.test(local)) committed.set(local);
  }
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (w == config.endpoint) {
      op.worker->pull[op.aggregator->shard].commit(committed);
      continue;
    }
    Body body;
    body.put_bitmap(committed);
    if (!body.bytes().empty()) send_message(w, op, wire::Kind::commit, body.bytes());
  }
  if (op.worker) maybe_done(op, now);
}

// Writes a result over the worker's own values, which are decided by now.
void Endpoint::Impl::apply(Op& op, uint32_t chunk, const uint8_t* payload, Nanos now) {
  if (op.worker->first_result == 0) op.worker->first_result = now;
  codec::decode(op.spec.plan.result_format(), payload, op.grid.length(chunk),
                op.spec.data + op.grid.offset[chunk]);
}

// True when this worker's part of an op needs nothing more from an aggregator.
bool Endpoint::Impl::has_all(const Op& op, uint16_t aggregator) const {
  if (op.grid.shards[aggregator].size() == 0) return true;
  const PullReceiver& pull = op.worker->pull[aggregator];
  const bool here = op.rules.pulls || (op.aggregator && aggregator == op.aggregator->shard);
  return (!here || has_enough(op, aggregator)) && (!op.rules.has_close || pull.closed()) &&
         (!op.rules.committed || pull.committed());
}

// The first op that lacks something which only this peer can send, or null.
const Op* Endpoint::Impl::waits_for(uint16_t peer) const {
  for (const auto& [id, op] : ops) {
    if (!op->working()) continue;
    for (uint16_t a = 0; a < op->worker->pull.size(); ++a)
      if (config.aggregator_endpoint(a) == peer &&
          (!has_all(*op, a) || (a == 0 && !op->worker->folded)))
        return op.get();
  }
  return nullptr;
}

void Endpoint::Impl::maybe_done(Op& op, Nanos now) {
  if (!op.working()) return;
  WorkerPart& part = *op.worker;
  const auto shards = static_cast<uint16_t>(part.push.size());
  if (part.push_done == 0 && (!op.aggregator || op.aggregator->sum.all_final())) {
    while (part.settled < shards && part.push[part.settled].settled()) ++part.settled;
    if (part.settled == shards) part.push_done = now;
  }
  if (!part.folded) return;
  while (part.complete < shards && has_all(op, part.complete)) ++part.complete;
  if (part.complete == shards) report(op, now);
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
  for (uint16_t a = 0; a < op.worker->pull.size(); ++a) {
    const PullReceiver& pull = op.worker->pull[a];
    for (uint32_t c = op.grid.shards[a].begin; c < op.grid.shards[a].end; ++c) {
      r.counted[c] = pull.counted(c);
      const bool here = op.rules.pulls || (op.aggregator && a == op.aggregator->shard);
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
  if (op.aggregator && op.aggregator->withheld.count) {
    for (uint32_t c : op.aggregator->sum.finished()) {
      if (!op.aggregator->withheld.chunks.test(c - op.own_shard().begin)) continue;
      r.withheld_chunks.push_back(c);
      const std::vector<float> values = op.aggregator->sum.result(c);
      r.withheld_values.insert(r.withheld_values.end(), values.begin(), values.end());
    }
  }
  if (op.aggregator) {
    r.result_error = op.aggregator->sum.take_error();
    r.error_offset = op.grid.offset[op.own_shard().begin];
  }
  r.stats = op.worker->stats;
  r.datagram_bytes = op.worker->agreed ? op.worker->agreed : config.datagram_bytes;
  r.total = now - op.started;
  r.push = op.worker->push_done ? op.worker->push_done - op.started : r.total;
  r.pull = op.worker->first_result ? now - op.worker->first_result : 0;
  r.bytes_sent = op.traffic.bytes;
  r.packets_sent = op.traffic.packets;
  r.retransmissions = op.traffic.retransmissions;
  for (PushSender& push : op.worker->push)
    if (push.passes()) r.passes = std::max(r.passes, push.passes()->pass());
  Nanos rtprop = kNever;
  for (const auto& p : paths)
    if (p && p->recovery.rtt.any()) rtprop = std::min(rtprop, p->recovery.rtt.minimum());
  r.rtprop = rtprop == kNever ? 0 : rtprop;
  r.btlbw = btlbw();
  counters.rtprop = r.rtprop;
  op.worker->done = true;
  op.deadline = kNever;
  op_changed(op);
  for (PushSender& push : op.worker->push) push.finish();
  recount(op);
  Event event;
  event.type = Event::Type::op_done;
  event.report = std::move(r);
  events.push_back(std::move(event));
}

}  // namespace gradwire
