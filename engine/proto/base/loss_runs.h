// The Gilbert model injects loss in runs (Bell Syst. Tech. J. 39, 1960): its good state loses no
// packet, its bad state loses all. These functions are arithmetic; the caller draws the random
// numbers.
#pragma once

#include <algorithm>
#include <string>

namespace gradwire {

// True when runs of `run` packets on average can make up the share `loss` of all packets. At least
// one packet passes between two runs, so run * (1 - loss) >= loss must hold; shorter runs would
// lose less than asked.
inline bool runs_possible(double loss, double run) {
  // Keeps settings at the limit, such as 0.5 and 1, from failing by rounding.
  constexpr double kRounding = 1e-9;
  return run * (1.0 - loss) >= loss - kRounding;
}

// The error text for runs that are too short; it names both settings.
inline std::string runs_too_short(const char* loss_name, double loss, const char* run_name,
                                  double run) {
  return std::string(run_name) + " is " + std::to_string(run) + " with " + loss_name + " " +
         std::to_string(loss) + "; runs of " + std::to_string(loss / (1.0 - loss)) +
         " packets (loss / (1 - loss)) and more are allowed";
}

// The chance that the next packet is lost; `lost`: the last one was. A run ends with chance 1 /
// run, and begins so often that the share of lost packets is `loss`.
inline double loss_chance(double loss, double run, bool lost) {
  return lost ? 1.0 - 1.0 / run : std::min(1.0, loss / (run * (1.0 - loss)));
}

}  // namespace gradwire
