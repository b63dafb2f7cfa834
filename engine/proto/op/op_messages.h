// The bodies of an op's messages: OPEN starts it at other endpoints, FOLD, CLOSE and COMMIT end it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/config.h"
#include "proto/op/op_spec.h"
#include "proto/plan/grid.h"
#include "wire/packet.h"

namespace gradwire {

// Open is what OPEN begins with; the plan and a bitmap of critical chunks follow.
struct Open {
  uint64_t hash;
  uint64_t step;
  uint64_t elements;
  Stats stats;
  uint32_t plan_bytes;  // 0 between workers, which have the plan
  uint16_t has_critical;
  uint16_t longest;  // the longest datagram of the worker's paths; 0: as agreed
};

// Fold is what all workers report of an op, folded in rank order.
struct Fold {
  Stats stats{};
  uint16_t agreed = 0;  // the longest datagram that all workers' paths carry; 0: as agreed
};

std::vector<uint8_t> open_body(const OpSpec& spec, uint64_t hash, const Grid::Shard& shard,
                               std::span<const uint8_t> plan, uint16_t longest);
bool read_open(wire::Reader& reader, Open& open);
// Reads what an OPEN says of its op; false when it holds no valid plan.
bool read_spec(uint64_t id, std::span<const uint8_t> open, const EndpointConfig& config,
               OpSpec& spec);
// Reads a bitmap of as many bits as it has; false when the message is too short.
bool read_bitmap(wire::Reader& reader, Bitmap& bitmap);
std::vector<uint8_t> fold_body(const Fold& fold);
bool read_fold(wire::Reader& reader, Fold& fold);

// The longest message (OPEN or CLOSE) of an op whose shards have at most this many chunks.
uint64_t longest_message(const Plan& plan, uint64_t chunks, const EndpointConfig& config);
// An empty string, or which message of the op would exceed kMaxMessage.
std::string check_messages(const OpSpec& spec, const EndpointConfig& config);

}  // namespace gradwire
