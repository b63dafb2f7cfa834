// The strategy with which a worker sends one shard, as its plan has it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/chunk_sender.h"

namespace gradwire {

// `may_differ`: under loss, the push may send chunks beyond its list. This is for plans where that
// makes no worker pull more.
std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard,
                                              std::span<const uint32_t> critical,
                                              std::span<const uint8_t> priorities, bool may_differ);

}  // namespace gradwire
