// An op's memory where it is aggregated.
#pragma once

#include <cstdint>

#include "proto/plan/plan.h"

namespace gradwire {

struct EndpointConfig;

// The memory that an op of this plan needs at this endpoint for sums, results, records and
// messages, at most. It is 0 where the op is not aggregated.
uint64_t memory_of(const Plan& plan, const EndpointConfig& config);

}  // namespace gradwire
