// ChunkSender decides which chunk of one shard goes next to one peer, in a push or in a pull. Each
// strategy is a class of its own: StreamPush, SparePush, StreamPull, LossyPull, and PassSender for
// both directions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/again.h"

namespace gradwire {

class PassSender;

class ChunkSender {
 public:
  ChunkSender() = default;
  virtual ~ChunkSender() = default;
  ChunkSender(const ChunkSender&) = delete;
  ChunkSender& operator=(const ChunkSender&) = delete;

  // The chunks still to be sent or sent again; without `fresh` only those to be sent again.
  virtual uint32_t backlog(bool fresh) const = 0;
  // True when the receiver needs nothing more.
  virtual bool settled() const = 0;
  // Slice is chunks of one length that go one after another; one that is shorter goes alone.
  struct Slice {
    std::span<const uint32_t> chunks;  // until the next call
    bool again = false;                // they have gone before
    bool tail = false;                 // less than kTailShare of all follows
  };
  // Takes the chunks that go next, so many at most; none when there is nothing to send now. A pull
  // is always `fresh`.
  virtual Slice next(size_t most, bool fresh) = 0;
  // The chunk that next() would take, where chunks have classes.
  virtual bool peek(uint32_t& /*chunk*/, bool /*fresh*/) { return false; }
  // True for the chunk from which on less than this share of all follows.
  virtual bool in_last(double /*share*/) const { return false; }
  // True while the chunk is sent and neither acknowledged nor lost, where a pull may withhold it.
  virtual bool in_flight(uint32_t /*chunk*/) const { return false; }

  // True while the receiver may still ask for this chunk.
  virtual bool needs(uint32_t /*chunk*/) const { return true; }

  virtual void acked(std::span<const uint32_t> /*chunks*/) {}
  virtual void lost(uint32_t /*chunk*/, Again /*why*/) {}
  // The receiver needs this chunk no more.
  virtual void forget(uint32_t chunk) = 0;
  // The receiver needs no more of this region; false when no correct receiver would report it.
  virtual bool stop_region(uint32_t /*region*/) { return false; }
  // The chunks given up within the ledger's room since the last call (spend lost).
  virtual std::vector<uint32_t> take_forgiven() { return {}; }
  // Nothing more is sent.
  virtual void finish() {}

  // This sender where chunks go in passes, else null. In passes ACKs and losses of packets settle
  // nothing.
  virtual PassSender* passes() { return nullptr; }

 protected:
  // The share of a push whose last packets say so, for the close rule.
  static constexpr double kTailShare = 0.01;
  // True when less than this share of a list of so many follows the place `at`.
  static bool last_of(size_t at, size_t size, double share) {
    return at + static_cast<size_t>(share * static_cast<double>(size)) >= size;
  }
};

}  // namespace gradwire
