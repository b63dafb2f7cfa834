// PassSender and PassReceiver implement control "probe", in which chunks go in passes. The sender
// sends a whole pass without recovering losses, then a PROBE. The receiver answers with the BITMAP
// of missing chunks, which are the next pass, or with STOP; it may send STOP in mid-pass as well.
// There is one pair for each shard, worker and direction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/again.h"
#include "proto/base/bitmap.h"
#include "proto/base/message.h"
#include "proto/plan/grid.h"
#include "proto/push/chunk_sender.h"

namespace gradwire {

class PassSender : public ChunkSender {
 public:
  // A push has a list, which is its first pass.
  PassSender(const Grid::Shard& shard, std::span<const uint32_t> list) : PassSender(shard) {
    add(list);
    sealed_ = true;
  }
  // The first pass of a pull has the results in the order in which they become final. It ends with
  // seal().
  PassSender(const Grid::Shard& shard, const std::vector<uint32_t>* finished) : PassSender(shard) {
    finished_ = finished;
  }

  uint32_t backlog(bool fresh) const override;
  // True once nothing will be sent any more.
  bool settled() const override { return stopped_ || (sealed_ && open_ == 0); }
  Slice next(size_t most, bool fresh) override;
  void forget(uint32_t chunk) override;
  void finish() override { stopped_ = true; }
  void acked(std::span<const uint32_t> chunks) override { land(chunks.size()); }
  void lost(uint32_t /*chunk*/, Again /*why*/) override { land(1); }
  PassSender* passes() override { return this; }

  uint32_t pass() const { return pass_; }
  // No results follow.
  void seal();
  // True once for each pass: all of it has gone and its PROBE is due. After a pass of which nothing
  // has arrived, that is when no chunk is in flight any more: PROBEs and their answers, which are
  // shorter, would take what a policer lets pass.
  bool take_probe();

  // Takes one part of the BITMAP for pass `pass`. False when no correct receiver would send it; a
  // late one is ignored.
  bool bitmap_part(uint32_t pass, uint32_t index, std::span<const uint8_t> part,
                   uint32_t part_bytes);
  // Takes a STOP, which is final for every pass. False when no correct receiver would send it.
  bool stop(uint32_t pass);

 private:
  enum class State : uint8_t { absent, open, settled };
  explicit PassSender(const Grid::Shard& shard)
      : begin_(shard.begin), state_(shard.size(), State::absent) {}
  void add(std::span<const uint32_t> chunks);
  void join();
  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  void skip_settled();
  bool begin_pass(const Bitmap& missing);
  void land(size_t chunks) { flying_ -= std::min(flying_, chunks); }

  uint32_t begin_;
  std::vector<State> state_;
  const std::vector<uint32_t>* finished_ = nullptr;  // a pull's results
  size_t joined_ = 0;                                // of these, in the first pass
  std::vector<uint32_t> list_;                       // chunks of this pass
  size_t cursor_ = 0;
  uint32_t open_ = 0;  // unsettled chunks of this pass
  uint32_t pass_ = 1;
  bool sealed_ = false;
  bool probed_ = false;  // the PROBE of this pass has been sent
  bool stopped_ = false;
  bool futile_ = false;  // nothing of the pass before has arrived
  size_t flying_ = 0;    // packets
  MessageReceiver bitmap_;
};

// PassReceiver records which pass the sender has asked about, and which has been answered.
class PassReceiver {
 public:
  // Takes a PROBE. False when no correct sender would send it; a repeated one is ignored.
  bool probe(uint32_t pass) {
    if (pass == 0 || pass > asked_ + 1) return false;
    if (pass > asked_) asked_ = pass;
    return true;
  }
  bool waiting() const { return asked_ != answered_; }
  // The pass that the next answer is for: the one asked about, else the one under way.
  uint32_t answer() {
    if (!waiting()) return asked_ + 1;
    answered_ = asked_;
    return asked_;
  }
  uint32_t stop() {
    stopped_ = true;
    return answer();
  }
  bool stopped() const { return stopped_; }

 private:
  uint32_t asked_ = 0;
  uint32_t answered_ = 0;
  bool stopped_ = false;
};

}  // namespace gradwire
