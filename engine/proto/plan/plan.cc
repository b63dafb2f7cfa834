#include "proto/plan/plan.h"

#include <algorithm>
#include <cmath>

#include "proto/base/message.h"
#include "wire/packet.h"

namespace gradwire {

namespace {

// Regions of a plan: 65,536 take 1 MiB of an OPEN, within kMaxMessage.
constexpr size_t kMaxRegions = 1u << 16;
// Steps of a schedule: arriving chunks are checked against each.
constexpr size_t kMaxSchedule = 16;
// The longest delay of a schedule step; keeps sums of times far below kNever.
constexpr Nanos kLongestDelay = 3600 * kSecond;
// Elements of an op: 2^36 float32 values are 256 GiB.
constexpr uint64_t kMaxElements = uint64_t{1} << 36;
// Shards of a plan: endpoints have 16-bit numbers.
constexpr size_t kMaxShards = 1u << 16;

// Reads one of an enumeration's values, which end with `last`.
template <class T>
bool read_choice(wire::Reader& reader, T last, T& choice) {
  const auto value = reader.get<uint8_t>();
  choice = static_cast<T>(value);
  return value <= static_cast<uint8_t>(last);
}

bool read_schedule(wire::Reader& reader, Plan& plan) {
  const auto steps = reader.get<uint32_t>();
  if (steps > kMaxSchedule) return false;
  plan.schedule.clear();
  for (uint32_t i = 0; i < steps && reader.ok(); ++i) {
    ScheduleStep s;
    if (!read_choice(reader, Clock::tail, s.clock) || !read_choice(reader, Scope::all, s.scope))
      return false;
    s.delay = reader.get<Nanos>();
    s.fraction = reader.get<double>();
    plan.schedule.push_back(s);
  }
  return true;
}

bool read_regions(wire::Reader& reader, Plan& plan) {
  const auto regions = reader.get<uint32_t>();
  if (regions > kMaxRegions) return false;
  uint64_t at = 0;
  for (uint32_t i = 0; i < regions && reader.ok(); ++i) {
    Region r;
    r.offset = at;
    r.length = reader.get<uint64_t>();
    r.bound = reader.get<double>();
    at += r.length;
    plan.regions.push_back(r);
  }
  return true;
}

// Reads what most plans leave out at the end.
bool read_tail(wire::Reader& reader, Plan& plan) {
  if (!reader.ok() || reader.rest().empty()) return true;
  plan.datagram_bytes = reader.get<uint32_t>();
  if (!reader.ok() || reader.rest().empty()) return true;
  const auto shards = reader.get<uint32_t>();
  if (shards == 0 || shards > kMaxShards) return false;
  for (uint32_t i = 0; i < shards && reader.ok(); ++i)
    plan.shards.push_back(reader.get<uint64_t>());
  return true;
}

std::string check_regions(const Plan& plan) {
  if (plan.elements == 0) return "elements is 0; a transfer has at least one element";
  if (plan.elements > kMaxElements)
    return "elements is " + std::to_string(plan.elements) + "; at most 2^36 are allowed";
  if (plan.regions.empty()) return "regions is empty; they must cover all elements";
  if (plan.regions.size() > kMaxRegions)
    return "regions: " + std::to_string(plan.regions.size()) + " given; at most 65536 are allowed";
  uint64_t at = 0;
  for (size_t i = 0; i < plan.regions.size(); ++i) {
    const Region& r = plan.regions[i];
    if (r.offset != at || r.length == 0 || r.length > plan.elements - at)
      return "regions[" + std::to_string(i) + "] is [" + std::to_string(r.offset) + ", +" +
             std::to_string(r.length) +
             "); regions must cover [0, elements) in order, without gaps";
    if (!(r.bound >= 0.0 && r.bound < 1.0))
      return "regions[" + std::to_string(i) + "] has bound " + std::to_string(r.bound) +
             "; a bound is in [0, 1)";
    at += r.length;
  }
  return at == plan.elements ? "" : "regions end at " + std::to_string(at) + ", not at elements";
}

std::string check_schedule(const Plan& plan) {
  if (plan.schedule.empty() || plan.schedule.size() > kMaxSchedule)
    return "schedule has " + std::to_string(plan.schedule.size()) + " steps; 1 to 16 are allowed";
  for (const ScheduleStep& s : plan.schedule) {
    if (s.delay < 0 || s.delay > kLongestDelay)
      return "schedule: delay " + std::to_string(s.delay) + " ns; 0 to one hour is allowed";
    if (s.fraction != ScheduleStep::kOneMinusBound && !(s.fraction >= 0.0 && s.fraction <= 1.0))
      return "schedule: fraction " + std::to_string(s.fraction) +
             "; allowed are [0, 1] and -1 (one minus the bound)";
  }
  return "";
}

std::string check_pull(const Plan& plan) {
  if (!(plan.pull_bound >= 0.0 && plan.pull_bound < 1.0))
    return "pull_bound is " + std::to_string(plan.pull_bound) + "; a bound is in [0, 1)";
  if (plan.pull != Pull::committed && plan.pull != Pull::lossy && plan.pull_bound != 0.0)
    return "pull_bound is " + std::to_string(plan.pull_bound) +
           " without pull \"committed\" or \"lossy\"; it must be 0";
  return std::isfinite(plan.scale) ? "" : "scale is not finite";
}

std::string check_control(const Plan& plan) {
  if (plan.control != Control::probe) return "";
  if (plan.spend == Spend::lost)
    return "spend is \"lost\" with control \"probe\", under which no chunk is declared lost; "
           "allowed are \"nothing\", \"late\", \"anything\"";
  if (plan.order == Order::priority)
    return "order is \"priority\" with control \"probe\", whose passes know no classes; allowed "
           "are \"sequential\", \"shuffled\"";
  return "";
}

std::string check_datagrams(const Plan& plan) {
  if (plan.datagram_bytes != 0 &&
      (plan.datagram_bytes < wire::kMinDatagram || plan.datagram_bytes > wire::kMaxDatagram))
    return "datagram_bytes is " + std::to_string(plan.datagram_bytes) +
           "; allowed are 256 to 8972, and 0 for what was agreed";
  if (!plan.class_dscp.empty() && plan.order != Order::priority)
    return "class_dscp is given without order \"priority\"; it must be empty";
  if (plan.class_dscp.size() > kPriorityClasses)
    return "class_dscp has " + std::to_string(plan.class_dscp.size()) +
           " values; at most 8 are allowed";
  for (uint8_t dscp : plan.class_dscp)
    if (dscp > kMostDscp) return "class_dscp: " + std::to_string(dscp) + "; a DSCP is from 0 to 63";
  return "";
}

std::string check_shards(const Plan& plan) {
  if (plan.shards.empty()) return "";
  if (plan.shards.size() > kMaxShards)
    return "shards: " + std::to_string(plan.shards.size()) + " given; at most 65536 are allowed";
  uint64_t left = plan.elements;
  for (const uint64_t shard : plan.shards) {
    if (shard > left)
      return "shards hold more than the " + std::to_string(plan.elements) + " elements";
    left -= shard;
  }
  return left == 0 ? ""
                   : "shards leave " + std::to_string(left) + " elements out; all have a shard";
}

}  // namespace

bool Plan::exact() const {
  return spend == Spend::nothing ||
         std::ranges::none_of(regions, [](const Region& r) { return r.bound > 0; });
}

std::string Plan::validate() const {
  for (const auto check :
       {check_regions, check_schedule, check_pull, check_control, check_datagrams, check_shards})
    if (std::string wrong = check(*this); !wrong.empty()) return wrong;
  return format.validate();
}

std::vector<uint8_t> Plan::serialize() const {
  Body body;
  body.put(elements).put(seed).put(scale).put(pull_bound);
  body.put(spend).put(fill).put(order).put(pull).put(control).put(format.encoding);
  body.put(format.kept);
  body.put(static_cast<uint8_t>(class_dscp.size())).put_bytes(class_dscp);
  body.put(static_cast<uint32_t>(schedule.size()));
  for (const ScheduleStep& s : schedule)
    body.put(s.clock).put(s.scope).put(s.delay).put(s.fraction);
  body.put(static_cast<uint32_t>(regions.size()));
  for (const Region& r : regions) body.put(r.length).put(r.bound);
  if (datagram_bytes != 0 || !shards.empty()) body.put(datagram_bytes);
  if (!shards.empty()) {
    body.put(static_cast<uint32_t>(shards.size()));
    for (const uint64_t shard : shards) body.put(shard);
  }
  return body.bytes();
}

bool Plan::deserialize(std::span<const uint8_t> bytes, Plan& out) {
  wire::Reader reader(bytes);
  out = Plan{};
  out.elements = reader.get<uint64_t>();
  out.seed = reader.get<uint64_t>();
  out.scale = reader.get<double>();
  out.pull_bound = reader.get<double>();
  const bool known = read_choice(reader, Spend::anything, out.spend) &&
                     read_choice(reader, Fill::mean, out.fill) &&
                     read_choice(reader, Order::priority, out.order) &&
                     read_choice(reader, Pull::lossy, out.pull) &&
                     read_choice(reader, Control::probe, out.control) &&
                     read_choice(reader, codec::Encoding::half, out.format.encoding);
  if (!known) return false;
  out.format.kept = reader.get<double>();
  const auto dscps = reader.take(reader.get<uint8_t>());
  out.class_dscp.assign(dscps.begin(), dscps.end());
  if (!read_schedule(reader, out) || !read_regions(reader, out) || !read_tail(reader, out))
    return false;
  return reader.ok() && reader.rest().empty() && out.validate().empty();
}

uint64_t Plan::hash() const {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
  for (uint8_t byte : serialize()) {
    h ^= byte;
    h *= 0x100000001b3ull;
  }
  return h;
}

}  // namespace gradwire
