// Reassembly joins the fragments of datagrams that were longer than their path carries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "proto/base/bitmap.h"

namespace gradwire {

class Reassembly {
 public:
  // Datagrams; a newer one takes the place of an older one.
  static constexpr uint32_t kAtOnce = 64;

  // Adds a fragment. Returns the whole datagram `number` when this fragment completes it, else an
  // empty span; the span lives until the next call. `total`: the datagram's length; `most`: the
  // longest allowed.
  std::span<const uint8_t> add(uint32_t number, uint32_t total, uint32_t offset,
                               std::span<const uint8_t> part, uint32_t most) {
    if (total > most || part.empty() || offset >= total || part.size() > total - offset) return {};
    if (wholes_.empty()) wholes_.resize(kAtOnce);
    Whole& whole = wholes_[number % kAtOnce];
    if (whole.number != number || whole.bytes.size() != total || whole.over)
      whole.begin(number, total);
    const bool fresh = whole.note(offset, static_cast<uint32_t>(part.size()));
    // The first one has the header, of which the latest counts.
    if (fresh || (offset == 0 && part.size() == whole.length))
      std::memcpy(whole.bytes.data() + offset, part.data(), part.size());
    if (!fresh) return {};
    whole.over = whole.complete();
    return whole.over ? std::span<const uint8_t>(whole.bytes) : std::span<const uint8_t>();
  }

 private:
  // Whole is a datagram of which fragments have arrived. All of them have one length, but for the
  // last, which may be shorter; another one is ignored.
  struct Whole {
    static constexpr uint32_t kUnknown = UINT32_MAX;
    uint32_t number = 0;
    uint32_t last = kUnknown;  // offset of the last fragment; kUnknown: it has not arrived
    uint32_t length = 0;       // of each other one; 0: none has arrived
    uint32_t count = 0;        // of these
    uint32_t end = 0;          // of the furthest of these
    Bitmap known;              // these, by offset / length
    bool over = false;         // it was complete; what comes now belongs to a repeat
    std::vector<uint8_t> bytes;

    void begin(uint32_t of, uint32_t total) {
      number = of;
      last = kUnknown;
      length = count = end = 0;
      over = false;
      bytes.resize(total);
    }
    // Notes a fragment; false when it is known, or none of the datagram's.
    bool note(uint32_t offset, uint32_t size) {
      if (offset + size == bytes.size()) {
        if (last != kUnknown) return false;
        last = offset;
        return true;
      }
      if (length == 0) {
        length = size;
        known = Bitmap(bytes.size() / length);
      }
      if (size != length || offset % length || !known.set(offset / length)) return false;
      ++count;
      end = std::max(end, offset + size);
      return true;
    }
    // The others lie apart, so they leave no gap where they have as many bytes as they reach over.
    bool complete() const { return end == last && count * length == end; }
  };
  std::vector<Whole> wholes_;
};

}  // namespace gradwire
