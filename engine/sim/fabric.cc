// Fabric: the event queue, the hosts and their ops.
#include "sim/fabric.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace gradwire::sim {
namespace {

// An op that a worker has not started.
constexpr uint32_t kNoRun = 0xffffffff;
// Steps of one host at one instant, more than any correct endpoint needs; beyond them it spins.
constexpr uint32_t kMostStepsAtOnce = 20'000;
// Trains of one step, likewise.
constexpr uint32_t kMostTrainsAtOnce = 200'000;
// Millionths by which a clock may be fast or slow; quartz and NTP stay below.
constexpr double kMostPpm = 1000;

}  // namespace

std::string FabricOptions::validate() const {
  if (workers < 1) return "workers: at least 1 is needed";
  if (uint32_t{workers} + servers > 4096) return "workers + servers: at most 4096 are simulated";
  if (host_delay < 0 || host_jitter < 0) return "host_delay and host_jitter must not be negative";
  if (send_time < 0) return "send_time must not be negative";
  if (beside && beside->hosts() != size_t{workers} + servers) {
    return "beside: two jobs on the same ports have as many hosts";
  }
  return link.validate();
}

Fabric::Fabric(const FabricOptions& options) : options_(options), random_(options.seed) {
  if (const std::string wrong = options.validate(); !wrong.empty()) {
    throw std::invalid_argument(wrong);
  }
  if (options.beside) now_ = options.beside->now_;
  options_.endpoint.workers = options.workers;
  options_.endpoint.servers = options.servers;
  const uint16_t count = options_.endpoint.endpoints();
  hosts_.resize(count);
  queue_ = EventQueue(2 * size_t{count});
  parted_.assign(size_t{count} * count, false);
  hearing_ = Hearing(count);
  for (uint16_t i = 0; i < count; ++i) {
    Host& host = hosts_[i];
    host.session = options_.endpoint.session;
    if (options.beside) {
      host.up = options.beside->hosts_[i].up;
      host.down = options.beside->hosts_[i].down;
    } else {
      host.up = std::make_shared<Link>(options.link, random_.next());
      host.down = std::make_shared<Link>(options.link, random_.next());
    }
    make_endpoint(i);
  }
}

void Fabric::make_endpoint(uint16_t index) {
  Host& host = hosts_[index];
  EndpointConfig config = options_.endpoint;
  config.endpoint = index;
  config.session = host.session;
  host.packet_numbers.assign(hosts_.size(), 0);
  host.endpoint = std::make_unique<Endpoint>(config, local(host, now_));
  host.timer_for = kNever;
  host.timer_at = now_;
  push(now_, Event::Kind::timer, index);
}

Fabric::~Fabric() = default;

Link& Fabric::link(uint16_t host, Direction direction) {
  return direction == Direction::up ? *hosts_.at(host).up : *hosts_.at(host).down;
}

void Fabric::add_cross_traffic(uint16_t host, Direction direction, const CrossTraffic& traffic) {
  if (!(traffic.rate > 0.0) || traffic.length <= 0 || traffic.train == 0 ||
      (traffic.period != 0 && traffic.period < traffic.length)) {
    throw std::invalid_argument(
        "cross traffic: rate, length and train are positive, a period is 0 or at least the length");
  }
  const Nanos start = std::max(traffic.start, now_);
  cross_.push_back({host, direction, traffic, start + traffic.length});
  push(start, Event::Kind::cross, static_cast<uint32_t>(cross_.size() - 1));
}

size_t Fabric::add_flow(uint16_t host, Direction direction, const TcpFlowOptions& flow) {
  if (const std::string wrong = flow.validate(); !wrong.empty()) {
    throw std::invalid_argument(wrong);
  }
  flows_.push_back({host, direction, TcpFlow(flow)});
  push(std::max(flow.start, now_), Event::Kind::flow, static_cast<uint32_t>(flows_.size() - 1));
  return flows_.size() - 1;
}

void Fabric::set_clock(uint16_t host, double ppm) {
  if (!(std::abs(ppm) <= kMostPpm)) {
    throw std::invalid_argument("ppm is " + std::to_string(ppm) + "; allowed are -1000 to 1000");
  }
  if (now_ != 0) throw std::invalid_argument("set_clock: a clock's rate is set before the run");
  hosts_.at(host).clock = ppm * 1e-6;
}

Nanos Fabric::local(const Host& host, Nanos time) {
  return time + std::llround(host.clock * static_cast<double>(time)) + host.ahead;
}

// The first instant at which a host's clock shows `time`.
Nanos Fabric::from_local(const Host& host, Nanos time) {
  auto there = static_cast<Nanos>(static_cast<double>(time - host.ahead) / (1.0 + host.clock));
  while (local(host, there) < time) ++there;
  return there;
}

void Fabric::jump_clock(uint16_t host, Nanos by) {
  if (by < 0) throw std::invalid_argument("jump_clock: a monotonic clock never goes back");
  Host& h = hosts_.at(host);
  h.ahead += by;
  h.timer_at = h.timer_for = kNever;
  if (!h.dead && !h.paused) schedule_timer(host);
}

void Fabric::pause(uint16_t host) {
  Host& h = hosts_.at(host);
  if (!h.paused) h.paused_at = now_;
  h.paused = true;
}

void Fabric::resume(uint16_t host, bool stood) {
  Host& h = hosts_.at(host);
  if (!h.paused) return;
  h.paused = false;
  if (stood) {
    h.ahead -= local(h, now_) - local(h, h.paused_at);
    for (Arrived& arrived : h.ring) arrived.time = now_;  // its network stood still as well
    h.timer_at = h.timer_for = kNever;
  }
  h.wake_due = true;
  push(now_, Event::Kind::wake, host);
  for (const uint32_t run : h.asked) push(now_, Event::Kind::start, run);
  h.asked.clear();
}

void Fabric::kill(uint16_t host) {
  Host& h = hosts_.at(host);
  if (h.dead) return;
  h.dead = true;
  for (const Run& run : runs_) {
    if (run.worker == host && !run.done && !run.over) --open_runs_;
  }
}

void Fabric::restart(uint16_t host, uint32_t session) {
  Host& h = hosts_.at(host);
  if (session == h.session) throw std::invalid_argument("restart: a new process has a new session");
  if (session != options_.endpoint.session) end_session();
  options_.endpoint.session = h.session = session;
  for (const Arrived& arrived : h.ring) free_unit(arrived.unit);
  h.ring.clear();
  h.ring_bytes = 0;
  h.busy_until = now_;
  h.dead = h.paused = h.closed = h.wake_due = false;
  h.failure.clear();
  h.asked.clear();
  make_endpoint(host);
}

// Ends the ops of all hosts. Endpoints of the old session go on until they are started anew, and
// nothing is expected of them any more.
void Fabric::end_session() {
  violations();  // compares their buffers once more
  for (Run& run : runs_) run.over = true;
  open_runs_ = 0;
  by_op_.clear();
  payloads_.clear();
  passes_ = {};
}

void Fabric::set_cut(uint16_t from, uint16_t to, bool cut) {
  static_cast<void>(hosts_.at(to));
  parted_.at(size_t{from} * hosts_.size() + to) = cut;
}

void Fabric::set_partition(uint16_t a, uint16_t b, bool parted) {
  parted_.at(size_t{a} * hosts_.size() + b) = parted;
  parted_.at(size_t{b} * hosts_.size() + a) = parted;
}

bool Fabric::reachable(uint16_t from, uint16_t to) const {
  return !hosts_[to].dead && !hosts_[to].closed && !parted_[size_t{from} * hosts_.size() + to];
}

void Fabric::inject(uint16_t source, uint16_t destination, std::span<const uint8_t> bytes) {
  const uint32_t unit = new_unit();
  units_[unit].source = source;
  units_[unit].destination = destination;
  units_[unit].segment = static_cast<uint32_t>(std::max<size_t>(bytes.size(), 1));
  units_[unit].packets = 1;
  units_[unit].forged = true;
  units_[unit].trace = kUntraced;
  units_[unit].bytes.assign(bytes.begin(), bytes.end());
  static_cast<void>(hosts_.at(destination));  // throws where there is no such host
  push(now_, Event::Kind::at_host, unit);
}

void Fabric::start(uint16_t worker, OpSpec spec, std::vector<float> data, Nanos at) {
  if (worker >= options_.workers) throw std::invalid_argument("worker: there is no such worker");
  std::vector<uint32_t>& slots = by_op_[spec.op];
  slots.resize(options_.workers, kNoRun);
  if (slots[worker] != kNoRun) throw std::invalid_argument("op: this worker has it already");
  slots[worker] = static_cast<uint32_t>(runs_.size());
  runs_.emplace_back();
  Run& run = runs_.back();
  run.worker = worker;
  run.spec = std::move(spec);
  run.input = data;
  run.data = std::move(data);
  run.spec.data = {reinterpret_cast<uint8_t*>(run.data.data())};
  if (!hosts_[worker].dead) ++open_runs_;
  push(std::max(at, now_), Event::Kind::start, slots[worker]);
}

void Fabric::close(uint16_t host, Nanos linger) {
  Host& h = hosts_.at(host);
  if (h.dead || h.paused) return;
  h.endpoint->close(local(h, now_), linger);
  step(host);
}

void Fabric::forget() {
  violations();  // compares their buffers once more
  std::erase_if(by_op_, [this](const auto& entry) {
    const std::vector<uint32_t>& slots = entry.second;
    const bool over = std::all_of(slots.begin(), slots.end(), [this](uint32_t slot) {
      return slot != kNoRun && runs_[slot].done;
    });
    if (!over) return false;
    passes_.forget(static_cast<uint32_t>(entry.first));
    for (const uint32_t slot : slots) {
      Run& run = runs_[slot];
      run.spec = {};
      run.report = {};
      for (std::vector<float>* values : {&run.input, &run.data}) {
        std::vector<float>().swap(*values);
      }
    }
    return true;
  });
  std::erase_if(payloads_, [this](const auto& entry) { return !by_op_.contains(entry.first.op); });
}

bool Fabric::run(Nanos until, bool until_done) {
  while (violations_.empty()) {
    if (until_done && open_runs_ == 0) return true;
    if (queue_.empty() || queue_.top().time > until) {
      now_ = std::max(now_, until);
      break;
    }
    next();
  }
  return open_runs_ == 0;
}

void Fabric::run_beside(Fabric& other, Nanos until) {
  while (violations_.empty() && other.violations_.empty() && open_runs_ > 0 &&
         other.open_runs_ > 0) {
    Fabric& first = next_event() <= other.next_event() ? *this : other;
    if (first.next_event() > until) {
      now_ = other.now_ = until;
      return;
    }
    first.next();
  }
}

bool Fabric::run_together(std::span<Fabric* const> fabrics, Nanos until) {
  const auto over = [](const Fabric* fabric) {
    return fabric->open_runs_ == 0 || fabric->broken();
  };
  while (!std::ranges::all_of(fabrics, over)) {
    Fabric& first = **std::ranges::min_element(fabrics, {}, &Fabric::next_event);
    if (first.next_event() > until) {
      for (Fabric* fabric : fabrics) fabric->now_ = until;
      return false;
    }
    first.next();
  }
  return true;
}

void Fabric::next() {
  const Event event = queue_.pop();
  now_ = event.time;
  handle(event);
  if (sequence_ > options_.most_events)
    violate("a storm: more than " + std::to_string(options_.most_events) + " events");
}

void Fabric::push(Nanos time, Event::Kind kind, uint32_t index, uint16_t stream) {
  queue_.push({time, sequence_++, index, kind, stream});
}

void Fabric::handle(const Event& event) {
  switch (event.kind) {
    case Event::Kind::at_switch:
      at_switch(event.index);
      break;
    case Event::Kind::at_host:
      at_host(event.index);
      break;
    case Event::Kind::wake:
      hosts_[event.index].wake_due = false;
      step(static_cast<uint16_t>(event.index));
      break;
    case Event::Kind::timer: {
      Host& host = hosts_[event.index];
      if (host.timer_at != event.time) break;  // replaced by an earlier one
      host.timer_at = host.timer_for = kNever;
      step(static_cast<uint16_t>(event.index));
      break;
    }
    case Event::Kind::start:
      begin(runs_[event.index]);
      break;
    case Event::Kind::cross:
      cross_packet(event.index);
      break;
    case Event::Kind::flow_acked:
      flows_[event.index].flow.acked();
      flow_packets(event.index);
      break;
    case Event::Kind::flow_lost:
      flows_[event.index].flow.lost(now_);
      [[fallthrough]];
    case Event::Kind::flow:
      flow_packets(event.index);
      break;
  }
}

// One turn of a host, like a turn of io's loop.
void Fabric::step(uint16_t index) {
  Host& host = hosts_[index];
  if (host.dead || host.closed || host.paused) return;
  if (now_ < host.busy_until) return;  // it wakes when its send call is over
  if (host.stepped_at != now_) host.steps_at_once = 0;
  host.stepped_at = now_;
  if (++host.steps_at_once > kMostStepsAtOnce) {
    violate("endpoint " + std::to_string(index) + " spins: its timer does not advance");
    return;
  }
  const Nanos time = local(host, now_);
  if (!host.ring.empty()) {
    take_arrived(host);
    host.endpoint->flush(time);
  }
  if (host.endpoint->next_timer() <= time) host.endpoint->on_timer(time);
  uint32_t trains = 0;
  while (host.endpoint->transmit(time, train_)) {
    if (++trains > kMostTrainsAtOnce) {
      violate("endpoint " + std::to_string(index) + " sends without end");
      return;
    }
    launch(index, train_);
    if (options_.send_time == 0) continue;
    host.busy_until = now_ + options_.send_time;
    push(host.busy_until, Event::Kind::wake, index);
    break;
  }
  while (host.endpoint->next_event(event_)) take_event(index, event_);
  schedule_timer(index);
}

void Fabric::take_arrived(Host& host) {
  const Nanos time = local(host, now_);
  std::erase_if(host.held, [](const Received& each) { return each.buffer.holders == 0; });
  while (!host.ring.empty()) {
    const Arrived arrived = host.ring.front();
    host.ring.pop_front();
    Unit& unit = units_[arrived.unit];
    host.ring_bytes -= unit.bytes.size();
    Buffer* buffer = nullptr;
    std::span<const uint8_t> bytes = unit.bytes;
    if (host.held.size() < kMostHeld) {
      Received& received = host.held.emplace_back(Received{std::exchange(unit.bytes, {})});
      received.buffer.bytes = bytes = received.bytes;
      buffer = &received.buffer;
    }
    run_.clear();
    for (size_t at = 0; at == 0 || at < bytes.size(); at += unit.segment) {
      run_.push_back(bytes.subspan(at, std::min<size_t>(unit.segment, bytes.size() - at)));
      note_bitmap(unit.destination, unit.source, run_.back());
    }
    host.endpoint->receive(unit.source, run_, time, local(host, arrived.time), unit.ecn, buffer);
    if (buffer && buffer->holders == 0) {
      unit.bytes = std::move(host.held.back().bytes);
      host.held.pop_back();
    }
    free_unit(arrived.unit);
  }
}

void Fabric::schedule_timer(uint16_t index) {
  Host& host = hosts_[index];
  const Nanos next = host.endpoint->next_timer();
  if (next == kNever || next >= host.timer_for || now_ < host.busy_until) return;
  host.timer_for = next;
  // A host wakes late for a timer as it does for a datagram.
  const Nanos due = from_local(host, next);
  const Nanos at = due <= now_ ? now_ : due + lateness();
  if (at >= host.timer_at) return;
  host.timer_at = at;
  push(at, Event::Kind::timer, index);
}

// How long a host takes to wake.
Nanos Fabric::lateness() {
  if (options_.host_jitter == 0) return options_.host_delay;
  const double jitter = random_.uniform() * static_cast<double>(options_.host_jitter);
  return options_.host_delay + static_cast<Nanos>(jitter);
}

void Fabric::begin(Run& run) {
  Host& host = hosts_[run.worker];
  if (host.dead || run.over) return;
  if (host.paused) {  // the caller of start() is suspended too
    host.asked.push_back(by_op_[run.spec.op][run.worker]);
    return;
  }
  run.begun = true;
  if (Failure wrong = host.endpoint->start(run.spec, local(host, now_))) {
    OpReport report;
    report.op = run.spec.op;
    report.step = run.spec.step;
    report.failure = std::move(wrong);
    finish(run, std::move(report));
  }
  step(run.worker);
}

void Fabric::take_event(uint16_t index, gradwire::Event& event) {
  Host& host = hosts_[index];
  switch (event.type) {
    case gradwire::Event::Type::op_done: {
      if (host.session != options_.endpoint.session) break;
      const auto found = by_op_.find(event.report.op);
      const uint32_t slot =
          found == by_op_.end() || index >= options_.workers ? kNoRun : found->second[index];
      if (slot == kNoRun || !runs_[slot].begun) {
        violate("endpoint " + std::to_string(index) + " reports " + op_name(event.report.op) +
                ", which it never started");
      } else if (runs_[slot].done) {
        violate("rank " + std::to_string(index) + " reports " + op_name(event.report.op) +
                " twice");
      } else {
        finish(runs_[slot], std::move(event.report));
      }
      break;
    }
    case gradwire::Event::Type::failed:
      host.failure = event.report.failure.text;
      break;
    case gradwire::Event::Type::closed:
      host.closed = true;
      break;
    case gradwire::Event::Type::connected:
    case gradwire::Event::Type::suspect:  // the simulator has no routes to ask
      break;
  }
  event = {};
}

void Fabric::finish(Run& run, OpReport report) {
  run.done = true;
  run.report = std::move(report);
  run.result = fingerprint(std::as_bytes(std::span(run.data)));
  run.finished_at = now_;
  --open_runs_;
  hash(static_cast<uint64_t>(now_));
  hash(std::span(reinterpret_cast<const uint8_t*>(run.data.data()),
                 run.data.size() * sizeof(float)));
  hash(run.report.counted);
  check_op(run.spec.op);
}

bool Fabric::met() const {
  return std::ranges::all_of(hosts_, [this](const Host& host) {
    const std::vector<PeerState> peers = host.endpoint->peers(local(host, now_));
    return std::ranges::all_of(peers, &PeerState::answered);
  });
}

const OpReport* Fabric::report(uint16_t worker, uint64_t op) const {
  const auto found = by_op_.find(op);
  if (found == by_op_.end() || worker >= options_.workers) return nullptr;
  const uint32_t slot = found->second[worker];
  return slot != kNoRun && runs_[slot].done ? &runs_[slot].report : nullptr;
}

const std::vector<float>* Fabric::data(uint16_t worker, uint64_t op) const {
  const auto found = by_op_.find(op);
  if (found == by_op_.end() || worker >= options_.workers) return nullptr;
  const uint32_t slot = found->second[worker];
  return slot != kNoRun ? &runs_[slot].data : nullptr;
}

Nanos Fabric::finished_at(uint16_t worker, uint64_t op) const {
  const auto found = by_op_.find(op);
  if (found == by_op_.end() || worker >= options_.workers) return kNever;
  const uint32_t slot = found->second[worker];
  return slot != kNoRun ? runs_[slot].finished_at : kNever;
}

}  // namespace gradwire::sim
