// Admission decides when memory lets an op start. Own ops wait for it, and so do ops of which a
// server has OPENs; a lane's ops start in order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "proto/base/config.h"
#include "proto/base/failure.h"
#include "proto/base/memory.h"
#include "proto/base/message.h"
#include "proto/op/op_spec.h"
#include "proto/op/op_table.h"

namespace gradwire {

class Admission {
 public:
  // All outlive it.
  Admission(const EndpointConfig& config, const OpTable& table, Memory& memory)
      : config_(config), table_(table), memory_(memory) {}

  // Own are the ops of this worker that wait, in order of arrival. Their time-outs run meanwhile.
  struct Own {
    OpSpec spec;
    uint64_t need;  // bytes
    Nanos since;
  };
  // Adds an own op, or says why it cannot be.
  Failure add(OpSpec spec, Nanos now);
  // The own op that starts next, or null while memory lets none start. `why`: it never will.
  const Own* next_own(Failure& why) const;
  Own take(const Own& own);
  std::deque<Own> take_all() { return std::exchange(own_, {}); }

  // A worker's OPEN of an op that this server does not have yet; it contains the plan.
  using Opens = std::map<uint16_t, MessageReceiver>;  // by worker
  struct Served {
    OpSpec spec;
    Opens opens;
  };
  enum class Took : uint8_t { part, whole, no_room, malformed };
  Took add_open(uint64_t id, uint16_t worker, uint32_t part, std::span<const uint8_t> payload,
                Failure& why);
  // Takes out the op that starts next, or nothing. `why`: the job cannot go on.
  std::optional<Served> next_served(Failure& why);
  // True when a part of an OPEN of this worker waits here.
  bool awaits(uint16_t worker) const;

 private:
  struct Waiting {
    uint64_t need = 0;  // bytes of the op, once it is known
    Opens messages;
  };
  enum class Room : uint8_t { now, later, never };
  Room room_for(uint64_t id, uint64_t need, uint64_t early = 0) const;
  bool stuck(uint64_t id) const;
  Failure too_large(uint64_t id, uint64_t step, uint64_t need) const;

  const EndpointConfig& config_;
  const OpTable& table_;
  Memory& memory_;
  std::deque<Own> own_;
  std::map<uint64_t, Waiting> served_;  // by op
};

}  // namespace gradwire
