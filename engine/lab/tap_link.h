// TapLink is the lab's own link: a thread between two TAP devices. A frame that a host sends on one
// device comes out of the other when, and if, a LinkQueue releases it.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lab/link_queue.h"

namespace gradwire::lab {

struct TapCounters {
  WireCounters wire;
  uint64_t frames = 0;   // that came out
  uint64_t refused = 0;  // of these, frames that the device, being down, refused
  // How late frames came out: the sum over all frames, and the largest.
  Nanos total_lateness = 0;
  Nanos max_lateness = 0;
};

class TapLink {
 public:
  // `first`, `second`: descriptors of TAP devices, both with virtio-net headers or both without;
  // they are duplicated. Both directions start with WireOptions{}. Throws std::system_error.
  TapLink(int first, int second, bool headed, uint64_t seed);
  ~TapLink();
  TapLink(const TapLink&) = delete;
  TapLink& operator=(const TapLink&) = delete;

  // Sets valid options of a direction and returns when they apply. Direction 0 is from the first to
  // the second device. Throws std::runtime_error with the text of failure() if there is one.
  void set_options(size_t direction, const WireOptions& options);
  TapCounters counters(size_t direction);
  // The processor time that the thread has used, for both directions.
  Nanos processor_time();
  // Why the thread ended by itself; an empty string while it runs.
  std::string failure() const;
  void close();

 private:
  // Makes the thread publish its counters and apply options_; false when the thread has ended.
  bool synchronise(std::unique_lock<std::mutex>& lock);
  void run();
  bool exchange();
  bool deliver(size_t direction);
  bool receive(size_t direction);
  Nanos rest_time() const;
  void sleep();
  void wait(Nanos length, bool for_frames);
  void fail(const std::string& text);

  std::array<int, 2> taps_{-1, -1};
  int wake_ = -1;
  std::array<LinkQueue, 2> queues_;
  std::array<TapCounters, 2> seen_;
  std::vector<uint8_t> scratch_;
  std::vector<uint8_t> frame_;
  // The thread's own, like all members before the mutex: a frame was moved since the last rest.
  bool moved_ = false;
  // The thread's own: the time up to which spin_left_ is accounted, and the time it may still spin.
  Nanos slept_at_ = 0;
  Nanos spin_left_ = 0;
  bool spinning_ = false;

  mutable std::mutex mutex_;  // guards all that follows; never held while frames are moved
  std::condition_variable applied_;
  std::array<WireOptions, 2> options_;
  std::array<TapCounters, 2> counters_;
  uint64_t asked_ = 0;
  uint64_t done_ = 0;
  bool stop_ = false;
  bool ended_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace gradwire::lab
