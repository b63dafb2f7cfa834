// Drop injects loss on arrival: independent, or in runs (Gilbert model), from a seed. It serves
// hosts on which no lossy network can be set up.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/loss_runs.h"

namespace gradwire::io {

struct DropOptions {
  double rate = 0.0;   // share of the reliable packets, in [0, 1)
  double burst = 1.0;  // mean length of a run of losses, at least 1
  uint64_t seed = 0;

  // An empty string, or what is wrong.
  std::string validate() const {
    if (!(rate >= 0.0 && rate < 1.0)) {
      return "drop_rate is " + std::to_string(rate) + "; a share is in [0, 1)";
    }
    if (!(burst >= 1.0)) {
      return "drop_burst is " + std::to_string(burst) + "; a run has at least 1 packet";
    }
    if (burst > 1.0 && !runs_possible(rate, burst)) {
      return runs_too_short("drop_rate", rate, "drop_burst", burst);
    }
    return "";
  }
};

class Drop {
 public:
  Drop() = default;
  explicit Drop(const DropOptions& options)
      : options_(options), state_(options.seed * 0x9e3779b97f4a7c15u ^ 0x853c49e6748fea9bu) {
    if (state_ == 0) state_ = 1;
  }

  bool active() const { return options_.rate > 0.0; }

  bool next() {
    if (options_.burst <= 1.0) return uniform() < options_.rate;
    bad_ = uniform() < loss_chance(options_.rate, options_.burst, bad_);
    return bad_;
  }

 private:
  double uniform() {  // xorshift64*
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<double>((state_ * 0x2545f4914f6cdd1du) >> 11) * 0x1.0p-53;
  }

  DropOptions options_;
  uint64_t state_ = 1;
  bool bad_ = false;
};

}  // namespace gradwire::io
