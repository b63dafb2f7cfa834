#include "proto/plan/priority.h"

#include <algorithm>

namespace gradwire {

std::string check_priorities(const Plan& plan, uint64_t chunks,
                             std::span<const uint8_t> priorities) {
  if (priorities.empty()) return "";
  if (plan.order != Order::priority)
    return "priorities: " + std::to_string(priorities.size()) +
           " given for a plan whose order is not \"priority\"";
  if (priorities.size() != chunks)
    return "priorities: " + std::to_string(priorities.size()) + " given; the plan has " +
           std::to_string(chunks) + " chunks";
  const auto high = std::max_element(priorities.begin(), priorities.end());
  if (*high >= kPriorityClasses)
    return "priorities: class " + std::to_string(*high) + " of chunk " +
           std::to_string(high - priorities.begin()) + "; allowed are 0 to " +
           std::to_string(kPriorityClasses - 1);
  return "";
}

uint8_t dscp_of(const Plan& plan, uint8_t base, uint8_t priority) {
  if (plan.class_dscp.empty()) return base;
  return plan.class_dscp[std::min<size_t>(priority, plan.class_dscp.size() - 1)];
}

}  // namespace gradwire
