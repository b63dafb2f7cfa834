// Results: from sums to closing, committing, results and the report.
#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "proto/endpoint/endpoint_impl.h"
#include "reduce/accumulate.h"

namespace gradwire {

// Folds the statistics of all workers in rank order: sums, then maxima (NaN wins), and sends FOLD.
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
  for (uint16_t longest : op.longest)
    if (longest && (op.agreed == 0 || longest < op.agreed)) op.agreed = longest;
  Body body;
  for (double s : folded) body.put(s);
  if (op.agreed) body.put(op.agreed);
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

// Acts on what was added, forgiven or closed, and sends what follows to the workers concerned.
void Endpoint::Impl::after_sum(Op& op, Nanos now) {
  Aggregator& sum = *op.aggregator;
  std::vector<uint32_t> stopped;  // regions of one worker
  const std::vector<Aggregator::Stop> stops = sum.take_stops();
  for (size_t i = 0; i < stops.size(); ++i) {
    const uint16_t worker = stops[i].worker;
    stopped.push_back(stops[i].region);
    if (i + 1 < stops.size() && stops[i + 1].worker == worker) continue;
    if (worker == config.endpoint) {
      // A worker sends no STOP to itself.
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
  if (op.counted_results != sum.finished().size()) {
    op.counted_results = sum.finished().size();
    recount(op);
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
    if (op.lossy_pull) {
      for (PullSender& back : op.back) back.seal();
      recount(op);
    }
  }
  if (op.worker) maybe_done(op, now);
}

// Committed pull: leaves a result out for all workers alike, while the bound has room.
bool Endpoint::Impl::withhold(Op& op, uint32_t chunk) {
  const uint32_t local = chunk - op.own_shard().begin;
  if (op.withheld.test(local)) return true;
  if (op.commit_sent) return false;
  const uint32_t region = op.grid.region[chunk];
  const Plan& plan = op.spec.plan;
  if (plan.regions[region].bound == 0.0 && !op.exact) return false;
  for (uint16_t w = 0; w < config.workers; ++w)
    if (!op.aggregator->opened(w)) return false;  // the critical chunks are not known yet
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
  recount(op);
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

// Writes a result over the worker's own values, which are decided by now.
void Endpoint::Impl::apply(Op& op, uint32_t chunk, const uint8_t* payload, Nanos now) {
  if (op.first_result == 0) op.first_result = now;
  codec::decode(op.spec.plan.result_format(), payload, op.grid.length(chunk),
                op.spec.data + op.grid.offset[chunk]);
}

// True when this worker's part of an op needs nothing more from an aggregator.
bool Endpoint::Impl::has_all(const Op& op, uint16_t aggregator) const {
  if (op.grid.shards[aggregator].size() == 0) return true;
  const PullReceiver& pull = op.pull[aggregator];
  const bool here = op.pulls || (op.aggregator && aggregator == op.shard);
  return (!here || has_enough(op, aggregator)) && (!op.has_close || pull.closed()) &&
         (!op.committed || pull.committed());
}

// The first op that lacks something which only this peer can send, or null.
const Op* Endpoint::Impl::waits_for(uint16_t peer) const {
  for (const auto& [id, op] : ops) {
    if (!op->worker || op->done) continue;
    for (uint16_t a = 0; a < op->pull.size(); ++a)
      if (config.aggregator_endpoint(a) == peer && (!has_all(*op, a) || (a == 0 && !op->folded)))
        return op.get();
  }
  return nullptr;
}

void Endpoint::Impl::maybe_done(Op& op, Nanos now) {
  if (!op.worker || op.done) return;
  if (op.push_done == 0) {
    bool settled = !op.aggregator || op.aggregator->all_final();
    for (const PushSender& push : op.push) settled = settled && push.settled();
    if (settled) op.push_done = now;
  }
  if (!op.folded) return;
  for (uint16_t a = 0; a < op.pull.size(); ++a)
    if (!has_all(op, a)) return;
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
  r.datagram_bytes = op.agreed ? op.agreed : config.datagram_bytes;
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
    if (p && p->recovery.rtt.any()) rtprop = std::min(rtprop, p->recovery.rtt.minimum());
  r.rtprop = rtprop == kNever ? 0 : rtprop;
  r.btlbw = btlbw();
  counters.rtprop = r.rtprop;
  op.done = true;
  op.deadline = kNever;
  for (PushSender& push : op.push) push.finish();
  recount(op);
  Event event;
  event.type = Event::Type::op_done;
  event.report = std::move(r);
  events.push_back(std::move(event));
}

}  // namespace gradwire
