// Priority classes at an endpoint: the DSCP of each datagram.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/plan/priority.h"

namespace gradwire {

// Sets an op's classes, before its senders and sums are made. Critical chunks are of class 0. A
// result has the first class that any worker gave its chunk, as far as pushes have arrived.
void Endpoint::Impl::set_classes(Op& op) {
  const Plan& plan = op.spec.plan;
  control_dscp = dscp_of(plan, config.dscp, 0);
  std::vector<uint8_t>& priorities = op.spec.priorities;
  if (!priorities.empty())
    for (uint32_t c : op.spec.critical)
      if (c < priorities.size()) priorities[c] = 0;
  if (plan.class_dscp.empty() || !op.aggregates) return;
  const Grid::Shard& shard = op.own_shard();
  if (priorities.empty()) {
    op.result_class.assign(shard.size(), op.worker ? 0 : kPriorityClasses - 1);
  } else {
    op.result_class.assign(priorities.begin() + shard.begin, priorities.begin() + shard.end);
  }
}

uint16_t Endpoint::Impl::class_flag(const Op& op, uint32_t chunk) {
  if (op.spec.priorities.empty()) return 0;
  return static_cast<uint16_t>(op.spec.priorities[chunk] << wire::kClassShift);
}

void Endpoint::Impl::note_class(Op& op, const wire::Header& header) {
  if (op.result_class.empty()) return;
  uint8_t& known = op.result_class[header.chunk - op.own_shard().begin];
  known = std::min(known, wire::priority_class(header.flags));
}

// The DSCP of the chunk that goes to this peer next. `fresh`: pushes may include chunks not sent so
// far.
uint8_t Endpoint::Impl::next_dscp(Op& op, uint16_t aggregator, uint16_t peer, bool fresh) {
  const Plan& plan = op.spec.plan;
  uint32_t chunk = 0;
  if (plan.class_dscp.empty()) return config.dscp;
  if (aggregator != kNoAggregator && op.push[aggregator].peek(chunk, fresh))
    return dscp_of(plan, config.dscp, op.spec.priorities.empty() ? 0 : op.spec.priorities[chunk]);
  if (op.aggregator && peer < config.workers && op.back[peer].peek(chunk))
    return dscp_of(plan, config.dscp, op.result_class[chunk - op.own_shard().begin]);
  return config.dscp;
}

}  // namespace gradwire
