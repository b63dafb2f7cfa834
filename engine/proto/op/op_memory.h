// An op's memory where it is aggregated, and the length of its longest message.
#pragma once

#include <cstdint>

#include "proto/plan/plan.h"

namespace gradwire {

struct EndpointConfig;

// The memory that an op of this plan needs at this endpoint for sums, results, records and
// messages, at most. It is 0 where the op is not aggregated.
uint64_t memory_of(const Plan& plan, const EndpointConfig& config);

// The longest message (OPEN or CLOSE) of an op whose shards have at most this many chunks.
uint64_t longest_message(const Plan& plan, uint64_t chunks, uint64_t plan_bytes);

}  // namespace gradwire
