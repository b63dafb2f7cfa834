#include "proto/push/stream_push.h"

namespace gradwire {

namespace {
// Under spend nothing or anything a gap delays the sum, so lost chunks go before fresh ones. Under
// spend late or lost the gap may still be forgiven.
bool holes_first(Spend spend) {
  return spend == Spend::nothing || spend == Spend::anything;
}
}  // namespace

StreamPush::StreamPush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, PushList list)
    : StreamSender(grid, shard, sent_, list.sent.size(), holes_first(plan.spend)),
      plan_(plan),
      sent_(std::move(list.sent)),
      critical_(std::move(list.critical)),
      due_(sent_.size()),
      ledger_(plan.regions.size()) {
  for (uint32_t c = begin_; c < end(); ++c) state(c) = State::done;
  for (uint32_t c : sent_) state(c) = State::idle;
}

uint32_t StreamPush::backlog(bool fresh) const {
  if (settled()) return 0;
  return fresh ? static_cast<uint32_t>(unsent()) + holes_.queued : holes_.queued;
}

void StreamPush::acked(std::span<const uint32_t> chunks) {
  if (plan_.spend != Spend::lost) return StreamSender::acked(chunks);
  for (const uint32_t chunk : chunks) {
    if (over(chunk)) continue;
    settle(chunk, State::acked);
    ledger_[grid_.region[chunk]].received += grid_.length(chunk);
    if (holes_.queued) forgive_queued();
  }
}

// Spend lost: F forgiven, R received and this chunk's l elements must keep F + l <= p (R + F + l).
bool StreamPush::room(uint32_t chunk) const {
  if (critical_.test(chunk - begin_)) return false;
  const uint32_t r = grid_.region[chunk];
  const Ledger& ledger = ledger_[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  return static_cast<double>(spent) <=
         plan_.regions[r].bound * static_cast<double>(ledger.received + spent) + 1e-9;
}

void StreamPush::forgive_queued() {
  for (; !holes_.forgivable.empty(); holes_.forgivable.pop()) {
    const uint32_t c = holes_.forgivable.front();
    if (state(c) != State::queued) continue;
    if (!room(c)) break;
    ledger_[grid_.region[c]].forgiven += grid_.length(c);
    settle(c, State::done);
    forgiven_.push_back(c);
  }
}

void StreamPush::lost(uint32_t chunk, Again why) {
  if (state(chunk) != State::flight) return;
  const bool forgivable = why == Again::lost && plan_.spend == Spend::lost;
  queue(chunk, forgivable);
  if (forgivable) forgive_queued();
}

bool StreamPush::stop_region(uint32_t region) {
  if (region >= ledger_.size() || plan_.spend == Spend::nothing ||
      plan_.regions[region].bound == 0.0)
    return false;
  const Grid::Shard part = grid_.part({begin_, end()}, region);
  for (uint32_t c = part.begin; c < part.end; ++c) settle(c, State::done);
  return true;
}

void StreamPush::finish() {
  for (uint32_t c = begin_; c < end(); ++c) settle(c, State::done);
}

}  // namespace gradwire
