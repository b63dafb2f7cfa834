#include "proto/push/aggregator.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/codec.h"
#include "proto/push/push_sender.h"
#include "reduce/accumulate.h"

namespace gradwire {

namespace {

// The memory of a contribution ahead of its turn, with its entry and its allocation, in bytes.
constexpr uint64_t waiting_cost(uint64_t bytes) {
  return bytes + 64;
}

}  // namespace

Aggregator::Aggregator(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                       uint16_t workers, int self, const float* own, Memory& memory,
                       std::span<const uint8_t> priorities)
    : plan_(plan),
      grid_(grid),
      shard_(shard),
      workers_(workers),
      self_(self),
      own_(own),
      own_priorities_(priorities),
      memory_(memory),
      exact_(plan.exact()),
      scheduled_(plan.spend == Spend::late || plan.spend == Spend::anything),
      encodes_(!plan.result_format().plain()),
      sum_(grid.offset[shard.end] - grid.offset[shard.begin]),
      contributors_(shard.size()),
      decided_(shard.size()),
      turn_(exact_ ? shard.size() : 0),
      own_left_(shard.size()),
      waiting_head_(exact_ ? shard.size() : 0),
      waiting_(1),
      regions_(shard_regions(plan, grid, shard)),
      region_chunks_(plan.regions.size()),
      worker_(workers),
      undecided_(shard.size()) {
  for (uint32_t c = shard.begin; c < shard.end; ++c) {
    Grid::Shard& span = region_chunks_[grid.region[c]];
    if (span.size() == 0) span.begin = c;
    span.end = c + 1;
  }
  for (Worker& w : worker_) {
    w.undecided = shard.size();
    w.counted = Bitmap(shard.size());
    w.decided = Bitmap(shard.size());
    w.critical = Bitmap(shard.size());
    w.regions = Zeroed<RegionLedger>(plan.regions.size());
  }
  finished_.reserve(shard.size());
  if (!plan.format.plain()) {
    decoded_.resize(grid.chunk_elements);
    own_values_.resize(grid.chunk_elements);
    payload_.resize(plan.format.bytes(grid.chunk_elements));
  }
  if (encodes_) {
    uint64_t at = 0;
    result_at_.reserve(shard.size());
    for (uint32_t c = shard.begin; c < shard.end; ++c) {
      result_at_.push_back(at);
      at += plan.format.bytes(grid.length(c));
    }
    results_ = Zeroed<uint8_t>(at);
  }
  least_need_.reserve(regions_.size());
  for (uint32_t r = 0; r < regions_.size(); ++r) {
    uint64_t least = regions_[r].elements;
    for (const ScheduleStep& step : plan.schedule) least = std::min(least, need(r, step.fraction));
    least_need_.push_back(least);
  }
}

void Aggregator::open(uint16_t worker, std::span<const uint32_t> critical, Nanos now) {
  Worker& w = worker_[worker];
  if (w.opened) return;
  w.opened = true;
  ++opened_;
  w.open_time = now;
  for (uint32_t c : critical) {
    if (c < shard_.begin || c >= shard_.end) continue;
    const uint32_t local = c - shard_.begin;
    if (w.critical.set(local) && !w.counted.test(local)) ++w.regions[grid_.region[c]].critical_left;
  }
  if (worker == self_) accept_own(now);
  if (scheduled_) close_all(now);
}

// The own worker's chunks count as if they had arrived in the order in which it would send them. An
// eager close then leaves out the same chunks as at other workers, so that masks stay shared, or
// with priority classes its own last ones.
void Aggregator::accept_own(Nanos now) {
  const auto self = static_cast<uint16_t>(self_);
  if (exact_) {
    // All own chunks count; each is added at its turn.
    for (uint32_t local = 0; local < shard_.size(); ++local) {
      if (worker_[self].decided.test(local)) continue;
      count(self, local);
      add_in_order(self, local, {});
      decide(self, local);
    }
    return;
  }
  std::vector<uint32_t> critical;
  for (uint32_t local = 0; local < shard_.size(); ++local)
    if (worker_[self].critical.test(local)) critical.push_back(shard_.begin + local);
  for (uint32_t c : push_list(plan_, grid_, shard_, critical, own_priorities_)) {
    const uint32_t local = c - shard_.begin;
    if (worker_[self].decided.test(local)) continue;
    if (contributors_[local]) {
      reduce::add(sum(c), own(c), grid_.length(c));
    } else {
      own_left_[local] = 1;
    }
    ++contributors_[local];
    count(self, local);
    decide(self, local);
  }
  worker_[self].first_arrival = worker_[self].tail = now;
}

Aggregator::Added Aggregator::add(uint16_t worker, uint32_t chunk, std::span<const uint8_t> payload,
                                  bool tail, Nanos now, bool stashed) {
  if (chunk < shard_.begin || chunk >= shard_.end) return Added::malformed;
  if (!codec::valid(plan_.format, payload, grid_.length(chunk))) return Added::malformed;
  const uint32_t local = chunk - shard_.begin;
  Worker& w = worker_[worker];
  const bool first = w.first_arrival == kNever;
  const bool first_tail = tail && w.tail == kNever;
  if (first) w.first_arrival = now;
  if (first_tail) w.tail = now;
  const Added added = take(worker, local, payload, stashed);
  if (!scheduled_) return added;
  if (added == Added::counted) try_close(worker, grid_.region[chunk], now);
  if (first) started(Clock::first_arrival, worker, now);
  if (first_tail) started(Clock::tail, worker, now);
  return added;
}

Aggregator::Added Aggregator::take(uint16_t worker, uint32_t local,
                                   std::span<const uint8_t> payload, bool stashed) {
  const Worker& w = worker_[worker];
  if (w.decided.test(local)) return Added::ignored;
  if (exact_) {
    if (!stashed && turn_[local] != worker && !memory_.has_waiting(waiting_cost(payload.size())))
      return Added::no_memory;
    count(worker, local);
    add_in_order(worker, local, payload);
  } else {
    add_on_arrival(local, payload.data());
    ++contributors_[local];
    count(worker, local);
  }
  decide(worker, local);
  return Added::counted;
}

void Aggregator::add_in_order(uint16_t worker, uint32_t local, std::span<const uint8_t> payload) {
  const uint32_t chunk = shard_.begin + local;
  const uint32_t length = grid_.length(chunk);
  bool mine = worker == self_;
  const uint8_t* values = payload.data();
  std::vector<uint8_t> waited;  // backing store of `values`
  if (turn_[local] != worker) {
    if (mine) return;  // read in place when its turn comes
    uint32_t slot = waiting_free_;
    if (slot == kNone) {
      slot = static_cast<uint32_t>(waiting_.size());
      waiting_.emplace_back();
    } else {
      waiting_free_ = waiting_[slot].next;
    }
    waiting_[slot].rank = worker;
    waiting_[slot].bytes.assign(payload.begin(), payload.end());
    waiting_[slot].next = waiting_head_[local];
    waiting_head_[local] = slot;
    waiting_bytes_ += waiting_cost(payload.size());
    memory_.waiting += waiting_cost(payload.size());
    return;
  }
  for (;;) {
    if (turn_[local] == 0) {
      mine ? start_with_own(chunk) : start_sum(chunk, values);
    } else if (mine) {
      reduce::add(sum(chunk), own(chunk), length);
    } else {
      reduce::add(plan_.format, sum(chunk), values, length, decoded_.data());
    }
    const uint16_t turn = ++turn_[local];
    ++contributors_[local];
    if (turn == workers_) return;
    if (turn == self_) {
      if (!worker_[turn].counted.test(local)) return;
      mine = true;
      continue;
    }
    uint32_t* link = &waiting_head_[local];
    while (*link != kNone && waiting_[*link].rank != turn) link = &waiting_[*link].next;
    if (*link == kNone) return;
    const uint32_t slot = *link;
    *link = waiting_[slot].next;
    waiting_[slot].next = waiting_free_;
    waiting_free_ = slot;
    waited = std::move(waiting_[slot].bytes);  // a free slot keeps no memory
    waiting_bytes_ -= waiting_cost(waited.size());
    memory_.waiting -= waiting_cost(waited.size());
    values = waited.data();
    mine = false;
  }
}

void Aggregator::add_on_arrival(uint32_t local, const uint8_t* payload) {
  const uint32_t chunk = shard_.begin + local;
  const uint32_t length = grid_.length(chunk);
  if (own_left_[local]) {
    own_left_[local] = 0;
    if (plan_.format.plain()) {
      reduce::add_pair(sum(chunk), own(chunk), payload, length);
      return;
    }
    start_with_own(chunk);
  } else if (contributors_[local] == 0) {
    start_sum(chunk, payload);
    return;
  }
  reduce::add(plan_.format, sum(chunk), payload, length, decoded_.data());
}

const float* Aggregator::own(uint32_t chunk) {
  const float* values = own_ + grid_.offset[chunk];
  if (plan_.format.plain()) return values;
  codec::encode(plan_.format, values, grid_.length(chunk), payload_.data());
  codec::decode(plan_.format, payload_.data(), grid_.length(chunk), own_values_.data());
  return own_values_.data();
}

void Aggregator::start_with_own(uint32_t chunk) {
  std::memcpy(sum(chunk), own(chunk), codec::f32_bytes(grid_.length(chunk)));
}

void Aggregator::start_sum(uint32_t chunk, const uint8_t* payload) {
  codec::decode(plan_.format, payload, grid_.length(chunk), sum(chunk));
}

// The result is encoded once, so that all replicas apply the same bytes. The encoding's error stays
// in sum_; a chunk with values that are not finite leaves none.
void Aggregator::encode_result(uint32_t chunk) {
  const uint32_t length = grid_.length(chunk);
  uint8_t* const payload = results_.data() + result_at_[chunk - shard_.begin];
  codec::encode(plan_.format, sum(chunk), length, payload);
  if (!reduce::all_finite(sum(chunk), length)) {
    std::fill_n(sum(chunk), length, 0.0f);
    return;
  }
  codec::decode(plan_.format, payload, length, decoded_.data());
  reduce::subtract(sum(chunk), decoded_.data(), length);
}

std::vector<float> Aggregator::result(uint32_t chunk) const {
  std::vector<float> values(grid_.length(chunk));
  codec::decode(plan_.result_format(), result_payload(chunk), grid_.length(chunk), values.data());
  return values;
}

void Aggregator::count(uint16_t worker, uint32_t local) {
  Worker& w = worker_[worker];
  const uint32_t chunk = shard_.begin + local;
  RegionLedger& ledger = w.regions[grid_.region[chunk]];
  w.counted.set(local);
  ledger.counted += grid_.length(chunk);
  if (w.critical.test(local)) --ledger.critical_left;
}

void Aggregator::decide(uint16_t worker, uint32_t local) {
  Worker& w = worker_[worker];
  if (!w.decided.set(local)) return;
  --w.undecided;
  if (++decided_[local] == workers_) finish(local);
}

void Aggregator::finish(uint32_t local) {
  --undecided_;
  const uint16_t contributors = contributors_[local];
  if (contributors == 0) return;
  const uint32_t chunk = shard_.begin + local;
  const uint32_t length = grid_.length(chunk);
  if (own_left_[local]) {
    start_with_own(chunk);
    own_left_[local] = 0;
  }
  double factor = plan_.scale;
  if (plan_.fill == Fill::mean)
    factor *= static_cast<double>(workers_) / static_cast<double>(contributors);
  if (factor != 1.0) reduce::scale(sum(chunk), static_cast<float>(factor), length);
  if (encodes_) encode_result(chunk);
  finished_.push_back(chunk);
}

bool Aggregator::forgive(uint16_t worker, uint32_t chunk) {
  if (chunk < shard_.begin || chunk >= shard_.end || plan_.spend != Spend::lost) return false;
  const uint32_t local = chunk - shard_.begin;
  Worker& w = worker_[worker];
  if (w.decided.test(local)) return true;  // it arrived after all, or was forgiven before
  if (w.critical.test(local)) return false;
  const uint32_t r = grid_.region[chunk];
  RegionLedger& ledger = w.regions[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  // The check is against the whole region. The worker's own (F + l <= p (R + F + l)) counts what
  // had been acknowledged to it, which may have been more than what has arrived in order here.
  if (spent > regions_[r].losable) return false;
  ledger.forgiven = spent;
  decide(worker, local);
  return true;
}

bool Aggregator::critical(uint32_t chunk) const {
  for (const Worker& w : worker_)
    if (w.critical.test(chunk - shard_.begin)) return true;
  return false;
}

std::vector<Aggregator::Stop> Aggregator::take_stops() {
  std::vector<Stop> out;
  out.swap(stops_);
  return out;
}

Bitmap Aggregator::missing(uint16_t worker) const {
  Bitmap out(shard_.size());
  for (uint32_t local = 0; local < shard_.size(); ++local)
    if (!worker_[worker].decided.test(local)) out.set(local);
  return out;
}

std::vector<uint16_t> Aggregator::waiting_for() const {
  std::vector<uint16_t> out;
  for (uint16_t w = 0; w < workers_; ++w)
    if (worker_[w].undecided) out.push_back(w);
  return out;
}

}  // namespace gradwire
