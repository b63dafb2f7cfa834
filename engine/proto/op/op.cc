#include "proto/op/op.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "codec/codec.h"
#include "proto/plan/lanes.h"
#include "proto/plan/priority.h"
#include "proto/push/passes.h"

namespace gradwire {

namespace {
// Critical chunks are of the first class.
OpSpec with_classes(OpSpec spec) {
  if (spec.priorities.empty()) return spec;
  for (uint32_t c : spec.critical)
    if (c < spec.priorities.size()) spec.priorities[c] = 0;
  return spec;
}

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}
}  // namespace

Op::Op(OpSpec what, const EndpointConfig& config, Memory& memory, bool works, Nanos now)
    : id(what.op),
      spec(with_classes(std::move(what))),
      grid(spec.plan, config.datagram_bytes, config.aggregators(), config.engine, config.engines),
      started(now),
      out(config.datagram_bytes),
      config_(config),
      hash_(spec.plan.hash()),
      reserved_(memory, memory_of(spec.plan, config)),
      deadline_(works && spec.timeout < kNever - now ? now + spec.timeout : kNever),
      left_(config.endpoints()) {
  const uint32_t chunks = std::ranges::max(grid.shards, {}, &Grid::Shard::size).size();
  longest_message_ = longest_message(spec.plan, chunks, config);
  if (works) worker_ = std::make_unique<WorkerHalf>(spec, grid, config, out);
  if (config.aggregates())
    aggregator_ = std::make_unique<AggregatorHalf>(spec, grid, config, memory, worker_.get(), out);
  out.changed = out.recount_all = true;
}

void Op::begin(uint32_t longest, Nanos now) {
  const auto limit = static_cast<uint16_t>(longest < config_.datagram_bytes ? longest : 0);
  std::vector<uint8_t> plan;  // workers have it, servers do not
  if (config_.servers) plan = spec.plan.serialize();
  for (uint16_t a = 0; a < config_.aggregators(); ++a) {
    const uint16_t to = config_.aggregator_endpoint(a);
    if (to == config_.endpoint)
      worker_->push(a).finish();
    else
      out.message(to, wire::Kind::open, open_body(spec, hash_, grid.shards[a], plan, limit));
  }
  out.recount_all = true;
  if (!aggregator_) return;
  aggregator_->open_own(limit, now);
  after_sum(now);
}

// ---- packets

Fate Op::take(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload,
              Nanos now, bool stashed) {
  const wire::Kind kind = header.common.kind;
  switch (kind) {
    case wire::Kind::push:
      return sums_for(peer) ? on_push(peer, header, payload, now, stashed) : Fate::malformed;
    case wire::Kind::open:
      return sums_for(peer) ? on_open_part(peer, header.chunk, payload, now) : Fate::malformed;
    case wire::Kind::forgive:
      return sums_for(peer) ? on_forgive(peer, payload, now) : Fate::malformed;
    case wire::Kind::enough:
      return fate_of(on_enough(peer));
    case wire::Kind::probe:
    case wire::Kind::bitmap:
      return on_pass_packet(peer, header, payload, now);
    default:
      if (probes() && kind == wire::Kind::stop) return on_pass_packet(peer, header, payload, now);
      if (!pulls_from(peer)) return Fate::malformed;
      return done() ? Fate::taken : for_worker(peer, header, payload, now);
  }
}

// Takes a worker's contribution to a chunk that is summed here.
Fate Op::on_push(uint16_t worker, const wire::Header& header, std::span<const uint8_t> payload,
                 Nanos now, bool stashed) {
  const auto added = aggregator_->add(worker, header, payload, now, stashed);
  if (added == Aggregator::Added::no_memory) return Fate::refused;
  if (added == Aggregator::Added::malformed) return Fate::malformed;
  // Nothing follows from a contribution that completes no sum, where no region closes by count.
  if (added == Aggregator::Added::counted && aggregator_->quiet()) return Fate::taken;
  summed_by_ = worker;
  return Fate::taken;
}

void Op::follow(Nanos now) {
  if (const uint16_t by = std::exchange(summed_by_, Waits::kNobody); by != Waits::kNobody) {
    after_sum(now, by);
    aggregator_->answer(by);
  }
  if (std::exchange(news_, false)) check(now);
}

Fate Op::on_open_part(uint16_t worker, uint32_t part, std::span<const uint8_t> payload, Nanos now) {
  const bool first = part == 0 && payload.size() >= kPartPrefix;
  if (first && !same_plan(worker, payload.subspan(kPartPrefix))) return Fate::malformed;
  MessageReceiver& message = open_message(worker);
  const auto result =
      message.part(part, payload, Outbox::part_bytes(config_.datagram_bytes), longest_message_);
  if (result != MessageReceiver::Result::complete)
    return fate_of(result == MessageReceiver::Result::incomplete);
  const std::vector<uint8_t> bytes = message.take();
  return fate_of(on_open(worker, bytes, now));
}

// Fails, and returns false, when an OPEN that begins with these bytes has another plan. The first
// part is enough; the OPEN of another plan may be longer than what is kept here.
bool Op::same_plan(uint16_t worker, std::span<const uint8_t> bytes) {
  wire::Reader reader(bytes);
  Open open{};
  if (!read_open(reader, open)) return true;
  if (open.hash != hash_ || open.step != spec.step) {
    out.fail({op_name(id) + ": " + config_.name(worker) + " has plan " + hex(open.hash) +
                  " for step " + std::to_string(open.step) + " (" + std::to_string(open.elements) +
                  " elements), " + config_.name(config_.endpoint) + " has plan " + hex(hash_) +
                  " for step " + std::to_string(spec.step) + " (" +
                  std::to_string(spec.plan.elements) +
                  " elements); all ranks must have the same model, policy and options, and sum "
                  "tensors of the same size",
              worker, Cause::plan});
    return false;
  }
  return true;
}

bool Op::on_open(uint16_t worker, std::span<const uint8_t> bytes, Nanos now) {
  wire::Reader reader(bytes);
  Open open{};
  if (!read_open(reader, open)) return false;
  reader.take(open.plan_bytes);
  // A worker whose contributions have come before has begun earlier: this OPEN was lost at first.
  const bool first = aggregator_->sum().undecided(worker) == aggregator_->shard().size();
  if (!aggregator_->open(worker, open, reader, now)) return false;
  if (first) waits.opened.note(worker, now - started);
  after_sum(now, worker);
  aggregator_->answer(worker);
  return true;
}

Fate Op::on_forgive(uint16_t worker, std::span<const uint8_t> payload, Nanos now) {
  if (payload.size() % 4) return Fate::malformed;
  wire::Reader reader(payload);
  while (!reader.rest().empty()) {
    const auto chunk = reader.get<uint32_t>();
    if (aggregator_->sum().forgive(worker, chunk)) continue;
    out.fail({config_.name(worker) + " gave up chunk " + std::to_string(chunk) + " of step " +
                  std::to_string(spec.step) + ", which its bound does not allow",
              worker, Cause::bound});
    return Fate::malformed;
  }
  after_sum(now, worker);
  return Fate::taken;
}

// Takes what an aggregator sends to a worker that still waits for its result.
Fate Op::for_worker(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload,
                    Nanos now) {
  const uint16_t aggregator = config_.aggregator_at(peer);
  waits.pulled.note(peer, now - started);
  bool good = false;
  switch (header.common.kind) {
    case wire::Kind::pull:
      good = worker_->on_pull(aggregator, header.chunk, payload, now);
      break;
    case wire::Kind::stop:
      return fate_of(on_stop(peer, payload));
    case wire::Kind::close:
    case wire::Kind::commit:
    case wire::Kind::fold:
      good = worker_->on_message(aggregator, header.common.kind, header.chunk, payload,
                                 longest_message_);
      break;
    default:
      break;
  }
  news_ |= good;
  return fate_of(good);
}

// Takes the regions of which an aggregator needs no more chunks; false when malformed.
bool Op::on_stop(uint16_t peer, std::span<const uint8_t> payload) {
  if (payload.size() % 4) return false;
  wire::Reader reader(payload);
  bool good = true;
  while (good && !reader.rest().empty())
    good = sender(peer, wire::Kind::push).stop_region(reader.get<uint32_t>());
  out.recount(peer);
  return good;
}

// Takes ENOUGH: a worker needs no more results of a lossy pull. False when malformed.
bool Op::on_enough(uint16_t peer) {
  if (spec.plan.pull != Pull::lossy || probes() || !sums_for(peer) || !aggregator_->close_sent())
    return false;
  aggregator_->back(peer).finish();
  out.recount(peer);
  out.changed = out.retires = true;
  return true;
}

// Takes PROBE, BITMAP and STOP of passes.
Fate Op::on_pass_packet(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload,
                        Nanos now) {
  const wire::Kind kind = header.common.kind;
  const auto pass = wire::read_pass(payload);
  if (!pass || (kind != wire::Kind::bitmap && payload.size() != wire::kPassBytes))
    return Fate::malformed;
  // The aggregator is the receiver of a push and the sender of a pull.
  const bool push = pass->way == wire::Way::push;
  const bool probe = kind == wire::Kind::probe;
  const bool for_sum = push == probe;
  if (for_sum ? !sums_for(peer) : !pulls_from(peer)) return Fate::malformed;
  if (!for_sum && done()) return Fate::taken;
  if (probe) return fate_of(on_probe(peer, *pass));
  return fate_of(on_pass_answer(peer, header, *pass, payload.subspan(wire::kPassBytes), now));
}

bool Op::on_probe(uint16_t peer, const wire::Pass& pass) {
  const bool push = pass.way == wire::Way::push;
  const uint16_t aggregator = config_.aggregator_at(peer);
  PassReceiver* const passes =
      push ? aggregator_->passes(peer) : worker_->pull(aggregator).passes();
  if (!passes || !passes->probe(pass.number)) return false;
  push ? aggregator_->answer(peer) : worker_->answer(aggregator);
  return true;
}

bool Op::on_pass_answer(uint16_t peer, const wire::Header& header, const wire::Pass& pass,
                        std::span<const uint8_t> missing, Nanos now) {
  const bool push = pass.way == wire::Way::push;
  if (!push && !aggregator_->close_sent()) return false;  // a worker cannot know what it misses
  PassSender* const passes = sender(peer, push ? wire::Kind::push : wire::Kind::pull).passes();
  if (!passes) return false;
  if (header.common.kind == wire::Kind::bitmap) {
    const uint32_t bytes =
        Outbox::part_bytes(config_.datagram_bytes) - static_cast<uint32_t>(wire::kPassBytes);
    const bool good = passes->bitmap_part(pass.number, header.chunk, missing, bytes);
    out.recount(peer);
    return good;
  }
  if (!passes->stop(pass.number)) return false;
  out.recount(peer);
  if (push)
    check(now);
  else
    out.changed = out.retires = true;
  return true;
}

void Op::end_passes(uint16_t peer, bool gone) {
  if (!probes()) return;
  const auto end = [&](wire::Way way, wire::Kind kind) {
    PassSender* const passes = sender(peer, kind).passes();
    if (passes && passes->take_probe()) out.pass(peer, wire::Kind::probe, {way, passes->pass()});
  };
  if (working() && pulls_from(peer)) end(wire::Way::push, wire::Kind::push);
  if (sums_for(peer) && !gone) end(wire::Way::pull, wire::Kind::pull);
}

// ---- acknowledgements

void Op::acked(uint16_t peer, wire::Kind kind, std::span<const uint32_t> chunks, Nanos now) {
  // Each of them may let others be given up (spend lost).
  const size_t run = spec.plan.spend == Spend::lost ? 1 : chunks.size();
  for (; !chunks.empty(); chunks = chunks.subspan(run)) {
    sender(peer, kind).acked(chunks.first(run));
    if (kind == wire::Kind::push) give_up(peer);
  }
  if (kind == wire::Kind::push) return;
  out.changed = true;
  try_commit(now);
}

void Op::lost(uint16_t peer, wire::Kind kind, uint32_t chunk, Again why, Nanos now) {
  ChunkSender& chunks = sender(peer, kind);
  const bool push = kind == wire::Kind::push;
  if (!push && why == Again::lost && commits() && chunks.in_flight(chunk) &&
      aggregator_->withhold(chunk))
    return try_commit(now);
  chunks.lost(chunk, why);
  out.recount(peer);
  if (push) give_up(peer);
}

// Reports the chunks that a push has given up.
void Op::give_up(uint16_t peer) {
  if (spec.plan.spend != Spend::lost) return;
  const auto forgiven = sender(peer, wire::Kind::push).take_forgiven();
  if (!forgiven.empty()) out.list(peer, wire::Kind::forgive, forgiven);
}

// ---- its course

// Acts on what was added, forgiven or closed. `by`: the worker whose packet led to it.
void Op::after_sum(Nanos now, uint16_t by) {
  out.changed = true;
  aggregator_->stop_regions();
  aggregator_->pass_on(now);
  if (aggregator_->fold()) check(now);
  if (aggregator_->sum().all_final() && !aggregator_->close_sent() && waits.pushed.value == 0)
    waits.pushed = {by, now - started};
  if (!aggregator_->summed()) return;
  if (!aggregator_->close_sent()) {
    aggregator_->send_close();
    try_commit(now);
  }
  check(now);
}

void Op::try_commit(Nanos now) {
  if (!aggregator_->commit(left_)) return;
  out.changed = true;
  check(now);
}

void Op::check(Nanos now) {
  if (working() && worker_->complete(!aggregator_ || aggregator_->sum().all_final(), now))
    report(now);
}

// Reports a completed op; its data belong to the caller again.
void Op::report(Nanos now) {
  OpReport report;
  worker_->report(report, started, now);
  if (aggregator_) aggregator_->report(report);
  report.cost.traffic = traffic;
  report.cost.waits = std::move(waits);
  worker_->finish();
  if (aggregator_) aggregator_->keep_results(left_);
  out.report = std::move(report);
  out.changed = out.recount_all = true;
}

void Op::abandon() {
  worker_->finish();
  out.changed = true;
}

void Op::left(uint16_t peer) {
  if (std::exchange(left_[peer], 1)) return;
  ++left_count_;
  out.changed = true;
}

void Op::on_timer(Nanos now) {
  if (!aggregator_ || aggregator_->sum().next_timer() > now) return;
  aggregator_->sum().on_timer(now);
  after_sum(now);
}

Nanos Op::next_timer() const {
  return aggregator_ ? std::min(deadline(), aggregator_->sum().next_timer()) : deadline();
}

// ---- chunks

Op::Backlog Op::backlog(uint16_t peer) const {
  Backlog found;
  if (sums_for(peer)) found.sure = aggregator_->back(peer).backlog(true);
  if (!working() || !pulls_from(peer)) return found;
  const ChunkSender& push = sender(peer, wire::Kind::push);
  const uint32_t again = push.backlog(false);
  found.sure += again;
  found.fresh = push.backlog(true) - again;
  return found;
}

// Pushes go first, because the results of all workers wait for them.
Chunks Op::next(uint16_t peer, bool fresh, size_t most) {
  if (working() && pulls_from(peer)) {
    const ChunkSender::Slice slice = sender(peer, wire::Kind::push).next(most, fresh);
    if (!slice.chunks.empty()) {
      uint16_t flags = slice.tail ? wire::kTail : 0;
      if (!spec.priorities.empty()) flags |= spec.priorities[slice.chunks[0]] << wire::kClassShift;
      return {slice.chunks, wire::Kind::push, slice.again, flags};
    }
  }
  if (!sums_for(peer)) return {};
  const ChunkSender::Slice slice = aggregator_->back(peer).next(most, true);
  return {slice.chunks, wire::Kind::pull, slice.again, 0};
}

// A chunk is encoded whenever it is sent; its values stay the same until it is decided.
const void* Op::payload(wire::Kind kind, uint32_t chunk, uint8_t* memory) const {
  if (kind == wire::Kind::pull) return aggregator_->sum().result_payload(chunk);
  const uint64_t first = grid.offset[chunk];
  if (!encodes()) return spec.data.at(first);
  codec::encode(spec.plan.format, spec.data.floats(first), grid.length(chunk), memory);
  return memory;
}

uint8_t Op::dscp_of_class(uint16_t peer, bool fresh, uint8_t usual) const {
  uint32_t chunk = 0;
  if (working() && pulls_from(peer) && sender(peer, wire::Kind::push).peek(chunk, fresh))
    return dscp_of(spec.plan, usual, spec.priorities.empty() ? 0 : spec.priorities[chunk]);
  if (sums_for(peer) && aggregator_->back(peer).peek(chunk, true))
    return dscp_of(spec.plan, usual, aggregator_->result_class(chunk));
  return usual;
}

// ---- what it waits for

bool Op::needs(uint16_t peer) const {
  return working() && pulls_from(peer) && worker_->needs(config_.aggregator_at(peer));
}

uint64_t Op::most_wanted(uint16_t peer) const {
  uint64_t total = 0;
  if (sums_for(peer)) total += aggregator_->sum().undecided(peer);
  if (working() && pulls_from(peer)) total += worker_->pull(config_.aggregator_at(peer)).missing();
  return total;
}

bool Op::drained() const {
  if (working()) return false;
  if (left_count_ == config_.peers_of(config_.endpoint)) return true;
  if (out.unacknowledged) return false;
  return !aggregator_ || (aggregator_->ended() && aggregator_->results_taken(left_));
}

Op::Missing Op::missing() const {
  if (aggregator_ && !aggregator_->sum().all_final())
    return {"a part of the gradients is missing of ", aggregator_->sum().waiting_for()};
  Missing found{"results are missing of ", {}};
  for (uint16_t a = 0; a < config_.aggregators(); ++a)
    if (!worker_->pull(a).complete()) found.endpoints.push_back(config_.aggregator_endpoint(a));
  return found;
}

}  // namespace gradwire
