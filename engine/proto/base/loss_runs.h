// Injected loss in runs: Gilbert's chain (Bell Syst. Tech. J. 39, 1960) whose good state loses
// nothing and whose bad one loses all. Arithmetic alone; whoever injects loss draws for itself.
#pragma once

#include <algorithm>
#include <string>

namespace gradwire {

// Runs of `run` packets on average that make up the share `loss` of all need a good packet between
// two of them: run * (1 - loss) >= loss. Shorter ones would begin more often than after every
// packet that passes, and lose less than asked.
inline bool runs_possible(double loss, double run) {
  constexpr double kRounding = 1e-9;
  return run * (1.0 - loss) >= loss - kRounding;
}

// What is wrong with shorter runs, naming both settings.
inline std::string runs_too_short(const char* loss_name, double loss, const char* run_name,
                                  double run) {
  return std::string(run_name) + " is " + std::to_string(run) + " with " + loss_name + " " +
         std::to_string(loss) + "; runs of " + std::to_string(loss / (1.0 - loss)) +
         " packets (loss / (1 - loss)) and more are allowed";
}

// The chance that the next packet is lost, `lost` being what became of the last one: a run ends
// with 1 / run, and begins so often that its share is the loss asked for.
inline double loss_chance(double loss, double run, bool lost) {
  return lost ? 1.0 - 1.0 / run : std::min(1.0, loss / (run * (1.0 - loss)));
}

}  // namespace gradwire
