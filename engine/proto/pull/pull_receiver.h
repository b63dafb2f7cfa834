// PullReceiver is a worker's record of one aggregator's results. The ledger of a lossy pull decides
// which of them suffice.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "proto/base/bitmap.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/pull/pull_ledger.h"
#include "proto/push/passes.h"

namespace gradwire {

// True for plans whose ops end with CLOSE, which reports what counted.
inline bool ends_with_close(const Plan& plan) {
  return !plan.exact() || plan.pull != Pull::exact;
}

class PullReceiver {
 public:
  // `own`: the results are summed in this process, so none is lost.
  PullReceiver(const Plan& plan, const Grid& grid, const Grid::Shard& shard, bool own);

  // True when results of this aggregator arrive here (pull none: the own ones alone).
  bool takes_results() const { return takes_results_; }
  // Records an arrival; true when the chunk had not arrived before.
  bool insert(uint32_t chunk);
  bool has(uint32_t chunk) const { return arrived_.test(chunk - begin_); }
  // Handles CLOSE: which chunks of this worker counted, which chunks have a result and, for a
  // lossy pull, which results every worker must have.
  void on_close(Bitmap counted, Bitmap applied, const Bitmap& needed);
  // Handles COMMIT: the results that all workers apply.
  void on_commit(Bitmap committed);

  // The wanted chunks that have not arrived. All of the shard is wanted until CLOSE or COMMIT.
  uint32_t missing() const { return missing_; }
  // True until CLOSE says otherwise.
  bool counted(uint32_t chunk) const {
    return counted_.size() == 0 || counted_.test(chunk - begin_);
  }
  bool wanted(uint32_t chunk) const { return wanted_.size() == 0 || wanted_.test(chunk - begin_); }
  // True when this worker needs nothing more of this aggregator.
  bool complete() const;

  // The ledger of a lossy pull, else null.
  PullLedger* ledger() { return ledger_ ? &*ledger_ : nullptr; }
  // True once: ENOUGH of a lossy pull is due.
  bool tell_enough() { return !std::exchange(told_enough_, true); }
  // The passes of the results under control "probe", else null.
  PassReceiver* passes() { return passes_ ? &*passes_ : nullptr; }

 private:
  void want(Bitmap wanted);

  uint32_t begin_;
  bool takes_results_;
  uint32_t missing_;
  bool awaits_close_;
  bool awaits_commit_;
  Bitmap arrived_;
  Bitmap counted_;  // empty: not known yet, as wanted_
  Bitmap wanted_;
  std::optional<PullLedger> ledger_;
  std::optional<PassReceiver> passes_;
  bool told_enough_ = false;
};

}  // namespace gradwire
