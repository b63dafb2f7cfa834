// How much memory an op takes where it is aggregated, and how long its messages may be.
#pragma once

#include <cstdint>

#include "proto/plan/plan.h"

namespace gradwire {

struct EndpointConfig;

// What an op of this plan needs at this endpoint: its sums, results, books and messages, as much as
// they may become. Nothing where it is not aggregated.
uint64_t memory_of(const Plan& plan, const EndpointConfig& config);

// The longest message of an op whose shards have at most this many chunks: OPEN, or CLOSE.
uint64_t longest_message(const Plan& plan, uint64_t chunks, uint64_t plan_bytes);

}  // namespace gradwire
