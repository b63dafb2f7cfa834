#include "proto/pull/pull_receiver.h"

#include <utility>

namespace gradwire {

PullReceiver::PullReceiver(const Plan& plan, const Grid& grid, const Grid::Shard& shard, bool own)
    : begin_(shard.begin),
      takes_results_(own || plan.pull != Pull::none),
      missing_(takes_results_ ? shard.size() : 0),
      awaits_close_(shard.size() > 0 && ends_with_close(plan)),
      awaits_commit_(shard.size() > 0 && plan.pull == Pull::committed),
      arrived_(shard.size()) {
  if (own || plan.pull != Pull::lossy) return;
  ledger_.emplace(plan, grid, shard);
  if (plan.control == Control::probe) passes_.emplace();
}

bool PullReceiver::insert(uint32_t chunk) {
  if (!arrived_.set(chunk - begin_)) return false;
  if (wanted(chunk)) --missing_;
  if (ledger_) ledger_->arrived(chunk);
  return true;
}

void PullReceiver::want(Bitmap wanted) {
  wanted_ = std::move(wanted);
  if (!takes_results_) return;
  missing_ = 0;
  for (size_t i = 0; i < wanted_.size(); ++i) missing_ += wanted_.test(i) && !arrived_.test(i);
}

void PullReceiver::on_close(Bitmap counted, Bitmap applied, const Bitmap& needed) {
  if (!std::exchange(awaits_close_, false)) return;
  if (ledger_) ledger_->on_close(applied, needed);
  counted_ = std::move(counted);
  if (wanted_.size() == 0) want(std::move(applied));  // COMMIT has not arrived
}

void PullReceiver::on_commit(Bitmap committed) {
  if (std::exchange(awaits_commit_, false)) want(std::move(committed));
}

bool PullReceiver::complete() const {
  return !awaits_close_ && !awaits_commit_ && (ledger_ ? ledger_->enough() : missing_ == 0);
}

}  // namespace gradwire
