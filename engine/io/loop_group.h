// LoopGroup is the engine of a process: one or several Loops, each with an endpoint, a socket and a
// thread of its own, which divide the chunks of every op among them.
//
// Each loop carries an op over its part of every shard (proto/plan/grid.h), in the caller's memory.
// The op's report comes once all of them have ended it, so that nobody writes into that memory any
// more. When one loop fails, the others fail for the same reason.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/bell.h"
#include "io/loop.h"

namespace gradwire::io {

class LoopGroup {
 public:
  using Place = std::pair<std::string, uint16_t>;

  // Binds one socket for each of `config.engines`, to the first ports that are free; each loop has
  // keys of its own. Throws as Loop does.
  LoopGroup(const EndpointConfig& config, std::span<const Keys> keys, const std::string& host,
            std::span<const uint16_t> ports);

  size_t size() const { return loops_.size(); }
  // Where the loops listen.
  std::vector<Place> addresses() const;

  // All as in Loop. connect() takes the addresses of all endpoints for each loop; the n-th loops of
  // all endpoints exchange packets.
  void connect(const std::vector<std::vector<Place>>& addresses);
  std::vector<uint16_t> wait_connected(Nanos timeout);
  void start(const OpSpec& spec);
  std::optional<OpReport> next_report(Nanos timeout);
  bool closed() const;
  void set_drop(const DropOptions& options);
  // The sum of all loops: what they have counted together, and of each peer what holds for all.
  Snapshot snapshot();
  // The timeline of each loop.
  std::vector<std::vector<Timeline::Entry>> record(size_t entries);
  // The first failure of any loop.
  Failure failure();
  void fail(const std::string& why);
  void close();
  void leave_to_parent();

 private:
  // Parts is what has come of an op so far.
  struct Parts {
    std::vector<double> bounds;  // of the plan's regions
    std::vector<std::optional<OpReport>> reports;
    size_t ended = 0;
  };
  void collect();
  OpReport joined(Parts parts) const;
  // Has all loops fail for the reason of the first that has failed; for that of one.
  void spread_failure();
  void fail_all(const Failure& why);

  std::shared_ptr<Bell> bell_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::mutex mutex_;  // of what follows
  Failure failure_;
  std::unordered_map<uint64_t, Parts> open_;
  std::deque<OpReport> reports_;
};

// Adds what another loop of the same process has counted.
void add(Counters& sum, const Counters& other);
void add(Snapshot& sum, const Snapshot& other);

}  // namespace gradwire::io
