// Changes are the paths for which something may have changed since they last adapted. It keeps what
// the scheduler knows of the chunks that wait, and counts these once for many packets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "proto/op/op.h"
#include "proto/path/path.h"
#include "proto/sched/scheduler.h"

namespace gradwire {

class Changes {
 public:
  Changes(Scheduler& scheduler, size_t paths) : scheduler_(scheduler), of_(paths) {}

  // Something of this path has changed.
  void touch(const Path& path) {
    if (!std::exchange(of_[path.peer].listed, true)) touched_.push_back(path.peer);
  }
  // Other chunks of the op wait for the peer; they are counted before anybody asks.
  void touch(const Path& path, const Op& op) {
    Change& change = of_[path.peer];
    if (change.op == &op) return;
    if (change.op) count(path, *change.op);
    change.op = &op;
    touch(path);
  }
  // Counts what waits of an op for a peer.
  void count(const Path& path, const Op& op) {
    const Op::Backlog now = path.refuses(op.id) ? Op::Backlog{} : op.backlog(path.peer);
    const bool early = path.is_early(op.id);
    scheduler_.set_waiting(path.peer, op.id,
                           {now.sure + (early ? 0 : now.fresh), early ? now.fresh : 0});
  }
  // The op ends: nothing of it waits.
  void end(const Path& path, const Op& op) {
    Change& change = of_[path.peer];
    if (change.op == &op) change.op = nullptr;
    scheduler_.set_waiting(path.peer, op.id, {});
    touch(path);
  }
  // The chunks to send now, without those that wait for the peer to start their op.
  uint64_t backlog(const Path& path) {
    if (const Op* op = std::exchange(of_[path.peer].op, nullptr)) count(path, *op);
    return scheduler_.backlog(path.peer, scheduler_.any_early(path.peer) && path.early_room() > 0);
  }
  // Calls `adapt(peer)` for each path that has changed.
  template <class Adapt>
  void take(Adapt&& adapt) {
    for (const uint16_t peer : touched_) {
      of_[peer].listed = false;
      adapt(peer);
    }
    touched_.clear();
  }

 private:
  struct Change {
    bool listed = false;
    const Op* op = nullptr;  // what waits of it must be counted again
  };
  Scheduler& scheduler_;
  std::vector<Change> of_;         // by path
  std::vector<uint16_t> touched_;  // peers
};

}  // namespace gradwire
