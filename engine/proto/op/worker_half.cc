#include "proto/op/worker_half.h"

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "proto/push/passes.h"
#include "proto/push/push_sender.h"

namespace gradwire {

WorkerHalf::WorkerHalf(const OpSpec& spec, const Grid& grid, const EndpointConfig& config,
                       Outbox& out)
    : spec_(spec), grid_(grid), config_(config), out_(out) {
  // Extra chunks cost more than they save where several workers pull. A chunk that some workers
  // left out and others sent is pulled by all, and becomes final only when the regions of those
  // without it close.
  const bool may_differ = spec.plan.pull == Pull::none || config.workers == 1;
  push_.reserve(grid.shards.size());
  for (const Grid::Shard& shard : grid.shards) {
    const bool own = push_.size() == config.aggregator_at(config.endpoint);
    PushList list(spec.plan, grid, shard, shard.set_of(spec.critical), spec.priorities);
    push_.push_back(make_push_sender(spec.plan, grid, shard, std::move(list), may_differ));
    pull_.emplace_back(spec.plan, grid, shard, own);
  }
}

bool WorkerHalf::on_pull(uint16_t aggregator, uint32_t chunk, std::span<const uint8_t> payload,
                         Nanos now) {
  const Grid::Shard& shard = grid_.shards[aggregator];
  if (!shard.contains(chunk) || !codec::valid(spec_.plan.format, payload, grid_.length(chunk)))
    return false;
  PullReceiver& pull = pull_[aggregator];
  if (!pull.takes_results()) return false;
  if (!pull.insert(chunk)) return true;
  apply(chunk, payload.data(), now);
  push_[aggregator]->forget(chunk);
  out_.recount(config_.aggregator_endpoint(aggregator));
  if (pull.ledger()) answer(aggregator);
  return true;
}

void WorkerHalf::take_own(uint16_t aggregator, uint32_t chunk, const uint8_t* payload, Nanos now) {
  apply(chunk, payload, now);
  pull_[aggregator].insert(chunk);
}

// Writes a result over the worker's own values, which are decided by now.
void WorkerHalf::apply(uint32_t chunk, const uint8_t* payload, Nanos now) {
  if (first_result_ == 0) first_result_ = now;
  if (!payload) return;  // it is in place
  const codec::Format format = spec_.plan.result_format();
  uint8_t* const to = spec_.data.at(grid_.offset[chunk]);
  const uint32_t length = grid_.length(chunk);
  if (spec_.data.are_payloads(format))
    std::memcpy(to, payload, format.bytes(length));
  else
    codec::decode(format, payload, length, reinterpret_cast<float*>(to));
}

// A plan that is exact both ways has no CLOSE, and only committed pulls have COMMIT.
bool WorkerHalf::on_message(uint16_t aggregator, wire::Kind kind, uint32_t part,
                            std::span<const uint8_t> payload, uint64_t longest) {
  if ((kind == wire::Kind::close && !ends_with_close(spec_.plan)) ||
      (kind == wire::Kind::commit && spec_.plan.pull != Pull::committed) ||
      (kind == wire::Kind::fold && aggregator != 0))
    return false;
  MessageReceiver& message = messages_[{kind, aggregator}];
  const auto result =
      message.part(part, payload, Outbox::part_bytes(config_.datagram_bytes), longest);
  if (result != MessageReceiver::Result::complete)
    return result == MessageReceiver::Result::incomplete;
  const std::vector<uint8_t> bytes = message.take();
  wire::Reader reader(bytes);
  if (kind == wire::Kind::close) return on_close(aggregator, reader);
  if (kind == wire::Kind::commit) return on_commit(aggregator, reader);
  Fold fold;
  if (!read_fold(reader, fold)) return false;
  on_fold(fold);
  return true;
}

bool WorkerHalf::on_commit(uint16_t aggregator, wire::Reader& reader) {
  Bitmap committed(grid_.shards[aggregator].size());
  if (!read_bitmap(reader, committed)) return false;
  pull_[aggregator].on_commit(std::move(committed));
  return true;
}

bool WorkerHalf::on_close(uint16_t aggregator, wire::Reader& reader) {
  PullReceiver& pull = pull_[aggregator];
  const uint32_t size = grid_.shards[aggregator].size();
  Bitmap counted(size);
  Bitmap applied(size);
  Bitmap needed(pull.ledger() ? size : 0);
  if (!read_bitmap(reader, counted) || !read_bitmap(reader, applied) ||
      !read_bitmap(reader, needed))
    return false;
  pull.on_close(std::move(counted), std::move(applied), needed);
  answer(aggregator);
  push_[aggregator]->finish();
  out_.recount(config_.aggregator_endpoint(aggregator));
  return true;
}

void WorkerHalf::answer(uint16_t aggregator) {
  PullReceiver& pull = pull_[aggregator];
  PullLedger* const ledger = pull.ledger();
  if (!ledger || !ledger->closed()) return;
  const uint16_t to = config_.aggregator_endpoint(aggregator);
  if (PassReceiver* passes = pull.passes())
    return out_.answer(to, wire::Way::pull, *passes, ledger->enough(),
                       [&] { return ledger->missing(); });
  if (!ledger->enough()) return;
  out_.satisfied.push_back(to);
  if (pull.tell_enough()) out_.frame(to, wire::Kind::enough, {});
}

void WorkerHalf::finish() {
  done_ = true;
  for (const auto& push : push_) push->finish();
}

bool WorkerHalf::complete(bool sums_final, Nanos now) {
  if (push_done_ == 0 && sums_final) {
    while (pushed_ < aggregators() && push_[pushed_]->settled()) ++pushed_;
    if (pushed_ == aggregators()) push_done_ = now;
  }
  if (!fold_) return false;
  while (complete_ < aggregators() && pull_[complete_].complete()) ++complete_;
  return complete_ == aggregators();
}

void WorkerHalf::report(OpReport& report, Nanos started, Nanos now) const {
  report.op = spec_.op;
  report.step = spec_.step;
  report_chunks(report);
  report.stats = fold_->stats;
  report.datagram_bytes = fold_->agreed ? fold_->agreed : config_.datagram_bytes;
  OpCost& cost = report.cost;
  cost.total = now - started;
  cost.push = push_done_ ? push_done_ - started : cost.total;
  cost.pull = first_result_ ? now - first_result_ : 0;
  for (const auto& push : push_)
    if (const PassSender* passes = push->passes())
      cost.passes = std::max(cost.passes, passes->pass());
}

// Reports which chunks counted and were applied, and what was delivered of each region.
void WorkerHalf::report_chunks(OpReport& r) const {
  const uint32_t chunks = grid_.chunks();
  r.counted.resize(chunks);
  r.applied.resize(chunks);
  const Plan& plan = spec_.plan;
  std::vector<uint64_t> counted(plan.regions.size());
  std::vector<uint64_t> missing(plan.regions.size());
  for (uint16_t a = 0; a < aggregators(); ++a) {
    const PullReceiver& pull = pull_[a];
    for (uint32_t c = grid_.shards[a].begin; c < grid_.shards[a].end; ++c) {
      r.counted[c] = pull.counted(c);
      r.applied[c] = pull.wanted(c) && pull.has(c);
      (r.counted[c] ? counted : missing)[grid_.region[c]] += grid_.length(c);
      if (pull.takes_results() && !r.applied[c])
        std::memset(spec_.data.at(grid_.offset[c]), 0, spec_.data.width() * grid_.length(c));
    }
  }
  for (uint32_t i = 0; i < plan.regions.size(); ++i) {
    const Region& region = plan.regions[i];
    const auto length = static_cast<double>(region.length);
    r.delivered.push_back(static_cast<double>(counted[i]) / length);
    if (static_cast<double>(missing[i]) / length > region.bound + 1e-9) r.exceeded.push_back(i);
  }
}

}  // namespace gradwire
