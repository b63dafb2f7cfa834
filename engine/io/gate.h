// Gate is where datagrams leave and enter an engine: what goes is sealed for its peer, and only
// what a peer has sealed comes in. An engine without keys has an open gate.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/train.h"
#include "seal/seal.h"

namespace gradwire::io {

// Keys is what an engine needs for its peers.
struct Keys {
  seal::Mode mode = seal::Mode::none;
  seal::Cipher cipher = seal::Cipher::aes_128_gcm;
  // By endpoint: of what goes there, and of what comes from there; none for those without packets.
  std::vector<std::optional<std::pair<seal::Secret, seal::Secret>>> secrets;
};

struct GateCounters {
  uint64_t forged = 0;    // datagrams that no peer has sealed, or that changed on the way
  uint64_t replayed = 0;  // datagrams that had come before, or came too late to know
};

class Gate {
 public:
  Gate(const Keys& keys, uint32_t session);

  // The bytes that each datagram is longer by on its way.
  uint32_t tag_bytes() const { return peers_.empty() ? 0 : wire::kTagBytes; }
  // Seals the datagrams of a train, once.
  void seal(Train& train);
  // The datagram as its peer has made it, or nothing if it is not one. The work for one is bounded,
  // and changes nothing unless it is the peer's. `source`: whose address it came from.
  std::span<const uint8_t> open(uint16_t source, std::span<uint8_t> datagram);
  const GateCounters& counters() const { return counters_; }

 private:
  struct Peer {
    seal::Sealer to;
    seal::Opener from;
  };
  uint32_t session_;
  std::vector<std::optional<Peer>> peers_;  // none: the gate is open
  std::vector<uint8_t> encrypted_;          // the datagrams of the latest train
  GateCounters counters_;
};

}  // namespace gradwire::io
