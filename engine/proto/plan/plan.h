// TransferPlan as the engine sees it: what may be lost of one transfer, when it closes, how it is
// summed. A plan is agreed by all endpoints (its hash travels in OPEN) and never changes in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "proto/base/time.h"

namespace gradwire {

enum class Spend : uint8_t { nothing, late, lost, anything };
enum class Fill : uint8_t { zero, mean };
// priority: shuffled within the classes that each worker gives its own chunks.
enum class Order : uint8_t { sequential, shuffled, priority };
// none: push only (reduce-scatter): each result stays with its aggregator. lossy: each worker goes
// without up to pull_bound of each region's results, others than its peers: replicas differ.
enum class Pull : uint8_t { exact, committed, none, lossy };
// How what is missing is found and sent again: packet by packet (stream), or in passes, of a push
// and of a lossy pull (probe; proto/passes.h).
enum class Control : uint8_t { stream, probe };
enum class Clock : uint8_t { open, first_arrival, tail };
enum class Scope : uint8_t { worker, all };

inline constexpr size_t kPriorityClasses = 8;
inline constexpr uint8_t kMostDscp = 63;

// From `delay` after `clock` on, a region may close at `fraction` (of represented elements).
struct ScheduleStep {
  static constexpr double kOneMinusBound = -1.0;
  Clock clock = Clock::open;
  Scope scope = Scope::all;
  Nanos delay = 0;
  double fraction = 1.0;
};

struct Region {
  uint64_t offset = 0;  // elements
  uint64_t length = 0;
  double bound = 0.0;  // in [0, 1)
};

struct Plan {
  uint64_t elements = 0;
  std::vector<Region> regions;
  std::vector<ScheduleStep> schedule{ScheduleStep{}};
  Spend spend = Spend::nothing;
  Fill fill = Fill::zero;
  Order order = Order::sequential;
  Pull pull = Pull::exact;
  Control control = Control::stream;
  double pull_bound = 0.0;
  double scale = 1.0;
  codec::Format format;  // of pushed chunks and of results
  uint64_t seed = 0;
  uint32_t datagram_bytes = 0;      // what chunks are cut for; 0: what the endpoints agreed on
  std::vector<uint8_t> class_dscp;  // order priority: of each class; empty: the engine's for all

  // Of results: those of a push alone go nowhere, so they stay as they are.
  codec::Format result_format() const { return pull == Pull::none ? codec::Format{} : format; }
  // True when nothing of the push may be lost: such plans sum in rank order.
  bool exact() const;
  // "" or what is wrong, naming the field, the value and what is allowed.
  std::string validate() const;
  std::vector<uint8_t> serialize() const;
  // False when the bytes are not a valid plan.
  static bool deserialize(std::span<const uint8_t> bytes, Plan& out);
  uint64_t hash() const;
};

}  // namespace gradwire
