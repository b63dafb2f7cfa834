// Reassembly joins the fragments of datagrams that were longer than their path carries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "proto/base/bitmap.h"
#include "wire/packet.h"

namespace gradwire {

class Reassembly {
 public:
  // Datagrams; a newer one takes the place of an older one.
  static constexpr uint32_t kAtOnce = 64;

  // Adds a fragment. Returns the whole datagram when this fragment completes it, else an empty
  // span; the span lives until the next call. `most`: the longest datagram allowed.
  std::span<const uint8_t> add(const wire::Fragment& fragment, std::span<const uint8_t> part,
                               uint32_t most) {
    const uint32_t each = fragment.each();
    const uint32_t offset = fragment.offset();
    if (fragment.total > most || offset >= fragment.total ||
        part.size() != std::min(each, fragment.total - offset))
      return {};
    if (wholes_.empty()) wholes_.resize(kAtOnce);
    Whole& whole = wholes_[fragment.number % kAtOnce];
    if (whole.number != fragment.number || whole.bytes.size() != fragment.total ||
        whole.each != each || whole.missing == 0) {
      const uint32_t count = (fragment.total + each - 1) / each;
      whole = {fragment.number, each, count, Bitmap(count), std::vector<uint8_t>(fragment.total)};
    }
    const bool fresh = whole.known.set(offset / each);
    // The first one has the header, of which the latest counts.
    if (fresh || offset == 0) std::memcpy(whole.bytes.data() + offset, part.data(), part.size());
    if (!fresh || --whole.missing > 0) return {};
    return whole.bytes;
  }

 private:
  // Whole is a datagram of which fragments have arrived.
  struct Whole {
    uint32_t number = 0;
    uint32_t each = 0;     // bytes of a fragment
    uint32_t missing = 0;  // fragments; 0: what comes now belongs to a repeat
    Bitmap known;
    std::vector<uint8_t> bytes;
  };
  std::vector<Whole> wholes_;
};

}  // namespace gradwire
