// The lab's own link: a thread between two TAP devices. What a host sends on one comes out of the
// other when, and if, a LinkQueue lets it.
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
  uint64_t refused = 0;  // of these, that the far device did not take (it is down)
  // How long after they were due frames came out: the sum over all frames, and the worst.
  Nanos total_lateness = 0;
  Nanos max_lateness = 0;
};

class TapLink {
 public:
  // `first`, `second`: descriptors of TAP devices, both with virtio-net headers or both without;
  // they are duplicated. Starts with both directions as WireOptions{}.
  // Throws std::system_error.
  TapLink(int first, int second, bool headed, uint64_t seed);
  ~TapLink();
  TapLink(const TapLink&) = delete;
  TapLink& operator=(const TapLink&) = delete;

  // Direction 0 is from the first to the second device. Returns when the options are in force. They
  // must be valid. Throws std::runtime_error with the text of failure() when there is one.
  void set_options(size_t direction, const WireOptions& options);
  TapCounters counters(size_t direction);
  // Processor time that the thread has taken, for both directions.
  Nanos processor_time();
  // Why the thread ended by itself; "" while all is well.
  std::string failure() const;
  void close();

 private:
  // Has the thread publish its counters and take over options_. False if it has ended.
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
  bool moved_ = false;  // the thread's, like all before the mutex: whether a frame was since a rest
  Nanos slept_at_ = 0;  // what it may wait without sleeping
  Nanos spin_left_ = 0;
  bool spinning_ = false;

  mutable std::mutex mutex_;  // of all that follows; never held while frames move
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
