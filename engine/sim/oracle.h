// What a finished op must look like, worked out from the inputs and the reports alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/endpoint/endpoint.h"

namespace gradwire::sim {

// One worker's side of one op.
struct Outcome {
  const Plan* plan;
  const std::vector<uint32_t>* critical;
  const Stats* stats;
  const std::vector<float>* input;
  const std::vector<float>* output;
  const OpReport* report;
};

// Each returns "" or the invariant that is broken, with the place.

// By itself: masks have the right size, the bound holds per region or is reported as exceeded by a
// plan that goes by time, critical chunks counted.
std::string check_worker(const Outcome& outcome, const EndpointConfig& config);

// All workers of an op that succeeded, in rank order: replicas identical to the bit, every value
// explained by the masks (to the bit where the plan is exact), withheld results with their owners.
std::string check_op(std::span<const Outcome> outcomes, const EndpointConfig& config);

}  // namespace gradwire::sim
