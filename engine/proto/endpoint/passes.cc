// Control "probe" and lossy pulls: PROBE, BITMAP and STOP of passes, and ENOUGH of a stream.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"
#include "reduce/accumulate.h"

namespace gradwire {

// True when the loss of a packet alone causes it to be sent again. In passes it does not: a BITMAP
// reports what is missing.
bool Endpoint::Impl::recovers(const Op& op, wire::Kind kind) {
  return !op.rules.probes ||
         (kind != wire::Kind::push && !(kind == wire::Kind::pull && op.rules.lossy_pull));
}

// Sends the PROBE of each pass that has been sent.
void Endpoint::Impl::end_passes() {
  for (auto& [id, op] : ops) {
    if (!op->rules.probes) continue;
    if (op->working()) {
      for (uint16_t a = 0; a < op->worker->push.size(); ++a) {
        PassSender& passes = *op->worker->push[a].passes();
        if (passes.take_probe())
          send_pass(config.aggregator_endpoint(a), *op, wire::Kind::probe,
                    {wire::Way::push, passes.pass()});
      }
    }
    if (!op->aggregator || !op->rules.lossy_pull) continue;
    for (uint16_t w = 0; w < config.workers; ++w) {
      if (w == config.endpoint || paths[w]->farewell.gone) continue;
      PassSender& passes = *op->aggregator->back[w].passes();
      if (passes.take_probe())
        send_pass(w, *op, wire::Kind::probe, {wire::Way::pull, passes.pass()});
    }
  }
}

void Endpoint::Impl::send_pass(uint16_t to, Op& op, wire::Kind kind, const wire::Pass& pass) {
  ControlFrame frame;
  frame.op = op.id;
  frame.kind = kind;
  frame.payload.resize(wire::kPassBytes);
  wire::write_pass(frame.payload.data(), pass);
  push_control(to, std::move(frame));
  ++op.control_open;
}

void Endpoint::Impl::send_bitmap(uint16_t to, Op& op, const wire::Pass& pass,
                                 const Bitmap& missing) {
  std::vector<uint8_t> bytes;
  missing.append_bytes(bytes);
  const auto total = static_cast<uint32_t>(bytes.size());
  const uint32_t size = part_bytes() - static_cast<uint32_t>(wire::kPassBytes);
  for (uint32_t part = 0; uint64_t{part} * size < total; ++part) {
    const auto body =
        std::span(bytes).subspan(size_t{part} * size, std::min(size, total - part * size));
    ControlFrame frame;
    frame.op = op.id;
    frame.kind = wire::Kind::bitmap;
    frame.part = part;
    frame.payload.resize(wire::kPassBytes + kPartPrefix + body.size());
    wire::write_pass(frame.payload.data(), pass);
    uint8_t* at = wire::put(frame.payload.data() + wire::kPassBytes, total);
    std::copy(body.begin(), body.end(), at);
    push_control(to, std::move(frame));
    ++op.control_open;
  }
}

// Answers a worker's push: with STOP once all its chunks are decided, else with the BITMAP if a
// PROBE has arrived. The BITMAP waits for the worker's OPEN, without which no region closes.
// Packets that arrive after the STOP was sent report an outdated backlog, which would take credit
// from other senders.
void Endpoint::Impl::answer_push(Op& op, uint16_t worker) {
  PassReceiver& asked = op.aggregator->push_asked[worker];
  if (asked.stopped()) credit.ask(paths[worker]->grant, 0);
  if (asked.stopped() || op.own_shard().size() == 0) return;
  if (op.aggregator->sum.undecided(worker) == 0) {
    credit.ask(paths[worker]->grant, 0);
    send_pass(worker, op, wire::Kind::stop, {wire::Way::push, asked.stop()});
  } else if (asked.waiting() && op.aggregator->sum.opened(worker)) {
    send_bitmap(worker, op, {wire::Way::push, asked.answer()}, op.aggregator->sum.missing(worker));
  }
}

// Answers an aggregator's pull in the same way. Before CLOSE it is not known how many results
// suffice.
void Endpoint::Impl::answer_pull(Op& op, uint16_t aggregator) {
  PullLedger& ledger = op.worker->ledgers[aggregator];
  if (!ledger.closed()) return;
  const uint16_t to = config.aggregator_endpoint(aggregator);
  if (!op.rules.probes) {
    const std::vector<uint32_t> regions = ledger.take_enough();
    if (!regions.empty()) send_list(to, op, wire::Kind::enough, regions);
    if (ledger.enough()) credit.ask(paths[to]->grant, 0);
    return;
  }
  PassReceiver& asked = op.worker->pull_asked[aggregator];
  if (asked.stopped()) {
    credit.ask(paths[to]->grant, 0);
    return;
  }
  if (ledger.enough()) {
    credit.ask(paths[to]->grant, 0);
    send_pass(to, op, wire::Kind::stop, {wire::Way::pull, asked.stop()});
  } else if (asked.waiting()) {
    send_bitmap(to, op, {wire::Way::pull, asked.answer()}, ledger.missing());
  }
}

// Handles PROBE, BITMAP and STOP; false when the packet is malformed. `aggregator`: the source's
// number.
bool Endpoint::Impl::on_pass(uint16_t source, uint16_t aggregator, Op& op,
                             const wire::Header& header, std::span<const uint8_t> payload,
                             Nanos now) {
  const wire::Kind kind = header.common.kind;
  const auto pass = wire::read_pass(payload);
  if (!pass || (pass->way == wire::Way::pull && !op.rules.lossy_pull)) return false;
  if (kind != wire::Kind::bitmap && payload.size() != wire::kPassBytes) return false;
  const bool push = pass->way == wire::Way::push;
  // The aggregator is the receiver of a push and the sender of a pull.
  if (push == (kind == wire::Kind::probe)) {
    if (!op.aggregator || source >= config.workers) return false;
    if (!push && !op.aggregator->close_sent)
      return false;  // before CLOSE a worker cannot know what it misses
  } else {
    if (aggregator == kNoAggregator || !op.worker) return false;
    if (op.done()) return true;
  }
  if (kind == wire::Kind::probe) {
    PassReceiver& asked =
        push ? op.aggregator->push_asked[source] : op.worker->pull_asked[aggregator];
    if (!asked.probe(pass->number)) return false;
    push ? answer_push(op, source) : answer_pull(op, aggregator);
    return true;
  }
  PassSender& passes =
      push ? *op.worker->push[aggregator].passes() : *op.aggregator->back[source].passes();
  if (kind == wire::Kind::bitmap) {
    const bool good =
        passes.bitmap_part(pass->number, header.chunk, payload.subspan(wire::kPassBytes),
                           part_bytes() - static_cast<uint32_t>(wire::kPassBytes));
    recount(op, *paths[source]);
    return good;
  }
  if (!passes.stop(pass->number)) return false;
  recount(op, *paths[source]);
  if (push) maybe_done(op, now);
  if (!push) op_changed(op);
  retire_due |= !push;
  return true;
}

// Handles ENOUGH: the regions of which a worker needs no more results.
bool Endpoint::Impl::on_enough(uint16_t source, Op& op, std::span<const uint8_t> payload) {
  if (!op.aggregator || source >= config.workers || !op.rules.lossy_pull || op.rules.probes ||
      !op.aggregator->close_sent || payload.size() % 4)
    return false;
  wire::Reader reader(payload);
  while (!reader.rest().empty()) {
    const auto region = reader.get<uint32_t>();
    if (region >= op.spec.plan.regions.size()) return false;
    op.aggregator->back[source].stop_region(region);
  }
  recount(op, *paths[source]);
  op_changed(op);
  retire_due = true;
  return true;
}

// True when the results of this shard suffice to end the op.
bool Endpoint::Impl::has_enough(const Op& op, uint16_t aggregator) const {
  const bool own = op.aggregator && aggregator == op.aggregator->shard;
  if (op.rules.lossy_pull && !own) return op.worker->ledgers[aggregator].enough();
  return op.worker->pull[aggregator].missing() == 0;
}

// The results that every worker must have: those with a contribution that is critical for its
// worker, and those that are not finite, which a loss scaler must find on all workers.
Bitmap Endpoint::Impl::needed_results(const Op& op) const {
  Bitmap needed(op.own_shard().size());
  for (const uint32_t chunk : op.aggregator->sum.finished()) {
    const std::vector<float> result = op.aggregator->sum.result(chunk);
    if (op.aggregator->sum.critical(chunk) || !reduce::all_finite(result.data(), result.size()))
      needed.set(chunk - op.own_shard().begin);
  }
  return needed;
}

}  // namespace gradwire
