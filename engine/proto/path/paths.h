// Paths are all paths of one endpoint, and what is added up over them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/congestion/send_controller.h"
#include "proto/path/path.h"
#include "proto/path/port.h"

namespace gradwire {

class Paths {
 public:
  // One to each endpoint that this one exchanges packets with.
  Paths(Port& port, Nanos now);

  // Null for the own endpoint, and for those that it exchanges no packets with.
  Path* find(size_t peer) const { return peer < by_peer_.size() ? by_peer_[peer].get() : nullptr; }
  Path& at(size_t peer) const { return *by_peer_[peer]; }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

  // Lets a path adapt to a change, and counts what kind of path it is then.
  void adapt(Path& path, uint64_t backlog, Nanos now);
  bool any_lossy() const { return lossy_ > 0; }
  // The longest of the long paths that have a backlog.
  SendController::LongPaths long_paths() const;
  // What may go of what was granted in turns.
  SendController::Turn turn() const;
  // Bytes that all receivers allow here, as they have reported lately.
  double windows(Nanos now) const;
  // The rate in bytes/s to use while only heavy loss has shown one, else 0.
  double unproven_rate(Nanos now) const;
  // The longest datagram that all paths carry both ways.
  uint32_t longest_datagram() const;
  // The shortest round-trip time, or 0.
  Nanos rtprop() const;
  // The first peer that left before this op was complete there, or null.
  const Path* left_before(uint64_t op) const;
  // All peers have what they need to know of this endpoint's end.
  bool farewells_over() const;
  // When a packet of a peer that has not left last arrived.
  Nanos last_heard() const;

 private:
  Port& port_;
  std::vector<std::unique_ptr<Path>> by_peer_;
  std::vector<Path*> all_;
  int long_ = 0;
  int lossy_ = 0;
};

}  // namespace gradwire
