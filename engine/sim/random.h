// Random generates the simulator's random numbers: xoshiro256**, seeded by splitmix64.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace gradwire::sim {

class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) {
      seed += 0x9e3779b97f4a7c15u;
      uint64_t z = seed;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      word = z ^ (z >> 31);
    }
  }

  uint64_t next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // A number in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) { return probability > 0.0 && uniform() < probability; }
  // A number in [0, bound); bound > 0.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>(uniform() * static_cast<double>(bound));
  }

 private:
  uint64_t state_[4];
};

}  // namespace gradwire::sim
