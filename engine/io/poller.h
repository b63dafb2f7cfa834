// Poller is what the engine thread sleeps in: it waits for the socket, a wake-up by another thread,
// or a deadline in nanoseconds.
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
  // Closes the descriptors; wait() must not be called any more.
  void close();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Ends the present or the next wait; any thread may call it.
  void wake();
  // Sets whether a writable socket ends the wait.
  void want_writable(bool wanted);
  // Waits at most `timeout` (kNever: without end).
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
