#include "sim/pass_check.h"

#include <algorithm>

#include "proto/plan/lanes.h"

namespace gradwire::sim {

std::string PassCheck::sent(const Plan& plan, uint16_t source, uint16_t destination,
                            const wire::Header& header, std::span<const uint8_t> payload) {
  if (plan.control != Control::probe) return "";
  const wire::Kind kind = header.common.kind;
  if (kind == wire::Kind::probe) {
    const auto pass = wire::read_pass(payload);
    if (!pass) return "a PROBE without its pass";
    Progress& progress = flows_[{header.op, source, destination, pass->way}];
    progress.probed = std::max(progress.probed, pass->number);
    return "";
  }
  const bool push = kind == wire::Kind::push;
  if (!push && !(kind == wire::Kind::pull && plan.pull == Pull::lossy)) return "";
  Progress& progress =
      flows_[{header.op, source, destination, push ? wire::Way::push : wire::Way::pull}];
  const std::string chunk = "chunk " + std::to_string(header.chunk) + " of " + op_name(header.op) +
                            " to endpoint " + std::to_string(destination);
  if (progress.probed > progress.answered) return chunk + " after a PROBE without an answer";
  uint32_t& last = progress.last[header.chunk];
  if (last == progress.probed + 1)
    return chunk + " twice in pass " + std::to_string(progress.probed + 1);
  last = progress.probed + 1;
  return "";
}

void PassCheck::bitmap_arrived(uint16_t destination, uint16_t source, const wire::Header& header,
                               std::span<const uint8_t> payload) {
  const auto pass = wire::read_pass(payload);
  if (!pass) return;
  const auto flow = flows_.find({header.op, destination, source, pass->way});
  if (flow == flows_.end()) return;
  flow->second.answered =
      std::max(flow->second.answered, std::min(pass->number, flow->second.probed));
}

void PassCheck::forget(uint32_t op) {
  std::erase_if(flows_, [op](const auto& entry) { return entry.first.op == op; });
}

}  // namespace gradwire::sim
