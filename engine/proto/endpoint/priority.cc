// Priority classes at an endpoint: the DSCP of each datagram.
#include <algorithm>

#include "proto/endpoint/endpoint_impl.h"
#include "proto/plan/priority.h"

namespace gradwire {

// Sets an op's classes, before its senders and sums are made. Critical chunks are of class 0.
void Endpoint::Impl::set_classes(Op& op) {
  control_dscp = dscp_of(op.spec.plan, config.dscp, 0);
  std::vector<uint8_t>& priorities = op.spec.priorities;
  if (priorities.empty()) return;
  for (uint32_t c : op.spec.critical)
    if (c < priorities.size()) priorities[c] = 0;
}

uint8_t Endpoint::Impl::dscp_of_class(Op& op, uint16_t aggregator, uint16_t peer, bool fresh) {
  const Plan& plan = op.spec.plan;
  uint32_t chunk = 0;
  if (aggregator != kNoAggregator && op.worker->push[aggregator]->peek(chunk, fresh))
    return dscp_of(plan, config.dscp, op.spec.priorities.empty() ? 0 : op.spec.priorities[chunk]);
  if (op.aggregator && peer < config.workers && op.aggregator->back[peer]->peek(chunk, true))
    return dscp_of(plan, config.dscp, op.aggregator->result_class[chunk - op.own_shard().begin]);
  return config.dscp;
}

}  // namespace gradwire
