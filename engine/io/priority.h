// prefer_latency() makes the calling thread run soon after it wakes, even when other threads
// compute. The engine thread does little at a time, but a datagram that waits a time slice delays
// all endpoints.
#pragma once

namespace gradwire::io {

// Asks the scheduler for short slices, to which EEVDF gives earlier deadlines (Linux 6.12 and
// later, no privilege needed). Where that is not possible nothing changes.
void prefer_latency();

}  // namespace gradwire::io
