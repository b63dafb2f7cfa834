// CommittedPull decides which results of one shard all workers go without (pull committed). A
// result that is lost on its way to a worker is left out for all while its region's bound has room,
// else it is sent again. COMMIT lists the others, once every worker has them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/aggregator.h"

namespace gradwire {

class CommittedPull {
 public:
  CommittedPull(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                const Aggregator& sum);

  // A result was lost on its way to a worker. True when no worker needs it any more.
  bool lost(uint32_t chunk);
  // The sum is complete: no result follows.
  void seal() { sealed_ = true; }
  // Every worker has the finished results that are not withheld. Returns the results that all
  // apply, for COMMIT; only once, and not before seal().
  std::optional<Bitmap> decide();

  bool withheld(uint32_t chunk) const { return withheld_.test(chunk - begin_); }
  // COMMIT has been decided.
  bool over() const { return over_; }

 private:
  const Plan& plan_;
  const Grid& grid_;
  const Aggregator& sum_;
  uint32_t begin_;
  Bitmap withheld_;
  std::vector<uint64_t> elements_;  // by region: withheld
  bool sealed_ = false;
  bool over_ = false;
};

}  // namespace gradwire
