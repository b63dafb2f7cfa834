#include "io/loop_group.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace gradwire::io {

namespace {

using Clock = std::chrono::steady_clock;

Bell::Time after(Nanos timeout) {
  // A day at most: the library adds it to the present time, which must not overflow.
  return Clock::now() + std::chrono::nanoseconds(std::clamp<Nanos>(timeout, 0, 86'400 * kSecond));
}

Nanos least(Nanos a, Nanos b) {
  return a == 0 || b == 0 ? std::max(a, b) : std::min(a, b);
}

void add(Traffic& sum, const Traffic& other) {
  sum.packets += other.packets;
  sum.bytes += other.bytes;
  sum.retransmissions += other.retransmissions;
}

void add(Levels& sum, const Levels& other) {
  sum.memory += other.memory;
  sum.rtprop = least(sum.rtprop, other.rtprop);
  sum.queue_delay = std::max(sum.queue_delay, other.queue_delay);
  sum.btlbw += other.btlbw;
  sum.send_window += other.send_window;
  sum.receive_window += other.receive_window;
  sum.path_limit = std::min(sum.path_limit, other.path_limit);
}

void add(PathState& sum, const PathState& other) {
  add(sum.total.sent, other.total.sent);
  add(sum.total.received, other.total.received);
  sum.total.declared_lost += other.total.declared_lost;
  sum.total.waited = std::max(sum.total.waited, other.total.waited);
  sum.rtprop = least(sum.rtprop, other.rtprop);
  sum.round = std::max(sum.round, other.round);
  sum.queue_to = std::max(sum.queue_to, other.queue_to);
  sum.loss_to = std::max(sum.loss_to, other.loss_to);
  sum.loss_from = std::max(sum.loss_from, other.loss_from);
  sum.window += other.window;
  sum.in_flight += other.in_flight;
}

// What holds for all loops holds for the peer.
void add(PeerState& sum, const PeerState& other) {
  sum.answered = sum.answered && other.answered;
  sum.heard = sum.heard && other.heard;
  sum.left = sum.left && other.left;
  sum.silence = std::max(sum.silence, other.silence);
  sum.begun.resize(std::min(sum.begun.size(), other.begun.size()));
  for (size_t lane = 0; lane < sum.begun.size(); ++lane)
    sum.begun[lane] = std::min(sum.begun[lane], other.begun[lane]);
  add(sum.path, other.path);
}

void add(SocketCounters& sum, const SocketCounters& other) {
  sum.send_calls += other.send_calls;
  sum.receive_calls += other.receive_calls;
  sum.blocked += other.blocked;
  sum.too_long += other.too_long;
  sum.send_errors += other.send_errors;
  if (other.last_error) sum.last_error = other.last_error;
  sum.truncated += other.truncated;
  sum.overflows += other.overflows;
}

void add(OpCost& sum, const OpCost& other) {
  sum.push = std::max(sum.push, other.push);
  sum.pull = std::max(sum.pull, other.pull);
  sum.total = std::max(sum.total, other.total);
  add(sum.traffic, other.traffic);
  sum.passes = std::max(sum.passes, other.passes);
  sum.rtprop = least(sum.rtprop, other.rtprop);
  sum.btlbw += other.btlbw;
  sum.waits.add(other.waits);
}

template <class T, class Allocator>
void append(std::vector<T, Allocator>& to, const std::vector<T, Allocator>& more) {
  if (more.empty()) return;
  std::vector<T, Allocator> all(to.size() + more.size());
  std::copy(more.begin(), more.end(), std::copy(to.begin(), to.end(), all.begin()));
  to = std::move(all);
}

// The chunks of another loop; each is of one loop alone.
void unite(std::vector<uint8_t>& chunks, const std::vector<uint8_t>& other) {
  for (size_t c = 0; c < chunks.size(); ++c) chunks[c] |= other[c];
}

}  // namespace

void add(Counters& sum, const Counters& other) {
  for (const auto count :
       {&Counters::spurious_retransmissions, &Counters::copies, &Counters::declared_lost,
        &Counters::probes, &Counters::acks_sent, &Counters::duplicates, &Counters::malformed,
        &Counters::refused, &Counters::fragmented, &Counters::credit_stalls,
        &Counters::window_stalls, &Counters::marked, &Counters::mark_cuts, &Counters::ecn_failed})
    sum.*count += other.*count;
  add(sum.sent, other.sent);
  add(sum.received, other.received);
  add(sum.now, other.now);
}

void add(Snapshot& sum, const Snapshot& other) {
  add(sum.endpoint, other.endpoint);
  for (size_t i = 0; i < std::min(sum.peers.size(), other.peers.size()); ++i)
    add(sum.peers[i], other.peers[i]);
  add(sum.socket, other.socket);
  sum.gate.forged += other.gate.forged;
  sum.gate.replayed += other.gate.replayed;
  sum.strangers += other.strangers;
  sum.injected += other.injected;
  sum.wakeups += other.wakeups;
}

LoopGroup::LoopGroup(const EndpointConfig& config, std::span<const Keys> keys,
                     const std::string& host, std::span<const uint16_t> ports)
    : bell_(std::make_shared<Bell>()) {
  size_t next = 0;
  while (loops_.size() < config.engines) {
    EndpointConfig each = config;
    each.engine = static_cast<uint16_t>(loops_.size());
    each.memory_limit /= config.engines;
    const uint16_t port = ports[std::min(next, ports.size() - 1)];
    try {
      loops_.push_back(std::make_unique<Loop>(each, keys[each.engine], host, port, bell_));
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::address_in_use || next + 1 >= ports.size()) throw;
    }
    ++next;
  }
}

std::vector<LoopGroup::Place> LoopGroup::addresses() const {
  std::vector<Place> found;
  for (const auto& loop : loops_)
    found.emplace_back(loop->address().host(), loop->address().port());
  return found;
}

void LoopGroup::connect(const std::vector<std::vector<Place>>& addresses) {
  if (addresses.size() != loops_.size())
    throw std::invalid_argument("addresses: " + std::to_string(addresses.size()) +
                                " lists given, one for each of " + std::to_string(loops_.size()) +
                                " engine threads needed");
  for (size_t i = 0; i < loops_.size(); ++i) loops_[i]->connect(addresses[i]);
}

std::vector<uint16_t> LoopGroup::wait_connected(Nanos timeout) {
  const Bell::Time until = after(timeout);
  std::set<uint16_t> missing;
  for (const auto& loop : loops_) {
    const auto left = std::chrono::nanoseconds(until - Clock::now()).count();
    const std::vector<uint16_t> here = loop->wait_connected(std::max<Nanos>(left, 0));
    missing.insert(here.begin(), here.end());
  }
  return {missing.begin(), missing.end()};
}

void LoopGroup::start(const OpSpec& spec) {
  if (loops_.size() == 1) return loops_[0]->start(spec);
  const std::lock_guard lock(mutex_);
  if (failure_) throw std::runtime_error(failure_.text);
  const auto [at, fresh] = open_.try_emplace(spec.op);
  if (!fresh) throw std::runtime_error(op_name(spec.op) + " runs already");
  Parts& parts = at->second;
  parts.reports.resize(loops_.size());
  for (const Region& region : spec.plan.regions) parts.bounds.push_back(region.bound);
  for (size_t i = 0; i < loops_.size(); ++i) {
    try {
      loops_[i]->start(spec);
    } catch (const std::runtime_error& error) {
      if (i == 0) {
        open_.erase(at);
        throw;
      }
      // The loops before it have the op, so that its end is told by a report.
      OpReport report = OpReport::failed(spec, {error.what(), -1, Cause::engine});
      if (Failure failure = loops_[i]->failure()) report.failure = std::move(failure);
      parts.reports[i] = std::move(report);
      ++parts.ended;
    }
  }
}

std::optional<OpReport> LoopGroup::next_report(Nanos timeout) {
  if (loops_.size() == 1) return loops_[0]->next_report(timeout);
  const Bell::Time until = after(timeout);
  for (;;) {
    const uint64_t rung = bell_->rung();
    spread_failure();
    const bool over = closed();
    {
      const std::lock_guard lock(mutex_);
      collect();
      if (!reports_.empty()) {
        OpReport report = std::move(reports_.front());
        reports_.pop_front();
        return report;
      }
    }
    if (over || !bell_->wait(rung, until)) return std::nullopt;
  }
}

// Takes what the loops have reported, and joins the reports of ops that all have ended.
void LoopGroup::collect() {
  for (size_t i = 0; i < loops_.size(); ++i) {
    while (std::optional<OpReport> report = loops_[i]->next_report(0)) {
      const auto at = open_.find(report->op);
      if (at == open_.end()) continue;
      Parts& parts = at->second;
      if (!parts.reports[i]) ++parts.ended;
      // The other parts would wait for their time-out, since the other ranks go without this one.
      if (report->failure && report->failure.cause != Cause::closed) fail_all(report->failure);
      parts.reports[i] = std::move(report);
      if (parts.ended < loops_.size()) continue;
      reports_.push_back(joined(std::move(parts)));
      open_.erase(at);
    }
  }
}

// The report of the whole op. Where one part has failed so has the op; the loop that failed first
// knows why.
OpReport LoopGroup::joined(Parts parts) const {
  for (std::optional<OpReport>& part : parts.reports)
    if (part->failure && failure_ && part->failure.text == failure_.text) return std::move(*part);
  for (std::optional<OpReport>& part : parts.reports)
    if (part->failure) return std::move(*part);
  OpReport whole = std::move(*parts.reports[0]);
  for (size_t i = 1; i < parts.reports.size(); ++i) {
    const OpReport& part = *parts.reports[i];
    unite(whole.counted, part.counted);
    unite(whole.applied, part.applied);
    append(whole.withheld_chunks, part.withheld_chunks);
    append(whole.withheld_values, part.withheld_values);
    append(whole.result_error, part.result_error);  // the parts of a shard follow each other
    for (size_t r = 0; r < whole.delivered.size(); ++r) whole.delivered[r] += part.delivered[r];
    whole.datagram_bytes = std::min(whole.datagram_bytes, part.datagram_bytes);
    add(whole.cost, part.cost);
  }
  whole.exceeded.clear();
  for (uint32_t r = 0; r < whole.delivered.size(); ++r)
    if (1.0 - whole.delivered[r] > parts.bounds[r] + 1e-9) whole.exceeded.push_back(r);
  return whole;
}

bool LoopGroup::closed() const {
  return std::all_of(loops_.begin(), loops_.end(), [](const auto& loop) { return loop->closed(); });
}

void LoopGroup::set_drop(const DropOptions& options) {
  for (size_t i = 0; i < loops_.size(); ++i) {
    DropOptions own = options;
    own.seed += i;
    loops_[i]->set_drop(own);
  }
}

Snapshot LoopGroup::snapshot() {
  Snapshot sum = loops_[0]->snapshot();
  for (size_t i = 1; i < loops_.size(); ++i) add(sum, loops_[i]->snapshot());
  return sum;
}

std::vector<std::vector<Timeline::Entry>> LoopGroup::record(size_t entries) {
  std::vector<std::vector<Timeline::Entry>> found;
  for (const auto& loop : loops_) found.push_back(loop->record(entries));
  return found;
}

Failure LoopGroup::failure() {
  if (loops_.size() == 1) return loops_[0]->failure();
  spread_failure();
  const std::lock_guard lock(mutex_);
  return failure_;
}

void LoopGroup::spread_failure() {
  const std::lock_guard lock(mutex_);
  for (const auto& loop : loops_)
    if (const Failure failure = loop->failure()) return fail_all(failure);
}

void LoopGroup::fail_all(const Failure& why) {
  if (failure_) return;
  failure_ = why;
  for (const auto& loop : loops_) loop->fail(why);
}

void LoopGroup::fail(const std::string& why) {
  for (const auto& loop : loops_) loop->fail(why);
}

void LoopGroup::close() {
  for (const auto& loop : loops_) loop->begin_close();
  for (const auto& loop : loops_) loop->close();
}

void LoopGroup::leave_to_parent() {
  for (const auto& loop : loops_) loop->leave_to_parent();
}

}  // namespace gradwire::io
