// TokenBucket limits a rate: tokens come in with time and go out with what is sent. It may run into
// debt, so that a whole train can go as soon as there is any token.
#pragma once

#include <algorithm>

#include "proto/base/time.h"

namespace gradwire {

class TokenBucket {
 public:
  // Adds the tokens of the time since the last call, up to `depth`.
  void refill(double per_second, double depth, Nanos now) {
    tokens_ = std::min(depth, tokens_ + per_second * static_cast<double>(now - time_) * 1e-9);
    time_ = now;
  }
  // Takes all tokens, or all debt.
  void clear() { tokens_ = 0; }
  // The same, and time counts from now on.
  void reset(Nanos now) {
    clear();
    time_ = now;
  }
  void spend(double tokens) { tokens_ -= tokens; }
  // The same, but this alone makes no debt beyond `-floor`.
  void spend(double tokens, double floor) {
    tokens_ = std::max(tokens_ - tokens, std::min(tokens_, floor));
  }
  double tokens() const { return tokens_; }
  // Nanoseconds until the bucket holds so many tokens.
  Nanos wait(double tokens, double per_second) const {
    return time_of(tokens - tokens_, per_second);
  }
  // Nanoseconds in which so many tokens come in: one at least, and no more than a second, after
  // which a rate of nothing is looked at again.
  static Nanos time_of(double tokens, double per_second) {
    if (tokens <= 0) return 1;
    return static_cast<Nanos>(std::clamp(tokens / per_second * 1e9, 1.0, 1.0 * kSecond));
  }

 private:
  double tokens_ = 0;
  Nanos time_ = 0;
};

}  // namespace gradwire
