#include "proto/endpoint/endpoint.h"

#include <algorithm>

#include "proto/base/text.h"
#include "proto/endpoint/endpoint_impl.h"

namespace gradwire {

namespace {
// The share of the socket's receive buffer that a window may fill, since packets also wait there
// while this host is busy; and datagrams of it at least.
constexpr double kUnreadShare = 0.5;
constexpr double kLeastUnread = 8;
}  // namespace

std::string EndpointConfig::name(uint16_t number) const {
  if (number >= workers) return "server " + std::to_string(number - workers);
  return "rank " + std::to_string(ranks.empty() ? number : ranks[number]);
}

Endpoint::Impl::Impl(const EndpointConfig& c, Nanos now)
    : config(c),
      sender(c.wire_bytes(), c.delay_target, c.pacing, c.endpoints()),
      receiver({c.endpoints(), c.peers_of(c.endpoint), c.workers, c.wire_bytes(),
                std::max(kUnreadShare * c.receive_buffer, kLeastUnread * c.datagram_bytes),
                c.delay_target, c.endpoint >= c.workers}),
      scheduler(c.endpoints()),
      due(c.endpoints(), now) {
  memory.limit = config.memory_limit;
  control_dscp = config.dscp;
  paths.resize(config.endpoints());
  for (uint16_t e = 0; e < config.endpoints(); ++e) {
    if (e == config.endpoint) continue;
    if (!config.talks_to(e)) {
      // These two exchange no packets, so the driver need not wait for them.
      emit(Event::Type::connected, e);
      continue;
    }
    auto path = std::make_unique<Path>(e);
    path->allowed.credit = CreditPool::standing_for(config.peers_of(e));
    path->grant.granted = path->grant.granted_sent =
        CreditPool::standing_for(config.peers_of(config.endpoint));
    path->life.last_heard = now;
    path->life.ping_now = true;
    path->limit = PathLimit(config.datagram_bytes);
    if (!config.ecn) path->ecn.sent.off();
    paths[e] = std::move(path);
    touch(*paths[e]);
  }
  counters.now.path_limit = config.datagram_bytes;
  scheduler.start_at(static_cast<uint16_t>(config.endpoint + 1));
}

void Endpoint::Impl::fail(Failure why, Nanos now) {
  if (failure) return;
  failure = std::move(why);
  for (auto& [id, op] : ops) {
    fail_op(*op, failure);
    drop(*op);
  }
  ops.clear();
  op_agenda.changed.clear();
  fail_waiting([this](const OpSpec&) { return failure; });
  OpReport report;
  report.failure = failure;
  emit(Event::Type::failed, 0, std::move(report));
  for (auto& p : paths) {
    if (!p) continue;
    touch(*p);
    if (!p->farewell.gone) p->farewell.fail(now);
  }
}

void Endpoint::Impl::on_timer(Nanos now) {
  // This process was suspended, so the silence is its own and not its peers'.
  if (now - due.last_timer > config.ping_interval * 4) {
    for (auto& p : paths) {
      if (!p) continue;
      p->life.last_heard = now;
      touch(*p);
    }
  }
  due.last_timer = due.clock = now;
  sender.on_timer(now);
  settle();
  std::vector<Path*> checked;
  for (size_t i = 0; (i = due.checks.due(now, i)) != Agenda::kNone; ++i) {
    checked.push_back(paths[i].get());
    touch(*checked.back());
  }
  check_life(checked, now);
  if (!failure) {
    const bool ops_due = op_agenda.earliest() <= now;
    if (ops_due) check_deadlines(now);
    for (Path* path : checked) {
      check_limit(*path, now);
      check_probe(*path, now);
    }
    // The regions whose time has come are closed.
    for (auto& [id, op] : ops) {
      if (!ops_due || !op->aggregator || op->aggregator->sum.next_timer() > now) continue;
      op->aggregator->sum.on_timer(now);
      after_sum(*op, now);
    }
    retire(now);
  }
  finish_close(now);
}

Nanos Endpoint::Impl::next_timer() {
  settle();
  Nanos next = std::min({due.last_timer + config.ping_interval, due.sends.earliest(),
                         due.checks.earliest(), op_agenda.earliest()});
  if (!failure) next = std::min(next, due.repeat);
  if (due.pace > due.last_timer) next = std::min(next, due.pace);
  if (leaving.begun && !leaving.over)
    next = std::min(next, close_ready() ? due.last_timer : leaving.deadline);
  return next;
}

void Endpoint::Impl::close(Nanos now, Nanos linger) {
  if (leaving.begun) return;
  leaving.begun = true;
  leaving.linger = linger;
  leaving.deadline = now + linger;
  leaving.last_deadline = now + std::max(linger, config.peer_timeout);
  // A failed op returns its memory to the caller, so nothing here may read it any more.
  const auto why = [this](const OpSpec& spec) -> Failure {
    return {name(config.endpoint) + ", step " + std::to_string(spec.step) +
                ": the engine was closed in mid-step",
            -1, Cause::closed};
  };
  std::erase_if(ops, [&](auto& entry) {
    Op& op = *entry.second;
    if (!op.working()) return false;
    fail_op(op, why(op.spec));
    drop(op);
    return true;
  });
  fail_waiting(why);
  for (auto& p : paths) {
    if (!p) continue;
    p->farewell.leave(p->loss_to.share(now) <= kHeavyLoss, now);
    touch(*p);
  }
  finish_close(now);
}

bool Endpoint::Impl::farewell_over(const Path& path) const {
  const bool met = path.recovery.rtt.any() || path.acks.largest() > 0;
  return path.farewell.over(met, bool(failure));
}

bool Endpoint::Impl::close_ready() const {
  if (!failure && !ops.empty()) return false;
  return std::none_of(paths.begin(), paths.end(), [this](const auto& p) {
    return p && (p->farewell.errors_left || p->farewell.answer || !farewell_over(*p));
  });
}

void Endpoint::Impl::finish_close(Nanos now) {
  if (!leaving.begun || leaving.over) return;
  if (now < leaving.deadline && !close_ready()) return;
  // A peer that still takes results, which no other endpoint has, gets more time.
  const Nanos taken = std::min(leaving.result_taken + leaving.linger, leaving.last_deadline);
  if (!failure && now < taken && !close_ready()) {
    leaving.deadline = taken;
    return;
  }
  leaving.over = true;
  emit(Event::Type::closed);
}

Endpoint::Endpoint(const EndpointConfig& config, Nanos now)
    : impl_(std::make_unique<Impl>(config, now)) {}
Endpoint::~Endpoint() = default;

Failure Endpoint::start(OpSpec spec, Nanos now) {
  return impl_->start(std::move(spec), now);
}
void Endpoint::receive(uint16_t source, std::span<const uint8_t> datagram, Nanos now, Nanos arrival,
                       uint8_t ecn) {
  impl_->receive(source, datagram, now, arrival, ecn);
}
void Endpoint::flush(Nanos now) {
  impl_->flush(now);
}
bool Endpoint::transmit(Nanos now, Train& train, bool urgent) {
  return impl_->transmit(now, train, urgent);
}
Nanos Endpoint::next_timer() const {
  return impl_->next_timer();
}
void Endpoint::on_timer(Nanos now) {
  impl_->on_timer(now);
}
void Endpoint::limit(uint16_t peer, uint32_t bytes, Nanos now) {
  if (peer < impl_->paths.size() && impl_->paths[peer])
    impl_->limit(*impl_->paths[peer], bytes, now);
}
bool Endpoint::next_event(Event& event) {
  if (impl_->events.empty()) return false;
  event = std::move(impl_->events.front());
  impl_->events.pop_front();
  return true;
}
void Endpoint::close(Nanos now, Nanos linger) {
  impl_->close(now, linger);
}
const Counters& Endpoint::counters() const {
  impl_->counters.now.memory = impl_->memory.held();
  return impl_->counters;
}
std::vector<PeerState> Endpoint::peers(Nanos now) const {
  std::vector<PeerState> found;
  for (const auto& p : impl_->paths)
    if (p)
      found.push_back({p->peer, p->life.connected, p->life.heard, p->farewell.gone,
                       now - p->life.last_heard, p->started.by_lane(), p->state(now)});
  return found;
}
void Endpoint::fail(const std::string& why, Nanos now) {
  impl_->fail({why, impl_->config.endpoint}, now);
}

const Failure& Endpoint::failure() const {
  return impl_->failure;
}

}  // namespace gradwire
