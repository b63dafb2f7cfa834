// PushList is what a worker sends of one shard, in order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"

namespace gradwire {

// True for plans whose regions close from the start at one minus the bound (spend anything, control
// stream). Such a push sends no more than the close needs.
bool eager_from_start(const Plan& plan);

// The critical chunks come first, then the others by the worker's priority classes (order
// priority), then in the order that all workers share. When the plan closes eagerly from the start,
// only as much of each region is sent as the close asks for. All workers then leave out the same
// chunks, or with classes each its own last ones.
struct PushList {
  PushList(const Plan& plan, const Grid& grid, const Grid::Shard& shard, Bitmap critical,
           std::span<const uint8_t> priorities = {});

  std::vector<uint32_t> sent;
  std::vector<uint32_t> spares;  // the chunks left out
  Bitmap critical;               // chunks of the shard
};

}  // namespace gradwire
