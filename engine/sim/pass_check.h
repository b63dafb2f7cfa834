// PassCheck checks control "probe" on the wire: within a pass no chunk goes twice, and none goes
// between a PROBE and the next pass.
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
  // Checks a packet of an op with this plan as it leaves `source`; an empty string, or what is
  // wrong.
  std::string sent(const Plan& plan, uint16_t source, uint16_t destination,
                   const wire::Header& header, std::span<const uint8_t> payload);
  // Records that a BITMAP has reached `destination`, whose next pass may begin.
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
    uint32_t probed = 0;                          // the highest pass with a PROBE
    uint32_t answered = 0;                        // the highest pass with a part of its BITMAP
    std::unordered_map<uint32_t, uint32_t> last;  // by chunk: the last pass it went in
  };
  std::map<Flow, Progress> flows_;
};

}  // namespace gradwire::sim
