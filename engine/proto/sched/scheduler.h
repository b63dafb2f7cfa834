// Scheduler knows what waits for each destination, and chooses the next one. Its counts are kept as
// ops change; nothing is searched for a train.
//
// Call set_backlog() when an op's chunks for a destination change, and set_state() when its path
// does. choose() names the destination of the next train, and next_op() its ops in turn.
#pragma once

#include <cstdint>
#include <vector>

namespace gradwire {

struct Op;

class Scheduler {
 public:
  explicit Scheduler(size_t destinations) : table_(destinations), queues_(destinations) {}

  // Waiting counts an op's chunks for one destination.
  struct Waiting {
    uint32_t ready = 0;
    uint32_t early = 0;  // sent only while there is room for ops that have not started there
  };
  void set_backlog(uint16_t to, uint64_t op, Op* what, Waiting waiting);
