// PullLedger decides whether a worker has enough results of each region of one shard (pull lossy).
// What has not arrived by then is missing at this worker alone.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"

namespace gradwire {

// The elements of a region's results that one worker may go without.
uint64_t pull_losable(const Plan& plan, uint32_t region, uint64_t elements);

class PullLedger {
 public:
  PullLedger(const Plan& plan, const Grid& grid, const Grid::Shard& shard);

  // Counts a result that had not arrived before.
  void arrived(uint32_t chunk);
  // Handles CLOSE: which chunks have a result, and which results every worker must have.
  void on_close(const Bitmap& results, const Bitmap& needed);

  bool closed() const { return closed_; }
  // True when every region has enough; never before CLOSE.
  bool enough() const { return closed_ && open_ == 0; }
  // The missing results of the regions that need more.
  Bitmap missing() const;

 private:
  struct Region {
    uint64_t results = 0;  // elements
    uint64_t arrived = 0;
    uint64_t losable = 0;
    uint32_t needed = 0;  // critical results that have not arrived
    bool enough = true;   // a region without a chunk in the shard
  };
  void judge(uint32_t region);

  const Plan& plan_;
  const Grid& grid_;
  Grid::Shard shard_;
  Bitmap arrived_;
  Bitmap results_;
  Bitmap needed_;
  std::vector<Region> regions_;
  uint32_t open_ = 0;  // regions without enough
  bool closed_ = false;
};

}  // namespace gradwire
