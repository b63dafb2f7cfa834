// TrainWriter writes a train of chunks for one path: as many packets as fit of one length and one
// DSCP, each with what its receiver needs to know of those that follow.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/base/train.h"
#include "proto/op/op.h"
#include "proto/path/path.h"
#include "wire/packet.h"

namespace gradwire {

class TrainWriter {
 public:
  // `most`: the packets of this train at most. `memory` keeps encoded payloads until it has gone.
  TrainWriter(Path& path, uint32_t most, std::vector<uint8_t>& memory, Nanos now, Train& train);

  // Nothing more can be added.
  bool full() const { return full_; }
  // Chunks may go that the peer may not be ready for.
  bool has_early_room() const { return early_ > 0; }
  // Adds the chunks of an op that go next.
  void fill(Op& op);

 private:
  void count_early(const Op& op, const Chunks& chunks);
  size_t most_alike(const Op& op, bool early) const;
  uint32_t twins_of(const Op& op, const Chunks& chunks) const;
  void write_twins(Op& op, const Chunks& chunks);
  uint32_t write(Op& op, const Chunks& chunks, bool twin);

  // Elements encoded for one train. Its packets are stamped before, so the time of encoding looks
  // like queueing to the receiver.
  static constexpr uint32_t kMostEncoded = 1U << 16;

  Path& path_;
  Train& train_;
  std::vector<uint8_t>& memory_;
  Nanos now_;
  uint32_t most_;         // packets
  uint64_t left_;         // chunks that wait for this peer
  uint64_t early_;        // chunks that may go early
  double loss_;           // the share of packets that is lost
  bool by_share_;         // the receiver's window limits this path
  uint32_t encoded_ = 0;  // elements
  bool full_ = false;
};

}  // namespace gradwire
