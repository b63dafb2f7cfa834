// Priority classes order a worker's own chunks, and choose the DSCP (RFC 2474) of their datagrams.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "proto/plan/plan.h"

namespace gradwire {

// An empty string, or what is wrong with a worker's classes for an op of so many chunks.
std::string check_priorities(const Plan& plan, uint64_t chunks,
                             std::span<const uint8_t> priorities);

// The DSCP of a class. Classes beyond the plan's list take its last value, and `base` when it is
// empty.
uint8_t dscp_of(const Plan& plan, uint8_t base, uint8_t priority);

}  // namespace gradwire
