// Silence decides when peers that say nothing count as dead, and whom the error names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/config.h"
#include "proto/base/failure.h"
#include "proto/base/time.h"

namespace gradwire {

// Listened is a peer that has to speak. One that said goodbye has to as long as something is
// awaited of it.
struct Listened {
  uint16_t peer = 0;
  Nanos last_heard = 0;
  bool left = false;
  uint64_t step = 0;  // the one that still needs results of a peer that has left
};

// The failure once one of these peers has been silent for the peer time-out, else none. `step`:
// what the text begins with. If all of several are silent, this host or its switch is cut off. With
// a single one either side may be the cause, so no rank is named.
Failure failure_of_silence(std::vector<Listened> peers, const EndpointConfig& config,
                           const std::string& step, Nanos now);

}  // namespace gradwire
