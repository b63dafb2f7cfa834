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

// The classes of an op's results at first. A result has the first class that any worker gave its
// chunk, as far as pushes have arrived.
std::vector<uint8_t> Endpoint::Impl::result_classes(const Op& op) {
  if (op.spec.plan.class_dscp.empty()) return {};
  const std::vector<uint8_t>& own = op.spec.priorities;
  const Grid::Shard& shard = op.own_shard();
  if (own.empty())
    return std::vector<uint8_t>(shard.size(),
                                op.worker ? uint8_t{0} : uint8_t{kPriorityClasses - 1});
  return {own.begin() + shard.begin, own.begin() + shard.end};
}

uint16_t Endpoint::Impl::class_flag(const Op& op, uint32_t chunk) {
  if (op.spec.priorities.empty()) return 0;
  return static_cast<uint16_t>(op.spec.priorities[chunk] << wire::kClassShift);
}

void Endpoint::Impl::note_class(Op& op, const wire::Header& header) {
  if (op.aggregator->result_class.empty()) return;
  uint8_t& known = op.aggregator->result_class[header.chunk - op.own_shard().begin];
  known = std::min(known, wire::priority_class(header.flags));
}

// The DSCP of the chunk that goes to this peer next. `fresh`: pushes may include chunks not sent so
// far.
uint8_t Endpoint::Impl::next_dscp(Op& op, uint16_t aggregator, uint16_t peer, bool fresh) {
  const Plan& plan = op.spec.plan;
  uint32_t chunk = 0;
  if (plan.class_dscp.empty()) return config.dscp;
  if (aggregator != kNoAggregator && op.worker->push[aggregator]->peek(chunk, fresh))
    return dscp_of(plan, config.dscp, op.spec.priorities.empty() ? 0 : op.spec.priorities[chunk]);
  if (op.aggregator && peer < config.workers && op.aggregator->back[peer]->peek(chunk, true))
    return dscp_of(plan, config.dscp, op.aggregator->result_class[chunk - op.own_shard().begin]);
  return config.dscp;
}

}  // namespace gradwire
