// TapLink: the thread and its system calls.
#include "lab/tap_link.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace gradwire::lab {
namespace {

// Frames moved in one direction before the other has its turn.
constexpr int kBatch = 32;
// A sleeping thread wakes tens of microseconds late, so the end of a wait is spent spinning.
// Spinning takes at most a share of the processor's time.
constexpr Nanos kSpin = 60 * kMicrosecond;
// The share: one part in this many.
constexpr Nanos kSpinShare = 16;
// The most unused spinning time that is saved up.
constexpr Nanos kSpinSaved = kMillisecond;
// The longest rest between two looks at the devices while frames come in sequence.
constexpr Nanos kRest = 30 * kMicrosecond;
// A rest is at most one part in this many of the delay.
constexpr Nanos kRestShare = 100;
// The longest frame: a train of 64 KiB with Ethernet and virtio-net headers, and some room.
constexpr size_t kLongestFrame = (64 << 10) + 256;

Nanos now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<Nanos>(time.tv_sec) * kSecond + time.tv_nsec;
}

int duplicate(int fd) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "cannot keep a TAP device");
  return copy;
}

void make_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot use a TAP device");
  }
}

// Gives the thread precedence over everything that computes, as far as the caller is permitted to.
void hurry() {
  sched_param first{};
  first.sched_priority = 1;
  if (::pthread_setschedparam(::pthread_self(), SCHED_FIFO, &first) != 0) {
    ::setpriority(PRIO_PROCESS, 0, -15);  // on Linux this sets the thread alone
  }
  ::prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);  // the default slack would wake it up to 50 us late
}

void close_all(std::array<int, 2>& taps, int& wake) {
  for (int* fd : {&taps[0], &taps[1], &wake}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

}  // namespace

TapLink::TapLink(int first, int second, bool headed, uint64_t seed)
    : queues_{LinkQueue(headed, seed * 2), LinkQueue(headed, seed * 2 + 1)},
      scratch_(kLongestFrame) {
  try {
    taps_[0] = duplicate(first);
    taps_[1] = duplicate(second);
    for (const int tap : taps_) make_nonblocking(tap);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make a link");
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    close_all(taps_, wake_);
    throw;
  }
}

TapLink::~TapLink() {
  close();
}

void TapLink::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (wake_ >= 0) ::eventfd_write(wake_, 1);
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  close_all(taps_, wake_);
}

bool TapLink::synchronise(std::unique_lock<std::mutex>& lock) {
  const uint64_t mine = ++asked_;
  if (wake_ >= 0) ::eventfd_write(wake_, 1);
  applied_.wait(lock, [&] { return done_ >= mine || ended_; });
  return done_ >= mine;
}

void TapLink::set_options(size_t direction, const WireOptions& options) {
  std::unique_lock lock(mutex_);
  options_.at(direction) = options;
  if (!synchronise(lock)) {
    throw std::runtime_error(failure_.empty() ? "the link is closed" : failure_);
  }
}

TapCounters TapLink::counters(size_t direction) {
  std::unique_lock lock(mutex_);
  synchronise(lock);
  return counters_.at(direction);
}

Nanos TapLink::processor_time() {
  const std::lock_guard lock(mutex_);
  clockid_t clock{};
  timespec time{};
  if (!thread_.joinable() || ::pthread_getcpuclockid(thread_.native_handle(), &clock) != 0 ||
      ::clock_gettime(clock, &time) != 0) {
    return 0;
  }
  return static_cast<Nanos>(time.tv_sec) * kSecond + time.tv_nsec;
}

std::string TapLink::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void TapLink::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = text;
  stop_ = true;
}

void TapLink::run() {
  ::pthread_setname_np(::pthread_self(), "gradwire-link");
  hurry();
  uint64_t applied = 0;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      for (size_t i = 0; i < 2; ++i) {
        seen_[i].wire = queues_[i].counters();
        counters_[i] = seen_[i];
      }
      if (stop_) {
        ended_ = true;
        applied_.notify_all();
        return;
      }
      if (applied != asked_) {
        applied = asked_;
        const Nanos time = now();
        for (size_t i = 0; i < 2; ++i) queues_[i].set_options(time, options_[i]);
        done_ = applied;
        applied_.notify_all();
      }
    }
    if (!exchange()) sleep();
  }
}

// Moves frames in both directions; true when there may be more to do at once.
bool TapLink::exchange() {
  bool more = false;
  for (size_t i = 0; i < 2; ++i) {
    more |= deliver(i);
    more |= receive(i);
  }
  return more;
}

bool TapLink::deliver(size_t direction) {
  LinkQueue& queue = queues_[direction];
  for (int i = 0; i < kBatch; ++i) {
    const Nanos time = now();
    const Nanos due = queue.next_event();
    if (due > time) return false;
    moved_ = true;
    if (!queue.take(time, frame_)) continue;  // a frame moved on inside it
    TapCounters& seen = seen_[direction];
    ++seen.frames;
    seen.total_lateness += time - due;
    seen.max_lateness = std::max(seen.max_lateness, time - due);
    while (::write(taps_[1 - direction], frame_.data(), frame_.size()) < 0) {
      if (errno == EINTR) continue;
      ++seen.refused;
      break;
    }
  }
  return true;
}

bool TapLink::receive(size_t direction) {
  for (int i = 0; i < kBatch; ++i) {
    const ssize_t size = ::read(taps_[direction], scratch_.data(), scratch_.size());
    if (size < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) {
        fail(std::string("a TAP device cannot be read: ") + std::strerror(errno));
      }
      return false;
    }
    moved_ = true;
    queues_[direction].offer(now(), {scratch_.data(), static_cast<size_t>(size)});
  }
  return true;
}

// While frames come in sequence the devices are read only from time to time (interrupt moderation),
// because a wake-up costs more than a frame. The rest is a small part of the delay.
Nanos TapLink::rest_time() const {
  const Nanos delay = std::min(queues_[0].options().delay, queues_[1].options().delay);
  return std::min(kRest, delay / kRestShare);
}

void TapLink::sleep() {
  if (const Nanos rest = rest_time(); std::exchange(moved_, false) && rest > 0) {
    wait(rest, false);
    return;
  }
  const Nanos next = std::min(queues_[0].next_event(), queues_[1].next_event());
  const Nanos time = now();
  const Nanos elapsed = time - std::exchange(slept_at_, time);
  spin_left_ = std::min(spin_left_ + (spinning_ ? -elapsed : elapsed / kSpinShare), kSpinSaved);
  const Nanos left = next == kNever ? kNever : std::max<Nanos>(next - time, 0);
  spinning_ = left <= kSpin && spin_left_ > 0;
  if (spinning_) return;
  wait(left != kNever && left > kSpin && spin_left_ > kSpin ? left - kSpin : left, true);
}

// Waits for `length` (kNever: without end), for another thread's request, or, if asked, for a
// frame.
void TapLink::wait(Nanos length, bool for_frames) {
  const timespec timeout{static_cast<time_t>(length / kSecond),
                         static_cast<long>(length % kSecond)};
  std::array<pollfd, 3> fds{};
  fds[0] = {wake_, POLLIN, 0};
  fds[1] = {taps_[0], POLLIN, 0};
  fds[2] = {taps_[1], POLLIN, 0};
  const int ready = ::ppoll(fds.data(), for_frames ? fds.size() : 1,
                            length == kNever ? nullptr : &timeout, nullptr);
  if (ready <= 0) return;
  if (fds[0].revents != 0) {
    eventfd_t value = 0;
    ::eventfd_read(wake_, &value);
  }
  for (size_t i = 1; i < fds.size(); ++i) {
    if ((fds[i].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) fail("a TAP device is gone");
  }
}

}  // namespace gradwire::lab
