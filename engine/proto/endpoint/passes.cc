// Control "probe" and lossy pulls: PROBE, BITMAP and STOP of passes, and ENOUGH of a stream.
#include <array>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/push/push_list.h"

namespace gradwire {

namespace {
// Control frames waiting for a peer above which its PROBEs are refused.
constexpr size_t kMostFrames = 1024;
}  // namespace

// Sends the PROBE of each pass that has been sent.
void Endpoint::Impl::end_passes() {
  if (op_agenda.in_passes == 0) return;
  for (auto& [id, op] : ops) {
    if (op->spec.plan.control != Control::probe) continue;
    const auto end = [&](const Path& path, wire::Way way, ChunkSender& sender) {
      PassSender* const passes = sender.passes();
      if (passes && passes->take_probe())
        send_pass(path.peer, *op, wire::Kind::probe, {way, passes->pass()});
    };
    for (auto& p : paths) {
      if (!p) continue;
      if (op->working() && pulls_from(*op, p->peer))
        end(*p, wire::Way::push, sender_of(*op, *p, wire::Kind::push));
      if (sums_for(*op, p->peer) && !p->farewell.gone)
        end(*p, wire::Way::pull, sender_of(*op, *p, wire::Kind::pull));
    }
  }
}

void Endpoint::Impl::send_pass(uint16_t to, Op& op, wire::Kind kind, const wire::Pass& pass) {
  std::vector<uint8_t> payload(wire::kPassBytes);
  wire::write_pass(payload.data(), pass);
  send_control(to, op, kind, std::move(payload));
}

// Answers the sender of passes: with STOP once it needs to send nothing more, else with the BITMAP
// if a PROBE has arrived. Packets that arrive after the STOP was sent report an outdated backlog,
// which would take credit from other senders.
void Endpoint::Impl::answer(Op& op, uint16_t to, wire::Way way, PassReceiver& passes, bool enough,
                            const std::function<Bitmap()>& missing) {
  if (enough) receiver.credit.ask(paths[to]->grant, 0);
  if (passes.stopped()) return;
  if (enough) {
    send_pass(to, op, wire::Kind::stop, {way, passes.stop()});
  } else if (passes.waiting()) {
    std::array<uint8_t, wire::kPassBytes> prefix{};
    wire::write_pass(prefix.data(), {way, passes.answer()});
    Body body;
    body.put_bitmap(missing());
    send_message(to, op, wire::Kind::bitmap, body.bytes(), prefix);
  }
}

// The most packets that a peer can still want to send here: the undecided chunks of its pushes and
// the missing results. It is unbounded while packets of ops that have not started here wait.
uint64_t Endpoint::Impl::most_wanted(const Path& path) const {
  if (!path.stash.empty()) return UINT64_MAX;
  for (const auto& [id, opens] : waiting.opens)
    if (opens.messages.contains(path.peer)) return UINT64_MAX;
  uint64_t total = 0;
  for (const auto& [id, op] : ops) {
    if (sums_for(*op, path.peer)) total += op->aggregator->sum.undecided(path.peer);
    if (op->working() && pulls_from(*op, path.peer))
      total += op->worker->pull[config.aggregator_at(path.peer)].missing();
  }
  return total;
}

// Answers a worker's push. In passes the answer waits for the worker's OPEN, without which no
// region closes.
void Endpoint::Impl::answer_push(Op& op, uint16_t worker) {
  AggregatorPart& part = *op.aggregator;
  PassReceiver* const passes = part.passes_of(worker);
  if (!passes) {
    // The backlog that the worker reported before a STOP arrived would take credit from other
    // senders until its next packet, which may be an op away.
    Path& path = *paths[worker];
    if (part.sum.stopped(worker) &&
        path.grant.outdated(path.recovery.rtt.minimum(), eager_from_start(op.spec.plan)))
      receiver.credit.lower(path.grant, most_wanted(path));
    return;
  }
  const bool enough = part.sum.undecided(worker) == 0;
  if (op.own_shard().size() == 0 || (!enough && !part.sum.opened(worker))) return;
  answer(op, worker, wire::Way::push, *passes, enough, [&] { return part.sum.missing(worker); });
}

// Answers an aggregator's pull where it is lossy. Before CLOSE it is not known how many results
// suffice.
void Endpoint::Impl::answer_pull(Op& op, uint16_t aggregator) {
  PullReceiver& pull = op.worker->pull[aggregator];
  PullLedger* const ledger = pull.ledger();
  if (!ledger || !ledger->closed()) return;
  const uint16_t to = config.aggregator_endpoint(aggregator);
  if (PassReceiver* passes = pull.passes())
    return answer(op, to, wire::Way::pull, *passes, ledger->enough(),
                  [&] { return ledger->missing(); });
  const std::vector<uint32_t> regions = ledger->take_enough();
  if (!regions.empty()) send_list(to, op, wire::Kind::enough, regions);
  if (ledger->enough()) receiver.credit.ask(paths[to]->grant, 0);
}

// Takes a packet of control "probe", or ENOUGH.
Fate Endpoint::Impl::on_pass_packet(Path& path, Op& op, const wire::Header& header,
                                    std::span<const uint8_t> payload, Nanos now) {
  const wire::Kind kind = header.common.kind;
  if (kind == wire::Kind::enough) return fate_of(on_enough(path, op, payload));
  // Each PROBE has an answer, and a correct peer sends the next only after it has taken that.
  if (kind == wire::Kind::probe && path.control.open() >= kMostFrames) return Fate::refused;
  const auto pass = wire::read_pass(payload);
  if (!pass || (kind != wire::Kind::bitmap && payload.size() != wire::kPassBytes))
    return Fate::malformed;
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
  const bool push = pass.way == wire::Way::push;
  const uint16_t aggregator = push ? op.aggregator->shard : config.aggregator_at(source);
  PassReceiver* const passes =
      push ? op.aggregator->passes_of(source) : op.worker->pull[aggregator].passes();
  if (!passes || !passes->probe(pass.number)) return false;
  push ? answer_push(op, source) : answer_pull(op, aggregator);
  return true;
}

// Handles BITMAP and STOP.
bool Endpoint::Impl::on_pass_answer(Path& path, Op& op, const wire::Header& header,
                                    const wire::Pass& pass, std::span<const uint8_t> missing,
                                    Nanos now) {
  const bool push = pass.way == wire::Way::push;
  if (!push && !op.aggregator->close_sent) return false;  // a worker cannot know what it misses
  PassSender* const passes =
      sender_of(op, path, push ? wire::Kind::push : wire::Kind::pull).passes();
  if (!passes) return false;
  if (header.common.kind == wire::Kind::bitmap) {
    const uint32_t bytes = part_bytes() - static_cast<uint32_t>(wire::kPassBytes);
    const bool good = passes->bitmap_part(pass.number, header.chunk, missing, bytes);
    recount(op, path);
    return good;
  }
  if (!passes->stop(pass.number)) return false;
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
bool Endpoint::Impl::on_enough(Path& path, Op& op, std::span<const uint8_t> payload) {
  if (!sums_for(op, path.peer) || !op.aggregator->close_sent ||
      !on_stop(path, op, *op.aggregator->back[path.peer], payload))
    return false;
  op_changed(op);
  op_agenda.retire = true;
  return true;
}

}  // namespace gradwire
