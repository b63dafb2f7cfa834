// Control "probe" and lossy pulls: PROBE, BITMAP and STOP of passes, and ENOUGH of a stream.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"
#include "reduce/accumulate.h"

namespace gradwire {

namespace {
// Control frames waiting for a peer above which its PROBEs are refused.
constexpr size_t kMostFrames = 1024;
}  // namespace

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
  if (asked.stopped()) receiver.credit.ask(paths[worker]->grant, 0);
  if (asked.stopped() || op.own_shard().size() == 0) return;
  if (op.aggregator->sum.undecided(worker) == 0) {
    receiver.credit.ask(paths[worker]->grant, 0);
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
    if (ledger.enough()) receiver.credit.ask(paths[to]->grant, 0);
    return;
  }
  PassReceiver& asked = op.worker->pull_asked[aggregator];
  if (asked.stopped()) {
    receiver.credit.ask(paths[to]->grant, 0);
    return;
  }
  if (ledger.enough()) {
    receiver.credit.ask(paths[to]->grant, 0);
    send_pass(to, op, wire::Kind::stop, {wire::Way::pull, asked.stop()});
  } else if (asked.waiting()) {
    send_bitmap(to, op, {wire::Way::pull, asked.answer()}, ledger.missing());
  }
}

// Takes a packet of control "probe", or ENOUGH.
Endpoint::Impl::Fate Endpoint::Impl::on_pass_packet(Path& path, Op& op, const wire::Header& header,
                                                    std::span<const uint8_t> payload, Nanos now) {
  const wire::Kind kind = header.common.kind;
  if (kind == wire::Kind::enough) return fate_of(on_enough(path.peer, op, payload));
  // Each PROBE has an answer, and a correct peer sends the next only after it has taken that.
  if (kind == wire::Kind::probe && path.control.open() >= kMostFrames) return Fate::refused;
  const auto pass = wire::read_pass(payload);
  if (!op.rules.probes || !pass || (pass->way == wire::Way::pull && !op.rules.lossy_pull))
    return Fate::malformed;
  if (kind != wire::Kind::bitmap && payload.size() != wire::kPassBytes) return Fate::malformed;
  // The aggregator is the receiver of a push and the sender of a pull.
  const bool push = pass->way == wire::Way::push;
  const bool probe = kind == wire::Kind::probe;
  if (push == probe) {
    if (!sums_for(op, path.peer)) return Fate::malformed;
  } else {
    if (!pulls_from(op, path.peer)) return Fate::malformed;
    if (op.done()) return Fate::taken;
  }
  if (probe) return fate_of(on_probe(path.peer, op, *pass));
  return fate_of(on_pass_answer(path, op, header, *pass, payload.subspan(wire::kPassBytes), now));
}

bool Endpoint::Impl::on_probe(uint16_t source, Op& op, const wire::Pass& pass) {
  if (pass.way == wire::Way::push) {
    if (!op.aggregator->push_asked[source].probe(pass.number)) return false;
    answer_push(op, source);
    return true;
  }
  const uint16_t aggregator = config.aggregator_at(source);
  if (!op.worker->pull_asked[aggregator].probe(pass.number)) return false;
  answer_pull(op, aggregator);
  return true;
}

// Handles BITMAP and STOP.
bool Endpoint::Impl::on_pass_answer(Path& path, Op& op, const wire::Header& header,
                                    const wire::Pass& pass, std::span<const uint8_t> missing,
                                    Nanos now) {
  const bool push = pass.way == wire::Way::push;
  if (!push && !op.aggregator->close_sent) return false;  // a worker cannot know what it misses
  PassSender& passes = push ? *op.worker->push[config.aggregator_at(path.peer)].passes()
                            : *op.aggregator->back[path.peer].passes();
  if (header.common.kind == wire::Kind::bitmap) {
    const uint32_t bytes = part_bytes() - static_cast<uint32_t>(wire::kPassBytes);
    const bool good = passes.bitmap_part(pass.number, header.chunk, missing, bytes);
    recount(op, path);
    return good;
  }
  if (!passes.stop(pass.number)) return false;
  recount(op, path);
  if (push) {
    maybe_done(op, now);
  } else {
    op_changed(op);
    op_agenda.retire = true;
  }
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
  op_agenda.retire = true;
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
