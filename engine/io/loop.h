// Loop is the engine of a process: a socket, an endpoint, and the one thread that drives them.
//
// Construct it, connect() it to all endpoints, start() ops and take their reports with
// next_report(), then close() it. Callers share only commands and reports with the thread, under a
// mutex held for moments.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/address.h"
#include "io/bell.h"
#include "io/drop.h"
#include "io/gate.h"
#include "io/socket.h"
#include "proto/endpoint/endpoint.h"

namespace gradwire::io {

// All counters and peers at one moment.
struct Snapshot {
  Counters endpoint;
  std::vector<PeerState> peers;
  SocketCounters socket;
  Features features;
  GateCounters gate;
  uint64_t strangers = 0;  // datagrams from unknown addresses
  uint64_t injected = 0;   // datagrams dropped by set_drop
  uint64_t wakeups = 0;
};

class Loop {
 public:
  // Binds the socket. `config` has the length of datagrams without the tags that `keys` append.
  // `bell` rings whenever a caller may have something to take. Throws std::system_error whose text
  // has the address, and std::runtime_error without libcrypto.
  Loop(const EndpointConfig& config, const Keys& keys, const std::string& host, uint16_t port,
       std::shared_ptr<Bell> bell = nullptr);
  // Closes the engine. In a forked child, which has no engine thread, it does nothing.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  const Address& address() const;
  const EndpointConfig& config() const;

  // Takes the addresses of all endpoints in order and starts the thread. Datagrams that arrived
  // before are dropped.
  void connect(const std::vector<std::pair<std::string, uint16_t>>& addresses);
  // Waits until all endpoints have answered, `timeout` passes or the engine fails; returns those
  // that have not answered.
  std::vector<uint16_t> wait_connected(Nanos timeout);

  // Starts an op without blocking. Throws std::runtime_error when the engine is not connected, has
  // failed or is closed; anything else that is wrong with the op comes back as its report.
  void start(OpSpec spec);
  // The next report; none after the time-out, or when the engine is closed and all were taken.
  std::optional<OpReport> next_report(Nanos timeout);
  bool closed() const;

  void set_drop(const DropOptions& options);
  Snapshot snapshot();
  // Keeps so many entries of the engine's timeline from now on (0: none); returns those since the
  // last call.
  std::vector<Timeline::Entry> record(size_t entries);
  Failure failure() const;

  // Fails the endpoint for a reason of the caller's, which the peers are told.
  void fail(const std::string& why);
  void fail(const Failure& why);

  // Begins to close without waiting.
  void begin_close();
  // Closes the endpoint, joins the thread and fails open ops. Any thread may call it, and more than
  // once.
  void close();

  // For a forked child: closes its copy of the socket, which would keep the port after the parent
  // closes.
  void leave_to_parent();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::io
