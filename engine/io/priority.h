// Makes the calling thread wake up soon although others compute: the engine thread does little at a
// time, but a datagram that waits a scheduler's slice costs everybody a round trip.
#pragma once

namespace gradwire::io {

// Asks for short slices (EEVDF gives such threads earlier deadlines; Linux 6.12 and later, no
// privilege needed). Without it, nothing changes.
void prefer_latency();

}  // namespace gradwire::io
