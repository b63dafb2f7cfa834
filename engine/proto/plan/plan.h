// Plan is the engine's form of TransferPlan: what one op may lose, when its regions close, how it
// is summed. All endpoints agree on it (its hash travels in OPEN), and it never changes in flight.
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
// none: push only (reduce-scatter), each result stays at its aggregator. lossy: each worker goes
// without up to pull_bound of each region's results, which may differ from its peers', so replicas
// differ.
enum class Pull : uint8_t { exact, committed, none, lossy };
// How missing chunks are found and sent again. stream: by packet. probe: a push, and a lossy pull,
// goes in passes (proto/push/passes.h).
enum class Control : uint8_t { stream, probe };
enum class Clock : uint8_t { open, first_arrival, tail };
enum class Scope : uint8_t { worker, all };

// A header has three bits for the class (wire/packet.h).
inline constexpr size_t kPriorityClasses = 8;
// A DSCP has six bits (RFC 2474).
inline constexpr uint8_t kMostDscp = 63;

// From `delay` after `clock` on, a region may close once `fraction` of its elements are counted.
struct ScheduleStep {
  // Stands for the fraction 1 - bound of each region.
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
  std::vector<uint8_t> class_dscp;  // order priority: by class; empty: the engine's DSCP for all
  // The elements that each aggregator sums, in order; empty: even shares that end between chunks.
  std::vector<uint64_t> shards;

  // The format of results. A push alone sends none, so they stay exact.
  codec::Format result_format() const { return pull == Pull::none ? codec::Format{} : format; }
  // True when no chunk of the push may be lost; such plans sum in rank order.
  bool exact() const;
  // An empty string, or what is wrong: the field, its value and what is allowed.
  std::string validate() const;
  std::vector<uint8_t> serialize() const;
  // Returns false when the bytes are not a valid plan.
  static bool deserialize(std::span<const uint8_t> bytes, Plan& out);
  uint64_t hash() const;
};

}  // namespace gradwire
