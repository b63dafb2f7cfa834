#include "proto/op/admission.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "proto/op/op_memory.h"
#include "proto/op/op_messages.h"
#include "proto/op/outbox.h"
#include "proto/plan/priority.h"

namespace gradwire {

Failure Admission::add(OpSpec spec, Nanos now) {
  const auto waiting = std::ranges::count_if(
      own_, [&spec](const Own& own) { return lane_of(own.spec.op) == lane_of(spec.op); });
  const uint64_t next = table_.lane(spec.op).next + static_cast<uint64_t>(waiting);
  if (number_of(spec.op) != next)
    return {op_name(spec.op) + " is out of order; next is " + std::to_string(next)};
  if (std::string wrong = spec.plan.validate(); !wrong.empty())
    return {"plan: " + wrong, -1, Cause::plan};
  if (const size_t shards = spec.plan.shards.size(); shards && shards != config_.aggregators())
    return {"plan: shards has " + std::to_string(shards) + " entries; one for each of " +
                std::to_string(config_.aggregators()) + " aggregators is needed",
            -1, Cause::plan};
  if (!spec.data.bytes) return {"data is null"};
  if (std::string wrong = check_messages(spec, config_); !wrong.empty()) return {wrong};
  const uint64_t chunks = Grid::count(spec.plan, config_.datagram_bytes);
  if (std::string wrong = check_priorities(spec.plan, chunks, spec.priorities); !wrong.empty())
    return {wrong};
  const uint64_t need = memory_of(spec.plan, config_);
  own_.push_back({std::move(spec), need, now});
  return {};
}

const Admission::Own* Admission::next_own(Failure& why) const {
  std::set<uint16_t> behind;  // lanes with an op that waits longer
  for (const Own& own : own_) {
    const uint64_t id = own.spec.op;
    if (behind.contains(lane_of(id))) continue;
    const Room room = room_for(id, own.need);
    if (room == Room::never) why = too_large(id, own.spec.step, own.need);
    if (room != Room::later) return &own;
    behind.insert(lane_of(id));
  }
  return nullptr;
}

Admission::Own Admission::take(const Own& own) {
  const auto at = std::ranges::find_if(own_, [&own](const Own& each) { return &each == &own; });
  Own taken = std::move(*at);
  own_.erase(at);
  return taken;
}

// The OPENs of a lane's next op may take all free memory, because nothing goes on without that op.
Admission::Took Admission::add_open(uint64_t id, uint16_t worker, uint32_t part,
                                    std::span<const uint8_t> payload, Failure& why) {
  const uint64_t cost = MessageReceiver::cost(payload.size());
  if (!memory_.has_early(cost)) {
    const bool next = id == table_.next_admitted(id);
    if (!next || memory_.held() + cost > memory_.limit) {
      if (next && stuck(id))
        why = {"memory_limit=" + std::to_string(memory_.limit * config_.engines) + " at " +
                   config_.name(config_.endpoint) + ": it does not hold the OPENs of " +
                   op_name(id) + "; raise it, or use fewer regions",
               config_.endpoint, Cause::memory};
      return Took::no_room;
    }
  }
  Opens& messages = served_[id].messages;
  MessageReceiver& message = messages[worker];
  const size_t before = message.held();
  const auto result = message.part(part, payload, Outbox::part_bytes(config_.datagram_bytes));
  memory_.early += message.held() - before;
  if (result == MessageReceiver::Result::complete) return Took::whole;
  if (result == MessageReceiver::Result::incomplete) return Took::part;
  if (message.held() == 0) messages.erase(worker);
  if (messages.empty()) served_.erase(id);
  return Took::malformed;
}

// The pushes of a lane's earlier op come first, and could not be taken if a later op held the
// memory.
std::optional<Admission::Served> Admission::next_served(Failure& why) {
  for (auto& [id, waiting] : served_) {
    if (id != table_.next_admitted(id)) continue;
    const auto ready = std::ranges::find_if(waiting.messages,
                                            [](const auto& entry) { return entry.second.done(); });
    if (ready == waiting.messages.end()) continue;
    uint64_t early = 0;
    for (const auto& [worker, message] : waiting.messages) early += message.held();
    if (waiting.need && room_for(id, waiting.need, early) == Room::later) continue;
    Served served;
    if (!read_spec(id, ready->second.beginning(), config_, served.spec)) {
      why = {config_.name(ready->first) + " sent an OPEN of " + op_name(id) +
                 " that holds no valid plan",
             ready->first, Cause::plan};
      return std::nullopt;
    }
    waiting.need = memory_of(served.spec.plan, config_);
    const Room room = room_for(id, waiting.need, early);
    if (room == Room::later) continue;
    if (room == Room::never) {
      why = too_large(id, served.spec.step, waiting.need);
      return std::nullopt;
    }
    served.opens = std::move(waiting.messages);
    served_.erase(id);
    memory_.early -= early;
    return served;
  }
  return std::nullopt;
}

bool Admission::awaits(uint16_t worker) const {
  return std::ranges::any_of(
      served_, [worker](const auto& entry) { return entry.second.messages.contains(worker); });
}

// Decides whether memory lets a lane's next op start; messages of that op already hold `early`
// bytes.
Admission::Room Admission::room_for(uint64_t id, uint64_t need, uint64_t early) const {
  const bool first = std::ranges::none_of(
      table_.all(), [id](const auto& other) { return lane_of(other.first) == lane_of(id); });
  if (memory_.has_op(need, first, early)) return Room::now;
  return need > memory_.most_of_ops() || stuck(id) ? Room::never : Room::later;
}

// True when no op will free memory for this one. None of its own lane is under way, and those of
// other lanes may never end: some worker has not begun them, and may wait for this op first.
bool Admission::stuck(uint64_t id) const {
  return std::ranges::none_of(table_.all(), [id](const auto& entry) {
    const Op& other = *entry.second;
    return lane_of(other.id) == lane_of(id) || other.done() || other.all_opened();
  });
}

// The failure of an op that never gets its memory: it exceeds the limit alone, or beside ops of
// other lanes.
Failure Admission::too_large(uint64_t id, uint64_t step, uint64_t need) const {
  const bool alone = need > memory_.most_of_ops();
  const uint64_t held = alone ? 0 : memory_.ops + memory_.waiting;
  const uint64_t least = Memory::least_limit(held + need) * config_.engines;
  return {"memory_limit=" + std::to_string(config_.memory_limit * config_.engines) + " at " +
              config_.name(config_.endpoint) + ": step " + std::to_string(step) + ", " +
              op_name(id) + " needs at least " + std::to_string(least) + " bytes" +
              (alone ? "" : ", with what runs beside it") + "; raise it, or use smaller buckets" +
              (config_.servers ? " or more servers" : ""),
          config_.endpoint, Cause::memory};
}

}  // namespace gradwire
