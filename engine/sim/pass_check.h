// Control "probe" as seen on the wire: within a pass no chunk goes twice, and none goes between a
// PROBE and the next pass.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "proto/plan/plan.h"
#include "wire/packet.h"

namespace gradwire::sim {

class PassCheck {
 public:
  // A packet of an op with this plan, as it leaves `source`. Returns "" or what is wrong.
  std::string sent(const Plan& plan, uint16_t source, uint16_t destination,
                   const wire::Header& header, std::span<const uint8_t> payload);
  // A BITMAP reached `destination`: its sender may begin the next pass.
  void bitmap_arrived(uint16_t destination, uint16_t source, const wire::Header& header,
                      std::span<const uint8_t> payload);
  void forget(uint32_t op);

 private:
  struct Flow {
    uint32_t op;
    uint16_t from;
    uint16_t to;
    wire::Way way;
    auto operator<=>(const Flow&) const = default;
  };
  struct Progress {
    uint32_t probed = 0;                          // PROBEs sent
    uint32_t answered = 0;                        // passes of which a part of a BITMAP has come
    std::unordered_map<uint32_t, uint32_t> last;  // chunk -> the pass it last went in
  };
  std::map<Flow, Progress> flows_;
};

}  // namespace gradwire::sim
