// OpReport is what became of an op, and what it cost.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/counters.h"
#include "proto/base/failure.h"
#include "proto/base/time.h"
#include "proto/base/zeroed.h"
#include "proto/op/op_spec.h"
#include "proto/op/waits.h"

namespace gradwire {

// OpCost is what an op has cost at one endpoint.
struct OpCost {
  Nanos push = 0;
  Nanos pull = 0;
  Nanos total = 0;
  Traffic traffic;
  uint32_t passes = 0;  // of the push: the most of any shard; 0 under control "stream"
  Nanos rtprop = 0;
  double btlbw = 0;  // bytes/s
  Waits waits;
};

struct OpReport {
  // Of an op that ends without a result.
  static OpReport failed(const OpSpec& spec, Failure why) {
    OpReport report;
    report.op = spec.op;
    report.step = spec.step;
    report.failure = std::move(why);
    return report;
  }

  uint64_t op = 0;
  uint64_t step = 0;
  Failure failure;               // none when ok
  std::vector<uint8_t> counted;  // by chunk
  std::vector<uint8_t> applied;  // by chunk
  std::vector<uint32_t> withheld_chunks;
  std::vector<float> withheld_values;
  // The encoding's error in this endpoint's own results, for the elements from error_offset on.
  Zeroed<float> result_error;
  uint64_t error_offset = 0;
  std::vector<double> delivered;  // by region
  std::vector<uint32_t> exceeded;
  Stats stats{};
  OpCost cost;
  // The longest datagram that all paths of the job carried when the workers started the op. It is
  // the same on all workers.
  uint32_t datagram_bytes = 0;
};

}  // namespace gradwire
