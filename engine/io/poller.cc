// Poller: epoll with a deadline in nanoseconds.
#include "io/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace gradwire::io {
namespace {

// It is called by number: the wheels' oldest target has no wrapper for it (glibc 2.35).
#ifdef SYS_epoll_pwait2
constexpr long kEpollPwait2 = SYS_epoll_pwait2;
#else
constexpr long kEpollPwait2 = 441;
#endif

timespec to_timespec(Nanos duration) {
  timespec out{};
  out.tv_sec = static_cast<time_t>(duration / kSecond);
  out.tv_nsec = static_cast<long>(duration % kSecond);
  return out;
}

void watch(int epoll, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll, operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

void drain(int fd) {
  uint64_t value = 0;
  while (::read(fd, &value, sizeof(value)) < 0 && errno == EINTR) {
  }
}

}  // namespace

Poller::Poller(int socket) : socket_(socket) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make an epoll set");
  }
  watch(epoll_, EPOLL_CTL_ADD, socket_, EPOLLIN);
  watch(epoll_, EPOLL_CTL_ADD, wake_, EPOLLIN);

  epoll_event none{};
  const timespec zero{};
  if (::syscall(kEpollPwait2, epoll_, &none, 1, &zero, nullptr, 0) < 0) {
    timer_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (timer_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make a timer");
    watch(epoll_, EPOLL_CTL_ADD, timer_, EPOLLIN);
  }
}

Poller::~Poller() {
  close();
}

void Poller::close() {
  for (int* fd : {&timer_, &wake_, &epoll_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Poller::wake() {
  const uint64_t one = 1;
  while (::write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Poller::want_writable(bool wanted) {
  if (wanted == writable_wanted_) return;
  writable_wanted_ = wanted;
  watch(epoll_, EPOLL_CTL_MOD, socket_, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

Poller::Ready Poller::wait(Nanos timeout) {
  std::array<epoll_event, 4> events;
  int count = 0;
  if (timer_ >= 0) {
    arm_timer(timeout);
    count = ::epoll_wait(epoll_, events.data(), events.size(), timeout <= 0 ? 0 : -1);
  } else {
    const timespec limit = to_timespec(timeout < 0 ? 0 : timeout);
    count = static_cast<int>(::syscall(kEpollPwait2, epoll_, events.data(), events.size(),
                                       timeout == kNever ? nullptr : &limit, nullptr, 0));
  }
  Ready ready;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.fd == socket_) {
      ready.readable = (event.events & (EPOLLIN | EPOLLERR)) != 0;
      ready.writable = (event.events & EPOLLOUT) != 0;
    } else {
      drain(event.data.fd);
      if (event.data.fd == wake_) ready.woken = true;
    }
  }
  return ready;
}

void Poller::arm_timer(Nanos timeout) {
  itimerspec deadline{};  // all zero disarms it
  if (timeout != kNever && timeout > 0) deadline.it_value = to_timespec(timeout);
  ::timerfd_settime(timer_, 0, &deadline, nullptr);
}

}  // namespace gradwire::io
