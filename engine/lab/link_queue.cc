// LinkQueue: queueing, marking, loss and delay.
#include "lab/link_queue.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/base/loss_runs.h"

namespace gradwire::lab {

std::string WireOptions::validate() const {
  const auto say = [](const char* name, double value, const char* allowed) {
    return std::string(name) + " is " + std::to_string(value) + "; " + allowed;
  };
  constexpr Nanos kLongest = 60 * kSecond;
  if (delay < 0 || delay > kLongest) {
    return say("delay", static_cast<double>(delay) * 1e-9, "allowed are 0 to 60 s");
  }
  if (jitter < 0 || jitter > kLongest) {
    return say("jitter", static_cast<double>(jitter) * 1e-9, "allowed are 0 to 60 s");
  }
  if (!(rate >= 0.0) || std::isinf(rate) || (rate > 0.0 && rate < 1000.0)) {
    return say("rate", rate, "allowed are 1000 bytes/s and more, and 0 for none");
  }
  if (rate > 0.0 && queue_bytes < 2048) {
    return say("queue_bytes", static_cast<double>(queue_bytes), "a rate needs 2048 and more");
  }
  if (ecn_bytes > 0 && (rate <= 0.0 || ecn_bytes >= queue_bytes)) {
    return say("ecn_bytes", static_cast<double>(ecn_bytes), "less than the queue of a rate");
  }
  if (!(loss >= 0.0 && loss <= 1.0)) return say("loss", loss, "a share is in [0, 1]");
  if (loss_burst != 0.0 && (!(loss_burst >= 1.0) || std::isinf(loss_burst))) {
    return say("loss_burst", loss_burst, "a run has 1 packet and more; 0 for independent losses");
  }
  if (loss_burst != 0.0 && loss < 1.0 && !runs_possible(loss, loss_burst)) {
    return runs_too_short("loss", loss, "loss_burst", loss_burst);
  }
  if (memory_bytes < 1 << 17) {
    return say("memory_bytes", static_cast<double>(memory_bytes), "at least 131072");
  }
  return "";
}

bool LossProcess::next(double loss, double burst) {
  if (loss <= 0.0) return bad_ = false;
  if (loss >= 1.0) return bad_ = true;
  if (burst == 0.0) return bad_ = random_.uniform() < loss;
  return bad_ = random_.uniform() < loss_chance(loss, burst, bad_);
}

Nanos LinkQueue::service_time(const Frame& frame) const {
  if (options_.rate <= 0.0) return 0;
  return static_cast<Nanos>(std::ceil(frame.shape.wire_bytes * 1e9 / options_.rate));
}

void LinkQueue::set_options(Nanos now, const WireOptions& options) {
  advance(now);
  const WireOptions before = std::exchange(options_, options);
  if (waiting_.empty()) return;
  // The part of the first frame that is still to be sent goes at the new rate.
  const double left = static_cast<double>(sent_ - now) * before.rate;
  sent_ = options.rate > 0.0 ? now + static_cast<Nanos>(std::ceil(left / options.rate)) : now;
}

void LinkQueue::offer(Nanos now, std::span<const uint8_t> data) {
  advance(now);
  Shape shape = shape_of(data, headed_);
  counters_.packets += shape.packets;
  counters_.bytes += shape.wire_bytes;
  if (held_bytes_ + data.size() > options_.memory_bytes) {
    counters_.dropped_memory += shape.packets;
    return;
  }
  Frame frame{{}, shape};
  // Each packet finds room or is dropped by itself; an empty queue takes any one packet.
  if (options_.rate > 0.0 && waiting_bytes_ + shape.wire_bytes > options_.queue_bytes &&
      (shape.packets > 1 || !waiting_.empty())) {
    const uint64_t packet = (shape.wire_bytes + shape.packets - 1) / shape.packets;
    const uint64_t room = options_.queue_bytes - std::min(options_.queue_bytes, waiting_bytes_);
    auto kept = static_cast<uint32_t>(std::min<uint64_t>(room / packet, shape.packets - 1));
    if (kept == 0 && waiting_.empty()) kept = 1;
    const uint64_t whole = shape.wire_bytes;
    counters_.dropped_queue += shape.packets - kept;
    if (kept == 0) {
      counters_.dropped_queue_bytes += whole;
      return;
    }
    frame.data = cut(data, 0, kept);
    frame.shape = shape_of(frame.data, headed_);
    counters_.dropped_queue_bytes += whole - frame.shape.wire_bytes;
  } else {
    frame.data.assign(data.begin(), data.end());
  }
  if (options_.rate <= 0.0 && waiting_.empty()) {
    held_bytes_ += frame.data.size();
    start_wire(now, std::move(frame));
    return;
  }
  // The packets of a train that arrive above the threshold are marked, and go as a train of their
  // own.
  const uint32_t below = below_threshold(frame.shape);
  if (below < frame.shape.packets) {
    Frame above = below == 0 ? frame : part_of(frame, below, frame.shape.packets - below);
    if (mark_congestion(above.data, headed_)) {
      counters_.marked += above.shape.packets;
      if (below > 0) queue_up(now, part_of(frame, 0, below));
      queue_up(now, std::move(above));
      return;
    }
  }
  queue_up(now, std::move(frame));
}

// The number of packets of an arriving train that find at most the threshold in the queue.
uint32_t LinkQueue::below_threshold(const Shape& shape) const {
  if (options_.ecn_bytes == 0) return shape.packets;
  if (waiting_bytes_ > options_.ecn_bytes) return 0;
  const uint64_t packet = (shape.wire_bytes + shape.packets - 1) / shape.packets;
  const uint64_t room = (options_.ecn_bytes - waiting_bytes_) / std::max<uint64_t>(packet, 1);
  return static_cast<uint32_t>(std::min<uint64_t>(room + 1, shape.packets));
}

LinkQueue::Frame LinkQueue::part_of(const Frame& frame, uint32_t first, uint32_t count) const {
  Frame part{cut(frame.data, first, count), {}};
  part.shape = shape_of(part.data, headed_);
  return part;
}

void LinkQueue::queue_up(Nanos now, Frame frame) {
  held_bytes_ += frame.data.size();
  waiting_bytes_ += frame.shape.wire_bytes;
  counters_.max_queue_bytes = std::max(counters_.max_queue_bytes, waiting_bytes_);
  if (waiting_.empty()) sent_ = now + service_time(frame);
  waiting_.push_back(std::move(frame));
}

WireCounters LinkQueue::counters() const {
  WireCounters out = counters_;
  out.queue_bytes = waiting_bytes_;
  return out;
}

// Moves onto the wire what the rate has released by now.
void LinkQueue::advance(Nanos now) {
  while (!waiting_.empty() && sent_ <= now) {
    Frame frame = std::move(waiting_.front());
    waiting_.pop_front();
    waiting_bytes_ -= frame.shape.wire_bytes;
    const Nanos sent = sent_;
    if (!waiting_.empty()) sent_ += service_time(waiting_.front());
    start_wire(sent, std::move(frame));
  }
}

// Loss is decided by packet; the parts of a train between losses go on.
void LinkQueue::start_wire(Nanos now, Frame frame) {
  const uint32_t packets = frame.shape.packets;
  uint32_t first = 0;
  bool whole = true;
  for (uint32_t i = 0; i < packets; ++i) {
    if (!loss_.next(options_.loss, options_.loss_burst)) continue;
    whole = false;
    ++counters_.dropped_loss;
    if (i > first) {
      Frame part = part_of(frame, first, i - first);
      held_bytes_ += part.data.size();
      travel(now, std::move(part));
    }
    first = i + 1;
  }
  if (whole) {
    travel(now, std::move(frame));
    return;
  }
  if (first < packets) {
    Frame part = part_of(frame, first, packets - first);
    held_bytes_ += part.data.size();
    travel(now, std::move(part));
  }
  held_bytes_ -= frame.data.size();
}

void LinkQueue::travel(Nanos now, Frame frame) {
  Nanos arrival = now + options_.delay;
  if (options_.jitter > 0) {
    arrival += static_cast<Nanos>(loss_.random().uniform() * static_cast<double>(options_.jitter));
  }
  if (options_.keep_order) arrival = std::max(arrival, last_arrival_);
  last_arrival_ = std::max(arrival, last_arrival_);
  travelling_.push_back({arrival, number_++, std::move(frame)});
  std::push_heap(travelling_.begin(), travelling_.end(), Later{});
}

bool LinkQueue::take(Nanos now, std::vector<uint8_t>& frame) {
  advance(now);
  if (travelling_.empty() || travelling_.front().arrival > now) return false;
  std::pop_heap(travelling_.begin(), travelling_.end(), Later{});
  Travelling& first = travelling_.back();
  counters_.delivered += first.frame.shape.packets;
  held_bytes_ -= first.frame.data.size();
  frame = std::move(first.frame.data);
  travelling_.pop_back();
  return true;
}

Nanos LinkQueue::next_event() const {
  Nanos next = travelling_.empty() ? kNever : travelling_.front().arrival;
  if (!waiting_.empty()) next = std::min(next, sent_);
  return next;
}

}  // namespace gradwire::lab
