// What the engine thread sleeps on: the socket, a wake-up by other threads, a deadline in ns.
#pragma once

#include "proto/base/time.h"

namespace gradwire::io {

class Poller {
 public:
  struct Ready {
    bool readable = false;
    bool writable = false;
    bool woken = false;
  };

  // Throws std::system_error.
  explicit Poller(int socket);
  ~Poller();
  // Nothing may be waited for any more.
  void close();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // From any thread: ends the present or the next wait.
  void wake();
  // Whether a socket that takes datagrams again ends the wait.
  void want_writable(bool wanted);
  // Sleeps at most `timeout` (kNever: without end).
  Ready wait(Nanos timeout);

 private:
  void arm_timer(Nanos timeout);

  int socket_;
  int epoll_ = -1;
  int wake_ = -1;
  int timer_ = -1;  // only on kernels without epoll_pwait2 (before 5.11)
  bool writable_wanted_ = false;
};

}  // namespace gradwire::io
