#include "proto/push/aggregator.h"

#include <algorithm>

#include "codec/codec.h"
#include "proto/push/push_list.h"
#include "reduce/accumulate.h"

namespace gradwire {

Aggregator::Aggregator(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                       uint16_t workers, int self, codec::Elements own, Memory& memory,
                       std::span<const uint8_t> priorities)
    : plan_(plan),
      grid_(grid),
      shard_(shard),
      workers_(workers),
      self_(self),
      own_priorities_(priorities),
      sum_(plan, grid, shard, own, memory),
      rule_(plan, grid, shard, workers),
      contributors_(shard.size()),
      decided_(shard.size()),
      own_left_(shard.size()),
      worker_(workers),
      undecided_(shard.size()) {
  if (plan.exact()) turns_.emplace(shard.size(), memory);
  for (Worker& w : worker_) {
    w.undecided = shard.size();
    w.counted = Bitmap(shard.size());
    w.decided = Bitmap(shard.size());
    w.critical = Bitmap(shard.size());
    w.regions = Zeroed<RegionLedger>(plan.regions.size());
  }
  finished_.reserve(shard.size());
}

void Aggregator::open(uint16_t worker, Bitmap critical, Nanos now) {
  Worker& w = worker_[worker];
  if (w.opened) return;
  w.opened = true;
  ++opened_;
  rule_.start(Clock::open, worker, now);
  w.critical = std::move(critical);
  for (uint32_t local = 0; local < shard_.size(); ++local)
    if (w.critical.test(local) && !w.counted.test(local))
      ++w.regions[grid_.region[shard_.begin + local]].critical_left;
  if (worker == self_) accept_own(now);
  if (rule_.applies()) close_due(CloseRule::Concerns::all, worker, now);
}

// The own worker's chunks count as if they had arrived in the order in which it would send them. An
// eager close then leaves out the same chunks as at other workers, so that masks stay shared, or
// with priority classes its own last ones.
void Aggregator::accept_own(Nanos now) {
  const auto self = static_cast<uint16_t>(self_);
  if (turns_) {
    // All own chunks count; each is read in place, with others that come.
    for (uint32_t local = 0; local < shard_.size(); ++local) {
      if (worker_[self].decided.test(local)) continue;
      count(self, local);
      if (decided_[local] + 1 == workers_) add_in_order(self, local, {});
      decide(self, local);
    }
    return;
  }
  const PushList list(plan_, grid_, shard_, worker_[self].critical, own_priorities_);
  for (uint32_t c : list.sent) {
    const uint32_t local = c - shard_.begin;
    if (worker_[self].decided.test(local)) continue;
    add_own(local);
    count(self, local);
    decide(self, local);
  }
  rule_.start(Clock::first_arrival, self, now);
  rule_.start(Clock::tail, self, now);
}

Aggregator::Added Aggregator::add(uint16_t worker, uint32_t chunk, std::span<const uint8_t> payload,
                                  bool tail, Nanos now, bool stashed) {
  if (!shard_.contains(chunk)) return Added::malformed;
  if (!codec::valid(plan_.format, payload, grid_.length(chunk))) return Added::malformed;
  const uint32_t local = chunk - shard_.begin;
  if (!rule_.applies()) return take(worker, local, payload, stashed);
  const auto first = rule_.start(Clock::first_arrival, worker, now);
  const auto last = tail ? rule_.start(Clock::tail, worker, now) : CloseRule::Concerns::nobody;
  const Added added = take(worker, local, payload, stashed);
  if (added == Added::counted) try_close(worker, grid_.region[chunk], now);
  close_due(first, worker, now);
  close_due(last, worker, now);
  return added;
}

Aggregator::Added Aggregator::take(uint16_t worker, uint32_t local,
                                   std::span<const uint8_t> payload, bool stashed) {
  const Worker& w = worker_[worker];
  if (w.decided.test(local)) return Added::ignored;
  const bool later = turns_ && waits(worker, local, payload);
  if (later && !stashed && !turns_->has_room(payload)) return Added::no_memory;
  count(worker, local);
  if (later)
    turns_->keep(local, worker, payload);
  else if (turns_)
    add_in_order(worker, local, payload);
  else
    add_payload(local, payload.data());
  decide(worker, local);
  return Added::counted;
}

// True when a contribution to an exact sum has to wait for others. One that may stay where it is
// waits for all, so that they are summed in one pass.
bool Aggregator::waits(uint16_t worker, uint32_t local, std::span<const uint8_t> payload) const {
  if (decided_[local] + 1 == workers_) return false;
  if (turns_->stays(payload)) return true;
  uint16_t turn = turns_->turn(local);
  while (turn < worker && worker_[turn].counted.test(local)) ++turn;
  return turn < worker;
}

// Adds the contributions whose turn has come, in one pass where they are plain. `payload`: the one
// that has arrived.
void Aggregator::add_in_order(uint16_t worker, uint32_t local, std::span<const uint8_t> payload) {
  const bool plain = plan_.format.plain();
  const bool begun = turns_->turn(local) > 0;
  run_.clear();
  uint16_t turn = turns_->turn(local);
  for (; turn < workers_ && worker_[turn].counted.test(local); turn = turns_->pass(local)) {
    const uint8_t* const values = turn == self_    ? sum_.own(local)
                                  : turn == worker ? payload.data()
                                                   : turns_->take(local, turn);
    if (plain)
      run_.push_back(values);
    else
      add_payload(local, values);
  }
  contributors_[local] = turn;
  if (plain)
    sum_.add_run(local, begun, run_, turn == workers_ ? std::optional(plan_.scale) : std::nullopt);
  turns_->release();
}

// An own contribution that would begin a sum is left where it is until the next one arrives, so
// that an op begins without a pass over memory.
void Aggregator::add_own(uint32_t local) {
  if (contributors_[local]) return add_payload(local, sum_.own(local));
  own_left_[local] = 1;
  ++contributors_[local];
}

void Aggregator::add_payload(uint32_t local, const uint8_t* payload) {
  if (std::exchange(own_left_[local], 0)) {
    sum_.start_pair(local, payload);
  } else if (contributors_[local] == 0) {
    sum_.start(local, payload);
  } else {
    sum_.add(local, payload);
  }
  ++contributors_[local];
}

void Aggregator::count(uint16_t worker, uint32_t local) {
  Worker& w = worker_[worker];
  w.counted.set(local);
  if (!rule_.applies()) return;
  const uint32_t chunk = shard_.begin + local;
  RegionLedger& ledger = w.regions[grid_.region[chunk]];
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
  finished_.push_back(shard_.begin + local);
  if (turns_ && plan_.format.plain()) return;  // scaled with its last contribution
  if (own_left_[local]) sum_.start(local, sum_.own(local));
  double factor = plan_.scale;
  if (plan_.fill == Fill::mean)
    factor *= static_cast<double>(workers_) / static_cast<double>(contributors);
  sum_.finish(local, factor);
}

// Closes a worker's region if its time has come: what is missing of it is decided.
void Aggregator::try_close(uint16_t worker, uint32_t region, Nanos now) {
  Worker& w = worker_[worker];
  RegionLedger& ledger = w.regions[region];
  if (ledger.closed || !w.opened || ledger.critical_left) return;
  if (!rule_.may_close(worker, region, ledger.counted, now)) return;
  if (ledger.counted < rule_.region(region).elements) {
    if (stops_.empty() || stops_.back().worker != worker) stops_.push_back({worker, {}});
    stops_.back().regions.push_back(region);
    w.stopped = true;
  }
  ledger.closed = true;
  const Grid::Shard& chunks = rule_.region(region).chunks;
  for (uint32_t c = chunks.begin; c < chunks.end; ++c) decide(worker, c - shard_.begin);
}

// Closes the regions of one worker, or of all, whose time has come.
void Aggregator::close_due(CloseRule::Concerns concerns, uint16_t worker, Nanos now) {
  if (concerns == CloseRule::Concerns::nobody) return;
  if (concerns == CloseRule::Concerns::worker) {
    if (worker_[worker].undecided == 0) return;
    for (uint32_t r = 0; r < rule_.regions(); ++r) try_close(worker, r, now);
    return;
  }
  rule_.clear_timer();
  for (uint16_t w = 0; w < workers_; ++w) close_due(CloseRule::Concerns::worker, w, now);
}

void Aggregator::on_timer(Nanos now) {
  if (rule_.applies() && now >= next_timer()) close_due(CloseRule::Concerns::all, 0, now);
}

bool Aggregator::forgive(uint16_t worker, uint32_t chunk) {
  if (!shard_.contains(chunk) || plan_.spend != Spend::lost) return false;
  const uint32_t local = chunk - shard_.begin;
  Worker& w = worker_[worker];
  if (w.decided.test(local)) return true;  // it arrived after all, or was forgiven before
  if (w.critical.test(local)) return false;
  const uint32_t r = grid_.region[chunk];
  RegionLedger& ledger = w.regions[r];
  const uint64_t spent = ledger.forgiven + grid_.length(chunk);
  // The check is against the whole region. The worker's own (F + l <= p (R + F + l)) counts what
  // had been acknowledged to it, which may have been more than what has arrived in order here.
  if (spent > rule_.region(r).losable) return false;
  ledger.forgiven = spent;
  decide(worker, local);
  return true;
}

bool Aggregator::needed_by_all(uint32_t chunk) const {
  const uint32_t local = chunk - shard_.begin;
  if (std::ranges::any_of(worker_, [&](const Worker& w) { return w.critical.test(local); }))
    return true;
  const std::vector<float> values = sum_.result(local);
  return !reduce::all_finite(values.data(), values.size());
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
