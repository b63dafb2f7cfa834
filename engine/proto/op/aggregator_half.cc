#include "proto/op/aggregator_half.h"

#include <algorithm>
#include <utility>

#include "proto/pull/pull_sender.h"
#include "proto/push/push_list.h"

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
}  // namespace

AggregatorHalf::AggregatorHalf(const OpSpec& spec, const Grid& grid, const EndpointConfig& config,
                               Memory& memory, WorkerHalf* own, Outbox& out)
    : spec_(spec),
      grid_(grid),
      config_(config),
      own_(own),
      out_(out),
      sum_(spec.plan, grid, grid.shards[config.shard()], config.workers,
           own ? config.endpoint : Aggregator::kNoSelf, spec.data, memory, spec.priorities),
      passes_(spec.plan.control == Control::probe ? config.workers : 0),
      opens_(config.workers),
      votes_(config.workers),
      longest_(config.workers) {
  back_.reserve(config.workers);
  for (uint16_t w = 0; w < config.workers; ++w)
    back_.push_back(make_pull_sender(spec.plan, grid, shard(), sum_.finished()));
  if (spec.plan.pull == Pull::committed) committed_.emplace(spec.plan, grid, shard(), sum_);
  // A result has the first class that any worker gave its chunk, as far as pushes have arrived.
  const std::vector<uint8_t>& classes = spec.priorities;
  if (spec.plan.class_dscp.empty()) return;
  if (classes.empty())
    result_class_.assign(shard().size(), own ? 0 : kPriorityClasses - 1);
  else
    result_class_.assign(classes.begin() + shard().begin, classes.begin() + shard().end);
}

Aggregator::Added AggregatorHalf::add(uint16_t worker, const wire::Header& header,
                                      std::span<const uint8_t> payload, Nanos now, bool stashed) {
  const auto added =
      sum_.add(worker, header.chunk, payload, header.flags & wire::kTail, now, stashed);
  if (added == Aggregator::Added::no_memory || added == Aggregator::Added::malformed) return added;
  if (!result_class_.empty()) {
    uint8_t& known = result_class_[header.chunk - shard().begin];
    known = std::min(known, wire::priority_class(header.flags));
  }
  return added;
}

bool AggregatorHalf::open(uint16_t worker, const Open& open, wire::Reader& rest, Nanos now) {
  Bitmap critical(shard().size());
  if (open.has_critical && !read_bitmap(rest, critical)) return false;
  votes_[worker] = open.stats;
  longest_[worker] = open.longest;
  sum_.open(worker, std::move(critical), now);
  return true;
}

void AggregatorHalf::open_own(uint16_t longest, Nanos now) {
  votes_[config_.endpoint] = spec_.stats;
  longest_[config_.endpoint] = longest;
  sum_.open(config_.endpoint, shard().set_of(spec_.critical), now);
}

void AggregatorHalf::answer(uint16_t worker) {
  PassReceiver* const passes = this->passes(worker);
  if (!passes) {
    // The backlog that the worker reported before a STOP arrived would take credit from other
    // senders until its next packet, which may be an op away. A push that ends where an eager close
    // does leaves nothing but copies.
    if (sum_.stopped(worker) && !eager_from_start(spec_.plan)) out_.outdated.push_back(worker);
    return;
  }
  const bool enough = sum_.undecided(worker) == 0;
  if (shard().size() == 0 || (!enough && !sum_.opened(worker))) return;
  out_.answer(worker, wire::Way::push, *passes, enough, [&] { return sum_.missing(worker); });
}

void AggregatorHalf::stop_regions() {
  for (const auto& [worker, regions] : sum_.take_stops()) {
    if (worker == config_.endpoint) continue;  // a worker sends no STOP to itself
    if (passes_.empty()) out_.list(worker, wire::Kind::stop, regions);
    answer(worker);
  }
}

void AggregatorHalf::pass_on(Nanos now) {
  const std::vector<uint32_t>& finished = sum_.finished();
  for (; own_ && !own_->done() && passed_on_ < finished.size(); ++passed_on_) {
    const uint32_t chunk = finished[passed_on_];
    const uint8_t* const result = sum_.in_place() ? nullptr : sum_.result_payload(chunk);
    own_->take_own(config_.shard(), chunk, result, now);
  }
  if (counted_ == finished.size()) return;
  counted_ = finished.size();
  out_.recount_all = true;
}

// Sends a message to all workers but the own one.
void AggregatorHalf::send(wire::Kind kind, std::span<const uint8_t> body) {
  for (uint16_t w = 0; w < config_.workers; ++w)
    if (w != config_.endpoint) out_.message(w, kind, body);
}

bool AggregatorHalf::fold() {
  if (folded_ || config_.shard() != 0 || !sum_.all_opened()) return false;
  folded_ = true;
  Fold fold{folded_stats(votes_)};
  for (const uint16_t longest : longest_)
    if (longest && (fold.agreed == 0 || longest < fold.agreed)) fold.agreed = longest;
  send(wire::Kind::fold, fold_body(fold));
  if (own_) own_->on_fold(fold);
  return true;
}

// CLOSE lists which chunks of the worker counted, which chunks have a result and, for a lossy pull,
// which results every worker must have.
void AggregatorHalf::send_close() {
  close_sent_ = true;
  if (committed_) committed_->seal();
  for (const auto& back : back_)
    if (PassSender* passes = back->passes()) passes->seal();
  const bool lossy = spec_.plan.pull == Pull::lossy;
  out_.recount_all |= lossy;
  if (!ends_with_close(spec_.plan)) return;
  const Bitmap applied = shard().set_of(sum_.finished());
  Bitmap needed(lossy ? shard().size() : 0);
  for (const uint32_t c : sum_.finished())
    if (lossy && sum_.needed_by_all(c)) needed.set(c - shard().begin);
  for (uint16_t w = 0; w < config_.workers; ++w) {
    if (w == config_.endpoint) {
      own_->pull(config_.shard()).on_close(sum_.counted(w), applied, needed);
      continue;
    }
    Body body;
    body.put_bitmap(sum_.counted(w)).put_bitmap(applied).put_bitmap(needed);
    out_.message(w, wire::Kind::close, body.bytes());
  }
}

bool AggregatorHalf::withhold(uint32_t chunk) {
  if (!committed_->lost(chunk)) return false;
  for (const auto& back : back_) back->forget(chunk);
  out_.recount_all = true;
  return true;
}

bool AggregatorHalf::results_taken(std::span<const uint8_t> left) const {
  for (uint16_t w = 0; w < config_.workers; ++w)
    if (w != config_.endpoint && !left[w] && !back_[w]->settled()) return false;
  return true;
}

bool AggregatorHalf::commit(std::span<const uint8_t> left) {
  if (!committed_ || !results_taken(left)) return false;
  const std::optional<Bitmap> applied = committed_->decide();
  if (!applied) return false;
  Body body;
  body.put_bitmap(*applied);
  send(wire::Kind::commit, body.bytes());
  if (own_) own_->pull(config_.shard()).on_commit(*applied);
  return true;
}

void AggregatorHalf::keep_results(std::span<const uint8_t> left) {
  if (!sum_.in_place()) return;
  std::vector<const ChunkSender*> open;
  for (uint16_t w = 0; w < config_.workers; ++w)
    if (w != config_.endpoint && !left[w] && !back_[w]->settled()) open.push_back(back_[w].get());
  for (uint32_t c = shard().begin; c < shard().end && !open.empty(); ++c)
    if (std::ranges::any_of(open, [c](const auto* back) { return back->needs(c); })) sum_.keep(c);
  sum_.leave();
}

void AggregatorHalf::report(OpReport& r) {
  r.result_error = sum_.take_error();
  r.error_offset = grid_.offset[shard().begin];
  if (!committed_) return;
  for (uint32_t c : sum_.finished()) {
    if (!committed_->withheld(c)) continue;
    r.withheld_chunks.push_back(c);
    const std::vector<float> values = sum_.result(c);
    r.withheld_values.insert(r.withheld_values.end(), values.begin(), values.end());
  }
}

}  // namespace gradwire
