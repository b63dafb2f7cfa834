// The oracle checks a finished op against its inputs and reports alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/endpoint/endpoint.h"

namespace gradwire::sim {

// Outcome is one worker's side of one op.
struct Outcome {
  const Plan* plan;
  const std::vector<uint32_t>* critical;
  const Stats* stats;
  const std::vector<float>* input;
  const std::vector<float>* output;
  const OpReport* report;
};

// Each check returns an empty string, or the broken invariant and where it broke.

// Checks one worker. Its masks have the right size, and its critical chunks counted. The bound
// holds in every region, or is reported as exceeded under a plan that closes by time.
std::string check_worker(const Outcome& outcome, const EndpointConfig& config);

// Checks two workers that succeeded, whatever became of the others: where replicas are promised,
// they applied the same chunks and hold the same bits.
std::string check_replicas(const Outcome& one, const Outcome& other, const EndpointConfig& config);

// Checks an op that succeeded at all workers, in rank order. Replicas are identical to the bit,
// every value follows from the masks (to the bit for exact plans), and owners have the withheld
// results.
std::string check_op(std::span<const Outcome> outcomes, const EndpointConfig& config);

}  // namespace gradwire::sim
