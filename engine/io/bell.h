// Bell wakes a thread that waits for several engine threads at once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace gradwire::io {

class Bell {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void ring() {
    {
      const std::lock_guard lock(mutex_);
      ++rung_;
    }
    changed_.notify_all();
  }
  // How often it has rung.
  uint64_t rung() const {
    const std::lock_guard lock(mutex_);
    return rung_;
  }
  // Waits until it has rung more often than `before`; false when the time is up first.
  bool wait(uint64_t before, Time until) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, until, [&] { return rung_ != before; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t rung_ = 0;
};

}  // namespace gradwire::io
