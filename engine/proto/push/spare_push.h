// SparePush is a push under an eager close that also sends chunks beyond its list: once something
// was declared lost, they go in place of chunks that may be lost.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/push/stream_push.h"

namespace gradwire {

class SparePush : public StreamPush {
 public:
  SparePush(const Plan& plan, const Grid& grid, const Grid::Shard& shard, const PushList& list);

  Slice next(size_t most, bool fresh) override;
  void lost(uint32_t chunk, Again why) override;

 private:
  // Reserve holds the chunks of one region that may go in place of doubted ones. Doubted chunks
  // were sent and may be lost, and others of their region have been queued in their place.
  struct Reserve {
    uint64_t need = 0;      // elements with which the region closes
    uint64_t underway = 0;  // elements acknowledged, queued or in flight, without doubted ones
    ChunkFifo waiting;      // the spares, then the doubted
  };
  void leave_reserve(uint32_t chunk) override;
  void put_back(uint32_t chunk);
  void doubt(uint32_t chunk);

  std::vector<Reserve> reserve_;  // by region
  std::vector<uint8_t> unsent_;   // by chunk: a spare that has not been sent
  bool losing_ = false;           // a chunk of this push was declared lost
};

}  // namespace gradwire
