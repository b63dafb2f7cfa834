#include "proto/endpoint.h"

#include <algorithm>

#include "proto/endpoint_impl.h"
#include "proto/text.h"

namespace gradwire {

namespace {
constexpr Nanos kConnectPing = 50 * kMillisecond;
constexpr uint32_t kFarewells = 3;  // to those of whom no answer is expected
// To those who leave as well: they may be gone before they could answer, or may not have heard.
constexpr uint32_t kMostFarewells = 6;
constexpr uint32_t kQuickProbes = 40;  // time-outs in a row before the backoff grows for good
constexpr uint32_t kQuickBackoff = 1;  // doublings until then
constexpr int kSilentPings = 5;
constexpr Nanos kMoment = kSecond / 4;
constexpr int kUrgentPings = 50;  // in place of one: most get lost, and so do the answers
constexpr uint32_t kMostProbes = 24;
constexpr uint32_t kLoudProbes = 8;      // time-outs in a row; then every eighth
constexpr uint32_t kSlowestBackoff = 8;  // doublings at the most
}  // namespace

std::string EndpointConfig::name(uint16_t number) const {
  if (number >= workers) return "server " + std::to_string(number - workers);
  return "rank " + std::to_string(ranks.empty() ? number : ranks[number]);
}

Endpoint::Impl::Impl(const EndpointConfig& c, Nanos now)
    : config(c),
      send_window(32.0 * (c.datagram_bytes + 42), 4.0 * (c.datagram_bytes + 42), 64e6,
                  c.delay_target),
      // What the peers may send without being asked is there in any case.
      receive_window(std::max<double>(24, c.workers) * (c.datagram_bytes + 42),
                     std::max<double>(24, c.workers) * (c.datagram_bytes + 42),
                     std::max(0.5 * c.receive_buffer, 8.0 * c.datagram_bytes), c.delay_target),
      last_timer(now) {
  memory.limit = config.memory_limit;
  control_dscp = config.dscp;
  paths.resize(config.endpoints());
  for (uint16_t e = 0; e < config.endpoints(); ++e) {
    if (e == config.endpoint) continue;
    if (!config.talks_to(e)) {
      // Nothing passes between them, so there is nothing to wait for.
      Event event;
      event.type = Event::Type::connected;
      event.endpoint = e;
      events.push_back(std::move(event));
      continue;
    }
    auto path = std::make_unique<Path>();
    path->peer = e;
    path->credit = standing_credit(e);
    path->granted = path->granted_sent = standing_credit(config.endpoint);
    path->last_heard = now;
    path->ping_now = true;
    path->limit = PathLimit(config.datagram_bytes);
    if (!config.ecn) path->ecn.off();
    paths[e] = std::move(path);
  }
  counters.path_limit = config.datagram_bytes;
  next_path = static_cast<uint16_t>((config.endpoint + 1) % std::max<int>(1, config.endpoints()));
}

std::string Endpoint::Impl::name(uint16_t endpoint) const {
  return config.name(endpoint);
}

void Endpoint::Impl::fail(Failure why, Nanos now) {
  if (failure) return;
  failure = std::move(why);
  for (auto& [id, op] : ops) fail_op(*op, failure);
  ops.clear();
  fail_waiting([this](const OpSpec&) { return failure; });
  Event event;
  event.type = Event::Type::failed;
  event.report.failure = failure;
  events.push_back(std::move(event));
  for (auto& p : paths) {
    if (!p || p->gone) continue;
    p->errors_left = kFarewells;
    p->next_farewell = now;
  }
}

// A peer that has been silent for several pings is asked more often: heavy loss is not death.
Nanos Endpoint::Impl::ping_interval(const Path& path, Nanos now) const {
  if (!path.connected) return kConnectPing;
  const Nanos long_silence = std::min(kSilentPings * config.ping_interval, config.peer_timeout / 2);
  const bool silent = !failure && now - path.last_heard > long_silence;
  return silent ? config.ping_interval / kUrgentPings : config.ping_interval;
}

void Endpoint::Impl::check_life(Nanos now) {
  std::vector<const Path*> silent;
  size_t peers = 0;
  for (auto& p : paths) {
    if (!p) continue;
    if (now - p->last_ping >= ping_interval(*p, now)) {
      p->last_ping = now;
      // One on trial has pings enough of its own until it is connected.
      p->ping_now = !p->gone && (p->connected || !p->limit.on_trial());
    }
    if (!p->connected) continue;
    ++peers;
    if (!p->gone || waits_for(p->peer)) silent.push_back(p.get());
  }
  if (failure || silent.empty()) return;
  const Nanos last = (*std::ranges::min_element(silent, {}, &Path::last_heard))->last_heard;
  if (now - last <= config.peer_timeout) return;
  // Those that died in the same moment were not all last heard in the same one.
  const Nanos moment = std::min(kMoment, config.peer_timeout / 8);
  std::erase_if(silent, [=](const Path* path) { return path->last_heard > last + moment; });
  fail(silence_of(std::move(silent), peers, now), now);
}

// Why nothing is heard of these peers. Where all of several fall silent together, the cause is
// this host's or its switch's; with a single peer nobody can tell whose it is.
Failure Endpoint::Impl::silence_of(std::vector<const Path*> silent, size_t peers, Nanos now) const {
  const Path& first = *silent.front();
  const Nanos silence =
      now - (*std::ranges::min_element(silent, {}, &Path::last_heard))->last_heard;
  std::string step;
  if (!ops.empty()) step = "step " + std::to_string(ops.begin()->second->spec.step) + ": ";
  const std::string setting_text = " (" + setting("peer_timeout", config.peer_timeout) + ")";
  if (first.gone) {
    const Op* op = waits_for(first.peer);
    return {name(first.peer) + " left the job and has sent nothing for " + seconds(silence) +
                setting_text + ", but step " + std::to_string(op->spec.step) +
                " still needs results of it",
            first.peer, Cause::left};
  }
  size_t quiet = 0;
  for (const auto& p : paths)
    if (p && p->connected && now - p->last_heard > config.peer_timeout - together()) ++quiet;
  if (peers > 1 && quiet == peers)
    return {step + name(config.endpoint) + " hears none of its " + std::to_string(peers) +
                " peers since " + seconds(silence) + setting_text +
                ": its host, or the switch that it is at, is cut off",
            config.endpoint, Cause::silence};
  std::string text = step + name(config.endpoint) + " has heard nothing of ";
  for (size_t i = 0; i < silent.size(); ++i) text += (i == 0 ? "" : ", ") + name(silent[i]->peer);
  text += " for " + seconds(silence) + setting_text;
  if (peers == 1)
    return {text + ": that process is dead or frozen, or the network between the two is cut", -1,
            Cause::silence};
  return {text + ", but hears the others: " +
              (silent.size() == 1 ? "that process is" : "those processes are") +
              " dead or frozen, or cut off from the network",
          first.peer, Cause::silence};
}

// Peers that fall silent within this time of each other do so for one reason.
Nanos Endpoint::Impl::together() const {
  return std::min(kSecond, config.peer_timeout / 2);
}

// Who has not started an op, as far as its peers are heard of, with when that was.
std::string Endpoint::Impl::not_begun(const Op& op, int32_t& rank, Nanos now) const {
  std::string text;
  for (uint16_t w = 0; w < config.workers; ++w) {
    if (!paths[w] || paths[w]->has_started(op.id)) continue;
    if (rank < 0) rank = w;
    text += (text.empty() ? "" : ", ") + name(w) + " has not begun it and was last heard " +
            seconds(now - paths[w]->last_heard) + " ago";
  }
  return text;
}

void Endpoint::Impl::check_deadlines(Nanos now) {
  for (auto& [id, op] : ops) {
    if (!op->worker || op->done || now < op->deadline) continue;
    std::string text = "step " + std::to_string(op->spec.step) + ", " + op_name(id) +
                       ": not complete after " + seconds(now - op->started) + " (" +
                       setting("timeout", op->spec.timeout);
    if (!op->spec.timeout_from.empty()) text += ", " + op->spec.timeout_from;
    text += "): ";
    int32_t rank = -1;
    const auto heard = [&](uint16_t e) {
      if (rank < 0) rank = e;
      return name(e) + (paths[e] ? " (last heard " + seconds(now - paths[e]->last_heard) + " ago)"
                                 : std::string());
    };
    std::string missing = not_begun(*op, rank, now);
    if (missing.empty() && op->aggregator && !op->aggregator->all_final()) {
      for (uint16_t w : op->aggregator->waiting_for())
        missing += (missing.empty() ? "a part of the gradients is missing of " : ", ") + heard(w);
    }
    if (missing.empty()) {
      for (uint16_t a = 0; a < config.aggregators(); ++a)
        if (!has_enough(*op, a))
          missing += (missing.empty() ? "results are missing of " : ", ") +
                     heard(config.aggregator_endpoint(a));
    }
    fail({text + missing, rank, Cause::timeout}, now);
    return;
  }
}

// When a path's next tail probe is due. A peer that is heard of is neither dead nor cut off: what
// does not get through to it gets lost, however often that happens in a row.
Nanos Endpoint::Impl::probe_time(const Path& path, Nanos now) const {
  const bool quick = path.probe_count < kQuickProbes || now - path.last_heard < kHeardOf;
  const uint32_t doublings =
      quick ? std::min(path.probe_count, kQuickBackoff)
            : std::min(path.probe_count - kQuickProbes + kQuickBackoff, kSlowestBackoff);
  return path.probe_base + (path.rtt.probe_timeout() << doublings);
}

// Tail probe (RFC 9002 §6.2, RFC 8985 §7): the oldest packets go again, or one goes beyond the
// credit if the word that gives more of it was lost.
void Endpoint::Impl::check_probe(Path& path, Nanos now) {
  const bool waiting = path.sent.in_flight() > 0 || path.starved;
  if (!waiting) {
    path.probe_count = 0;
    return;
  }
  if (now < probe_time(path, now)) return;
  ++path.probe_count;
  ++counters.probes;
  const Nanos answer_due = path.probe_base + path.rtt.round();
  path.probe_base = now;
  if (path.connected) path.ecn.timed_out(path.probe_count);
  // Silence on a long path: what would be a round's first window is worth trying. So it is, for
  // some time-outs, where the peer talks but does not acknowledge: most likely the way loses, or
  // the peer is late with its word. Where the peer has no room nothing is lost.
  const bool full = path.refused_there >= path.sent.lowest();
  const bool talks = path.probe_count > 1 && path.last_heard > answer_due;
  const bool loud = path.probe_count <= kLoudProbes || path.probe_count % kLoudProbes == 0;
  const bool worth_trying =
      !full && (long_path(path.rtt.minimum()) || (talks && loud && breaker.factor() == 1));
  path.probes = worth_trying ? kMostProbes : 2;
  const bool more = backlog(path) > 0;
  uint32_t again = 0;
  for (uint64_t n = path.sent.lowest(); n < path.sent.next() && again < path.probes; ++n) {
    SentPacket* packet = path.sent.find(n);
    if (!packet || packet->state != SentPacket::State::flight) continue;
    // A chunk that goes in passes does not go again now; the next one of its pass takes its place.
    if (recovered(*packet) || more) ++again;
    packet_lost(path, *packet, Again::probe, now);
  }
}

void Endpoint::Impl::on_timer(Nanos now) {
  // This process itself was frozen: the silence is ours, not the peers'.
  if (now - last_timer > config.ping_interval * 4)
    for (auto& p : paths)
      if (p) p->last_heard = now;
  last_timer = now;
  if (now - threshold_decay > kSecond) {
    threshold_decay = now;
    for (auto& p : paths)
      if (p) p->packet_threshold = std::max<uint64_t>(3, p->packet_threshold * 3 / 4);
  }
  breaker.tick(now);
  check_life(now);
  if (!failure) {
    check_deadlines(now);
    for (auto& p : paths) {
      if (!p) continue;
      check_limit(*p, now);
      check_probe(*p, now);
    }
    for (auto& [id, op] : ops) {
      if (!op->aggregator || op->aggregator->next_timer() > now) continue;
      op->aggregator->on_timer(now);
      after_sum(*op, now);
    }
    retire(now);
  }
  finish_close(now);
}

Nanos Endpoint::Impl::next_timer() const {
  Nanos next = last_timer + config.ping_interval;
  for (const auto& p : paths) {
    if (!p) continue;
    if (!p->gone) next = std::min(next, p->last_ping + ping_interval(*p, last_timer));
    next = std::min(next, p->ack_due);
    if (!failure && !p->gone && (p->connected || p->limit.on_trial()))
      next = std::min(next, p->limit.next_timer(p->rtt.round()));
    const bool bye = closing && !closed && !farewell_over(*p);
    if (p->errors_left || bye) next = std::min(next, p->next_farewell);
    if (!failure && (p->sent.in_flight() > 0 || p->starved))
      next = std::min(next, probe_time(*p, last_timer));
  }
  for (const auto& [id, op] : ops) {
    next = std::min(next, op->deadline);
    if (op->aggregator) next = std::min(next, op->aggregator->next_timer());
  }
  if (!failure) next = std::min(next, repeat_due);
  if (pace_until > last_timer) next = std::min(next, pace_until);
  if (closing && !closed) next = std::min(next, close_ready() ? last_timer : close_deadline);
  return next;
}

void Endpoint::Impl::close(Nanos now, Nanos linger) {
  if (closing) return;
  closing = true;
  close_linger = linger;
  close_deadline = now + linger;
  last_close_deadline = now + std::max(linger, config.peer_timeout);
  // What fails now gives its memory back to the caller, so nothing may read it any more.
  const auto why = [this](const OpSpec& spec) -> Failure {
    return {name(config.endpoint) + ", step " + std::to_string(spec.step) +
                ": the engine was closed in mid-step",
            -1, Cause::closed};
  };
  std::erase_if(ops, [&](auto& entry) {
    Op& op = *entry.second;
    if (!op.worker || op.done) return false;
    fail_op(op, why(op.spec));
    return true;
  });
  fail_waiting(why);
  for (auto& p : paths) {
    if (!p) continue;
    p->told = false;
    // Who left before has been answered; that may have been lost.
    p->byes_enough = p->gone && p->loss_to(now) <= kHeavyLoss ? 1 : kMostFarewells;
    p->next_farewell = now;
  }
  finish_close(now);
}

// Nothing more needs to be said to this peer: it knows that this endpoint leaves, or, where an
// answer may never come (it leaves itself, or was never here, or all has failed), should know.
bool Endpoint::Impl::farewell_over(const Path& path) const {
  if (path.told) return true;
  const bool met = path.rtt.any() || path.received.largest() > 0;
  if (!met || failure) return path.byes_sent >= std::min(path.byes_enough, kFarewells);
  return path.gone && path.byes_sent >= path.byes_enough;
}

bool Endpoint::Impl::close_ready() const {
  if (!failure && !ops.empty()) return false;
  return std::none_of(paths.begin(), paths.end(), [this](const auto& p) {
    return p && (p->errors_left || p->answer_bye || !farewell_over(*p));
  });
}

void Endpoint::Impl::finish_close(Nanos now) {
  if (!closing || closed) return;
  if (now < close_deadline && !close_ready()) return;
  // Whoever takes results that nobody else can give it is not left alone with the rest of them.
  const Nanos taken = std::min(last_result_taken + close_linger, last_close_deadline);
  if (!failure && now < taken && !close_ready()) {
    close_deadline = taken;
    return;
  }
  closed = true;
  Event event;
  event.type = Event::Type::closed;
  events.push_back(std::move(event));
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
bool Endpoint::transmit(Nanos now, Train& train) {
  return impl_->transmit(now, train);
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
  impl_->counters.memory = impl_->memory.held();
  return impl_->counters;
}
std::vector<PeerState> Endpoint::peers(Nanos now) const {
  std::vector<PeerState> found;
  for (const auto& p : impl_->paths)
    if (p) found.push_back({p->peer, p->connected, p->heard, now - p->last_heard, p->started});
  return found;
}
const Failure& Endpoint::failure() const {
  return impl_->failure;
}

}  // namespace gradwire
