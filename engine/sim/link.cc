// Link: queueing by arithmetic, without an event for each departure.
#include "sim/link.h"

#include <algorithm>
#include <cmath>

#include "proto/base/loss_runs.h"
#include "proto/congestion/ecn.h"

namespace gradwire::sim {

std::string LinkOptions::validate() const {
  const auto share = [](const char* name, double value) {
    return value >= 0.0 && value < 1.0
               ? std::string()
               : std::string(name) + " is " + std::to_string(value) + "; a share is in [0, 1)";
  };
  if (!(rate > 0.0)) return "rate is " + std::to_string(rate) + " bytes/s; it must be positive";
  if (delay < 0) return "delay is " + std::to_string(delay) + " ns; it must not be negative";
  if (reorder_delay < 0) return "reorder_delay must not be negative";
  if (!(police_rate >= 0.0)) {
    return "police_rate is " + std::to_string(police_rate) + " bytes/s; allowed are 0 and above";
  }
  if (police_burst < 2048) return "police_burst: a policer lets at least 2048 bytes pass";
  if (queue_bytes < 2048) return "queue_bytes: a queue holds at least 2048 bytes";
  if (!(loss_burst >= 1.0)) return "loss_burst: a run of losses has at least one packet";
  for (const auto& text :
       {share("loss", loss), share("reorder", reorder), share("duplicate", duplicate),
        share("garbage", garbage), share("flip", flip), share("corrupt", corrupt)}) {
    if (!text.empty()) return text;
  }
  if (loss_burst > 1.0 && !runs_possible(loss, loss_burst)) {
    return runs_too_short("loss", loss, "loss_burst", loss_burst);
  }
  return "";
}

Link::Link(const LinkOptions& options, uint64_t seed) : random(seed), options_(options) {}

uint64_t Link::queued(Nanos now) const {
  const double waiting_ns = static_cast<double>(std::max<Nanos>(busy_until_ - now, 0));
  return static_cast<uint64_t>(waiting_ns * options_.rate * 1e-9);
}

uint8_t Link::mark(Nanos now, uint8_t ecn, uint32_t packets) {
  if (ecn == kNotEct) return ecn;
  counters.ect += packets;
  if (options_.bleach) return kNotEct;
  if (options_.ecn_bytes == 0 || queued(now) <= options_.ecn_bytes) return ecn;
  counters.marked += packets;
  return kCe;
}

bool Link::polices(Nanos now, uint64_t wire_bytes) {
  if (options_.police_rate <= 0.0) return false;
  const auto burst = static_cast<double>(options_.police_burst);
  if (policed_ == kNever) {
    police_tokens_ = burst;
  } else {
    const auto passed = static_cast<double>(now - policed_);
    police_tokens_ = std::min(burst, police_tokens_ + passed * options_.police_rate * 1e-9);
  }
  policed_ = now;
  const auto bytes = static_cast<double>(wire_bytes);
  // A train larger than the whole bucket still passes a full one.
  if (police_tokens_ < std::min(bytes, burst)) return true;
  police_tokens_ -= bytes;
  return false;
}

Nanos Link::enqueue(Nanos now, uint64_t wire_bytes, uint32_t packets, bool cross) {
  const uint64_t waiting = queued(now);
  (cross ? counters.cross_packets : counters.packets) += packets;
  if (!cross) counters.bytes += wire_bytes;
  if (polices(now, wire_bytes)) {
    (cross ? counters.cross_dropped : counters.dropped_policer) += packets;
    return kNever;
  }
  // A train larger than the whole queue still passes an empty one.
  if (waiting + wire_bytes > options_.queue_bytes && waiting > 0) {
    (cross ? counters.cross_dropped : counters.dropped_queue) += packets;
    return kNever;
  }
  counters.max_queue_bytes = std::max(counters.max_queue_bytes, waiting + wire_bytes);
  const double service_ns = static_cast<double>(wire_bytes) * 1e9 / options_.rate;
  busy_until_ = std::max(busy_until_, now) + static_cast<Nanos>(std::ceil(service_ns));
  return busy_until_;
}

bool Link::lose(uint32_t packets) {
  if (options_.loss <= 0.0) return false;
  if (options_.loss_burst <= 1.0) {
    bad_ = random.uniform() < options_.loss;
  } else {
    bad_ = random.uniform() < loss_chance(options_.loss, options_.loss_burst, bad_);
  }
  if (bad_) counters.dropped_loss += packets;
  return bad_;
}

}  // namespace gradwire::sim
