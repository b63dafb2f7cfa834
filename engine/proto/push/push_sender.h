// The strategy with which a worker sends one shard, as its plan has it.
#pragma once

#include <memory>

#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/chunk_sender.h"
#include "proto/push/push_list.h"

namespace gradwire {

// `may_differ`: under loss, the push may send chunks beyond its list. This is for plans where that
// makes no worker pull more.
std::unique_ptr<ChunkSender> make_push_sender(const Plan& plan, const Grid& grid,
                                              const Grid::Shard& shard, PushList list,
                                              bool may_differ);

}  // namespace gradwire
