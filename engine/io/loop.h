// One engine of a process: a socket, an endpoint, and the one thread that drives them.
//
// Callers hand over commands and take reports through two short critical sections; everything else
// belongs to the thread alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/address.h"
#include "io/drop.h"
#include "io/socket.h"
#include "proto/endpoint/endpoint.h"

namespace gradwire::io {

// Everything that is counted, at one moment.
struct Snapshot {
  Counters endpoint;
  std::vector<PeerState> peers;
  SocketCounters socket;
  Features features;
  uint64_t strangers = 0;  // datagrams from addresses that are no endpoint's
  uint64_t injected = 0;   // datagrams dropped by set_drop
  uint64_t wakeups = 0;
};

class Loop {
 public:
  // Binds at once. Throws std::system_error (a text that names the address).
  Loop(const EndpointConfig& config, const std::string& host, uint16_t port);
  // Closes; does nothing at all in a forked child, whose thread does not exist.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  const Address& address() const;
  const EndpointConfig& config() const;

  // The addresses of all endpoints in order; starts the thread. What arrived before is dropped.
  void connect(const std::vector<std::pair<std::string, uint16_t>>& addresses);
  // The endpoints that have not answered, once all have or `timeout` passed or the engine failed.
  std::vector<uint16_t> wait_connected(Nanos timeout);

  // Never blocks. Throws std::runtime_error when the engine is not connected, has failed or is
  // closed; what else is wrong with the op comes back as its report.
  void start(OpSpec spec);
  // The next report; none at the time-out or once closed and emptied.
  std::optional<OpReport> next_report(Nanos timeout);
  bool closed() const;

  void set_drop(const DropOptions& options);
  Snapshot snapshot();
  Failure failure() const;

  // Says goodbye, joins the thread, fails what is open. Idempotent, from any thread.
  void close();

  // In a forked child: lets go of the socket, which would hold the port when the parent has closed.
  void leave_to_parent();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::io
