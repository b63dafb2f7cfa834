// The engine thread: it receives datagrams, runs timers, sends trains and passes events to the
// callers.
#include "io/loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "io/poller.h"
#include "io/priority.h"
#include "proto/path/path_limit.h"
#include "wire/packet.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradwire::io {
namespace {

// The time that close() leaves peers to take what they still need.
constexpr Nanos kLinger = 2 * kSecond;
// Trains sent before the socket is read again, so that ACKs and credit are processed soon.
constexpr int kTrainsPerTurn = 4;
// The least wait with a held train, so that timers that are due do not make the thread spin.
constexpr Nanos kHeldWait = 50 * kMicrosecond;
// ERRORs to each peer when the thread fails, and the time between them: some may be lost.
constexpr int kErrors = 3;
constexpr std::chrono::milliseconds kErrorInterval{10};
// The least that one message takes of a receive buffer: the kernel's overhead alone is more.
constexpr size_t kLeastCost = 512;
// The time from a datagram's kernel timestamp until the socket has it.
constexpr Nanos kStampSlack = kMillisecond;
// A text that is short enough to need no memory itself.
constexpr const char* kNoMemory = "out of memory";

std::chrono::nanoseconds bounded(Nanos timeout) {
  // A day at most: the library adds it to the present time, which must not overflow.
  return std::chrono::nanoseconds(std::clamp<Nanos>(timeout, 0, 86'400 * kSecond));
}

}  // namespace

struct Loop::Impl {
  Impl(const EndpointConfig& wanted, const Keys& keys, const std::string& host, uint16_t port,
       std::shared_ptr<Bell> rung)
      : config(wanted),
        gate(keys, wanted.session),
        bell(std::move(rung)),
        socket(host, port, wanted.dscp),
        poller(socket.fd()),
        owner(::getpid()) {
    // The kernel's figure includes its overhead per packet, which is up to twice the packet.
    config.receive_buffer = static_cast<uint32_t>(socket.features().receive_buffer) / 3;
    config.tag_bytes = gate.tag_bytes();
    config.ecn = config.ecn && socket.features().ecn;
    last_snapshot.features = socket.features();
  }

  // ---- called by other threads
  void require_owner() const {
    if (owner == ::getpid()) return;
    throw std::runtime_error("the engine belongs to the process that this one was forked from");
  }
  void push_command(auto&& change);
  // ---- called by the engine thread
  void run();
  void drop_early();
  void serve();
  bool take_commands();
  bool receive_batch();
  bool send_trains();
  bool send(HeldTrain& rest);
  bool send_held(HeldTrain& held);
  void hand_on_events();
  void learn_limit(uint16_t peer, uint32_t too_long);
  void refused(const Train& long_train);
  void publish();
  void note_turn(Timeline::What what);
  void give_up(const char* what);
  void fail(const std::string& why);
  void tell_peers(const std::string& why);
  void finish();
  void report_open_ops();
  bool wait_for_work();

  // Callers may have something to take; call it under `mutex`.
  void notify() {
    changed.notify_all();
    if (bell) bell->ring();
  }

  EndpointConfig config;
  Gate gate;
  std::shared_ptr<Bell> bell;
  Socket socket;
  Poller poller;
  const pid_t owner;
  std::thread thread;
  std::mutex joining;

  // Shared between threads, under `mutex`.
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<OpSpec> to_start;
  std::optional<DropOptions> new_drop;
  std::optional<Failure> given_up;  // why the caller wants the endpoint to fail
  bool close_wanted = false;
  bool snapshot_wanted = false;
  uint64_t snapshots = 0;
  Snapshot last_snapshot;
  std::optional<size_t> entries_wanted;
  std::vector<Timeline::Entry> recorded;
  std::deque<OpReport> reports;
  std::map<uint64_t, uint64_t> open_ops;  // op -> step
  std::vector<bool> answered;
  Failure failure;
  bool connected = false;
  bool finished = false;
  std::atomic<bool> commands_waiting{false};

  // Used by the engine thread only.
  std::unique_ptr<Endpoint> endpoint;
  std::vector<Address> addresses;
  std::unordered_map<Address, uint16_t, Address::Hash> sources;
  Drop drop;
  std::vector<Endpoint::Datagram> together;  // the datagrams of one message
  Train train;
  HeldTrain held;
  HeldTrain held_urgent;  // goes first
  Event event;
  Snapshot counted;
  bool closing = false;
  bool said_goodbye = false;
  Nanos give_up_at = kNever;
  Nanos drained_at = 0;  // when the socket was last empty
};

// -------------------------------------------------------------------- called by other threads

Loop::Loop(const EndpointConfig& config, const Keys& keys, const std::string& host, uint16_t port,
           std::shared_ptr<Bell> bell)
    : impl_(std::make_unique<Impl>(config, keys, host, port, std::move(bell))) {}

Loop::~Loop() {
  if (impl_->owner != ::getpid()) {
    // A forked child has the memory but not the thread; even to destroy the locks could block.
    static_cast<void>(impl_.release());
    return;
  }
  close();
}

const Address& Loop::address() const {
  return impl_->socket.address();
}
const EndpointConfig& Loop::config() const {
  return impl_->config;
}

void Loop::Impl::push_command(auto&& change) {
  {
    const std::lock_guard lock(mutex);
    change();
    commands_waiting.store(true, std::memory_order_release);
  }
  poller.wake();
}

void Loop::connect(const std::vector<std::pair<std::string, uint16_t>>& addresses) {
  Impl& impl = *impl_;
  impl.require_owner();
  if (addresses.size() != impl.config.endpoints()) {
    throw std::invalid_argument("addresses: " + std::to_string(addresses.size()) +
                                " given, one for each of " +
                                std::to_string(impl.config.endpoints()) + " endpoints needed");
  }
  std::vector<Address> resolved;
  std::unordered_map<Address, uint16_t, Address::Hash> sources;
  for (const auto& [host, port] : addresses) {
    const auto index = static_cast<uint16_t>(resolved.size());
    resolved.push_back(Address::resolve(host, port, impl.socket.address().family()));
    const auto [at, fresh] = sources.emplace(resolved.back(), index);
    if (!fresh) {
      throw std::invalid_argument("addresses: endpoints " + std::to_string(at->second) + " and " +
                                  std::to_string(index) + " are both " + resolved.back().text());
    }
  }
  const std::lock_guard lock(impl.mutex);
  if (impl.close_wanted) throw std::runtime_error("the engine is closed");
  if (impl.connected) throw std::runtime_error("the engine is connected already");
  impl.addresses = std::move(resolved);
  impl.sources = std::move(sources);
  impl.answered.assign(impl.config.endpoints(), false);
  impl.answered[impl.config.endpoint] = true;
  impl.connected = true;
  impl.thread = std::thread([&impl] { impl.run(); });
}

std::vector<uint16_t> Loop::wait_connected(Nanos timeout) {
  Impl& impl = *impl_;
  std::vector<uint16_t> missing;
  impl.require_owner();
  std::unique_lock lock(impl.mutex);
  const auto all = [&] {
    return impl.finished || impl.failure ||
           std::find(impl.answered.begin(), impl.answered.end(), false) == impl.answered.end();
  };
  impl.changed.wait_for(lock, bounded(timeout), all);
  for (size_t i = 0; i < impl.answered.size(); ++i) {
    if (!impl.answered[i]) missing.push_back(static_cast<uint16_t>(i));
  }
  return missing;
}

void Loop::start(OpSpec spec) {
  Impl& impl = *impl_;
  impl.require_owner();
  impl.push_command([&] {
    if (impl.failure) throw std::runtime_error(impl.failure.text);
    if (impl.close_wanted || impl.finished) throw std::runtime_error("the engine is closed");
    if (!impl.connected) throw std::runtime_error("the engine is not connected");
    if (!spec.plan.class_dscp.empty() && !impl.socket.features().dscp) {
      throw std::runtime_error(
          "class_dscp: the kernel takes no DSCP for each datagram (IP_TOS or IPV6_TCLASS in "
          "sendmsg); leave it out");
    }
    const auto [entry, fresh] = impl.open_ops.emplace(spec.op, spec.step);
    if (!fresh) throw std::runtime_error(op_name(spec.op) + " runs already");
    try {
      impl.to_start.push_back(std::move(spec));
    } catch (...) {
      impl.open_ops.erase(entry);  // an op that never starts must not count as running
      throw;
    }
  });
}

std::optional<OpReport> Loop::next_report(Nanos timeout) {
  Impl& impl = *impl_;
  if (impl.owner != ::getpid()) return std::nullopt;
  std::unique_lock lock(impl.mutex);
  impl.changed.wait_for(lock, bounded(timeout),
                        [&] { return impl.finished || !impl.reports.empty(); });
  if (impl.reports.empty()) return std::nullopt;
  OpReport report = std::move(impl.reports.front());
  impl.reports.pop_front();
  return report;
}

bool Loop::closed() const {
  if (impl_->owner != ::getpid()) return true;
  const std::lock_guard lock(impl_->mutex);
  return impl_->finished;
}

void Loop::set_drop(const DropOptions& options) {
  if (impl_->owner != ::getpid()) return;
  impl_->push_command([&] { impl_->new_drop = options; });
}

Snapshot Loop::snapshot() {
  Impl& impl = *impl_;
  if (impl.owner != ::getpid()) return {};
  {
    const std::lock_guard lock(impl.mutex);
    if (!impl.connected || impl.finished) return impl.last_snapshot;
  }
  uint64_t before = 0;
  impl.push_command([&] {
    before = impl.snapshots;
    impl.snapshot_wanted = true;
  });
  std::unique_lock lock(impl.mutex);
  impl.changed.wait_for(lock, bounded(kSecond),
                        [&] { return impl.finished || impl.snapshots != before; });
  return impl.last_snapshot;
}

std::vector<Timeline::Entry> Loop::record(size_t entries) {
  Impl& impl = *impl_;
  impl.require_owner();
  {
    const std::lock_guard lock(impl.mutex);
    if (!impl.connected || impl.finished) return {};
  }
  impl.push_command([&] { impl.entries_wanted = entries; });
  std::unique_lock lock(impl.mutex);
  impl.changed.wait(lock, [&] { return impl.finished || !impl.entries_wanted; });
  return std::exchange(impl.recorded, {});
}

Failure Loop::failure() const {
  if (impl_->owner != ::getpid()) return {"a forked copy"};
  const std::lock_guard lock(impl_->mutex);
  return impl_->failure;
}

void Loop::fail(const std::string& why) {
  fail(Failure{why, impl_->config.endpoint});
}

void Loop::fail(const Failure& why) {
  if (impl_->owner != ::getpid()) return;
  impl_->push_command([&] { impl_->given_up = why; });
}

void Loop::begin_close() {
  if (impl_->owner != ::getpid()) return;
  impl_->push_command([this] { impl_->close_wanted = true; });
}

void Loop::close() {
  Impl& impl = *impl_;
  if (impl.owner != ::getpid()) return;
  begin_close();
  const std::lock_guard joining(impl.joining);
  if (impl.thread.joinable()) impl.thread.join();
  impl.socket.close();
  const std::lock_guard lock(impl.mutex);
  impl.finished = true;
  impl.notify();
}

void Loop::leave_to_parent() {
  if (impl_->owner == ::getpid()) return;
  // The locks are not taken: their holders do not exist in this process. The epoll set is shared
  // with the parent, so nothing is removed from it.
  impl_->socket.close();
  impl_->poller.close();
}

// -------------------------------------------------------------------- the engine thread

void Loop::Impl::run() {
  ::pthread_setname_np(::pthread_self(), "gradwire");
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);  // replicas decode alike whatever the caller's flush-to-zero mode
#endif
  // The interpreter handles all signals. The timer slack is 1 us in place of the default 50.
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  prefer_latency();
  try {
    serve();
  } catch (const std::exception& error) {
    give_up(error.what());
  }
  finish();
}

// Drops the datagrams that arrived before the addresses were known; they will be sent again. It
// takes as many as a full buffer holds, because others may arrive as fast as they are dropped.
void Loop::Impl::drop_early() {
  const auto buffer = static_cast<size_t>(socket.features().receive_buffer);
  size_t batches = buffer / kLeastCost / Socket::kBatch + 1;
  while (batches > 0 && !socket.receive(monotonic_now()).empty()) --batches;
}

void Loop::Impl::serve() {
  drop_early();
  endpoint = std::make_unique<Endpoint>(config, monotonic_now());
  bool sending = true;   // there may be more to send
  bool readable = true;  // there may be more to receive
  while (!said_goodbye) {
    if (commands_waiting.load(std::memory_order_acquire)) sending |= take_commands();
    if (!sending && !readable) readable = wait_for_work();
    // The socket is read even while trains are sent.
    if (sending || readable) readable = receive_batch();
    const Nanos now = monotonic_now();
    if (endpoint->next_timer() <= now) endpoint->on_timer(now);
    sending = send_trains();
    hand_on_events();
    if (endpoint->timeline().on()) note_turn(Timeline::What::turn);
    if (now >= give_up_at) break;
  }
}

// Takes the callers' commands; true when one gives the endpoint something to do.
bool Loop::Impl::take_commands() {
  std::vector<OpSpec> specs;
  std::optional<Failure> why;
  bool close_now = false;
  {
    const std::lock_guard lock(mutex);
    commands_waiting.store(false, std::memory_order_relaxed);
    specs.swap(to_start);
    if (new_drop) drop = Drop(*new_drop);
    new_drop.reset();
    why.swap(given_up);
    close_now = close_wanted && !closing;
    if (snapshot_wanted) publish();
    if (entries_wanted) {
      recorded = endpoint->timeline().take();
      endpoint->timeline().keep(*std::exchange(entries_wanted, {}));
      notify();
    }
  }
  for (OpSpec& spec : specs) {
    const uint64_t op = spec.op;
    const uint64_t step = spec.step;
    Failure wrong = endpoint->start(std::move(spec), monotonic_now());
    if (!wrong) continue;
    OpReport report;
    report.op = op;
    report.step = step;
    report.failure = std::move(wrong);
    const std::lock_guard lock(mutex);
    open_ops.erase(op);
    reports.push_back(std::move(report));
    notify();
  }
  if (why) endpoint->give_up(*why, monotonic_now());
  if (close_now) {
    closing = true;
    const Nanos now = monotonic_now();
    give_up_at = now + std::max(kLinger, config.peer_timeout) + kSecond / 2;
    endpoint->close(now, kLinger);
  }
  return close_now || why || !specs.empty();
}

// Sleeps until there is something to do; true when there is something to receive.
bool Loop::Impl::wait_for_work() {
  const bool full = held.held() || held_urgent.held();
  poller.want_writable(full);
  const Nanos deadline = std::min(endpoint->next_timer(), give_up_at);
  Nanos timeout = kNever;
  if (deadline != kNever) timeout = std::max<Nanos>(deadline - monotonic_now(), 0);
  // A pacing timer stays due while the socket takes nothing, so the wait has a minimum.
  if (full) timeout = std::max(timeout, kHeldWait);
  ++counted.wakeups;
  if (!endpoint->timeline().on()) return poller.wait(timeout).readable;
  if (full) endpoint->timeline().note(monotonic_now(), Timeline::What::blocked);
  note_turn(Timeline::What::sleep);
  const bool readable = poller.wait(timeout).readable;
  note_turn(Timeline::What::turn);
  return readable;
}

// Notes the processor time of this thread beside the time.
void Loop::Impl::note_turn(Timeline::What what) {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  endpoint->timeline().note(monotonic_now(), what, Timeline::kNobody,
                            used.tv_sec * kSecond + used.tv_nsec);
}

// Receives one batch; true when the socket may hold more.
bool Loop::Impl::receive_batch() {
  const Nanos looked_at = monotonic_now();
  const auto messages = socket.receive(looked_at);
  const Nanos empty_at = drained_at;  // these messages arrived later
  if (messages.size() < Socket::kBatch) drained_at = looked_at;
  if (messages.empty()) return false;
  const Nanos now = monotonic_now();
  for (const Socket::Message& message : messages) {
    const size_t datagrams = (message.bytes.size() + message.segment - 1) / message.segment;
    const auto source = sources.find(*message.source);
    if (source == sources.end()) {
      counted.strangers += datagrams;
      continue;
    }
    // A timestamp in the future, or well before the socket was last empty, comes from a step of the
    // wall clock.
    Nanos arrival = message.arrival;
    if (arrival > now || arrival < std::max(now - kSecond, empty_at - kStampSlack)) arrival = now;
    together.clear();
    for (size_t at = 0; at < message.bytes.size(); at += message.segment) {
      const auto datagram =
          message.bytes.subspan(at, std::min(message.segment, message.bytes.size() - at));
      const auto opened = gate.open(source->second, datagram);
      if (opened.empty()) continue;
      if (drop.active() && opened.size() >= wire::kHeaderBytes &&
          wire::is_reliable(static_cast<wire::Kind>(opened[1])) && drop.next()) {
        ++counted.injected;
        continue;
      }
      together.push_back(opened);
    }
    endpoint->receive(source->second, together, now, arrival, message.ecn, message.buffer);
  }
  endpoint->flush(monotonic_now());
  return messages.size() == Socket::kBatch;
}

// Sends the train that has been written; false when the socket is full, and `rest` keeps what is
// left.
bool Loop::Impl::send(HeldTrain& rest) {
  const uint64_t before = socket.counters().too_long;
  gate.seal(train);
  const uint32_t taken = socket.send(addresses[train.destination], train, 0);
  if (socket.counters().too_long != before) refused(train);
  if (taken == train.count) return true;
  rest.hold(train, taken);
  return false;
}

// Sends what is left of a train; false when the socket still is full.
bool Loop::Impl::send_held(HeldTrain& held) {
  if (!held.held()) return true;
  const uint64_t before = socket.counters().too_long;
  held.first = socket.send(addresses[held.train().destination], held.train(), held.first);
  if (socket.counters().too_long != before) refused(held.train());
  if (held.first < held.train().count) return false;
  held.release();
  return true;
}

// Sends a turn's trains; true when something was sent, since there may be more. Once the socket is
// full nothing is sent in this turn.
bool Loop::Impl::send_trains() {
  if (!send_held(held_urgent)) return false;
  // The kernel takes a message of any length while its buffer has any room, so a train that waits
  // would fill it again, and leave none for what is urgent.
  while (held.held() && endpoint->transmit(monotonic_now(), train, true))
    if (!send(held_urgent)) return false;
  if (!send_held(held)) return false;
  for (int i = 0; i < kTrainsPerTurn; ++i) {
    if (!endpoint->transmit(monotonic_now(), train)) return i > 0;
    if (!send(held)) return false;
  }
  return true;
}

// The kernel has refused a train as too long. A ping may try a length that is known to be so.
void Loop::Impl::refused(const Train& long_train) {
  learn_limit(long_train.destination, long_train.whole ? 0 : long_train.segment_bytes);
}

// Applies the kernel's length for a route: the MTU of its interface, or what routers have reported.
// `too_long`: the length of a datagram that the kernel has just refused; 0: none.
void Loop::Impl::learn_limit(uint16_t peer, uint32_t too_long) {
  uint32_t bytes = socket.route_limit(addresses[peer]);
  bytes -= std::min(bytes, gate.tag_bytes());
  if (too_long && (bytes == 0 || bytes >= too_long))
    bytes = PathLimit::shorter(too_long, gate.tag_bytes());
  if (bytes) endpoint->limit(peer, bytes, monotonic_now());
}

void Loop::Impl::hand_on_events() {
  while (endpoint->next_event(event)) {
    if (event.type == Event::Type::suspect) {
      learn_limit(event.endpoint, 0);
      continue;
    }
    const std::lock_guard lock(mutex);
    switch (event.type) {
      case Event::Type::op_done:
        open_ops.erase(event.report.op);
        reports.push_back(std::move(event.report));
        break;
      case Event::Type::connected:
        if (event.endpoint < answered.size()) answered[event.endpoint] = true;
        break;
      case Event::Type::failed:
        failure = std::move(event.report.failure);
        break;
      case Event::Type::closed:
        said_goodbye = true;
        break;
      case Event::Type::suspect:
        break;
    }
    event = Event{};
    notify();
  }
}

void Loop::Impl::publish() {
  counted.socket = socket.counters();
  counted.gate = gate.counters();
  counted.features = socket.features();
  if (endpoint) {
    counted.endpoint = endpoint->counters();
    counted.endpoint.now.path_limit += gate.tag_bytes();
    counted.peers = endpoint->peers(monotonic_now());
  }
  last_snapshot = counted;
  snapshot_wanted = false;
  ++snapshots;
  notify();
}

// An exception has ended the thread, most likely for a lack of memory.
void Loop::Impl::give_up(const char* what) {
  try {
    const std::lock_guard lock(mutex);
    publish();
  } catch (const std::exception&) {
    // Its last counters are those of an earlier moment.
  }
  endpoint.reset();  // what follows may need its memory
  try {
    const std::string why = std::string("the engine thread failed: ") + what;
    fail(why);
    tell_peers(why);
  } catch (const std::exception&) {
    // They notice the silence; this process lives on.
    const std::lock_guard lock(mutex);
    if (!failure) failure.text = kNoMemory;
  }
}

void Loop::Impl::fail(const std::string& why) {
  const std::lock_guard lock(mutex);
  if (!failure) failure = {why, config.endpoint};
}

// Reports this thread's failure to the peers, which else would wait until it has been silent for
// long. The endpoint is not asked, since an exception may have left it half changed.
void Loop::Impl::tell_peers(const std::string& why) {
  const Failure reported{why, config.endpoint};
  for (int i = 0; i < kErrors; ++i) {
    if (i) std::this_thread::sleep_for(kErrorInterval);
    for (uint16_t peer = 0; peer < config.endpoints(); ++peer) {
      if (peer == config.endpoint || !config.talks_to(peer)) continue;
      write_error(config, reported, peer, train);
      gate.seal(train);
      socket.send(addresses[peer], train, 0);
    }
  }
}

// Ends the engine: from here on the thread touches no caller's memory.
void Loop::Impl::finish() {
  const std::lock_guard lock(mutex);
  try {
    if (endpoint) publish();
    endpoint.reset();
    report_open_ops();
  } catch (const std::exception&) {
    endpoint.reset();
    if (!failure) failure.text = kNoMemory;
  }
  open_ops.clear();
  to_start.clear();
  finished = true;
  notify();
}

void Loop::Impl::report_open_ops() {
  for (const auto& [op, step] : open_ops) {
    OpReport report;
    report.op = op;
    report.step = step;
    report.failure = failure;
    if (!failure) {
      report.failure = {"the engine was closed before the all-reduce was complete", -1,
                        Cause::closed};
    }
    report.failure.text = config.name(config.endpoint) + ", step " + std::to_string(step) + ": " +
                          report.failure.text;
    reports.push_back(std::move(report));
  }
}

}  // namespace gradwire::io
