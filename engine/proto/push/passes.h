// Control "probe": chunks go in passes. The sender sends all of a pass, without recovering what is
// lost of it, and then a PROBE; the receiver answers with the BITMAP of what is still missing,
// which is the next pass, or with STOP, which it may also send unasked in mid-pass. One pair of
// these per shard, worker and direction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/message.h"
#include "proto/plan/grid.h"

namespace gradwire {

class PassSender {
 public:
  explicit PassSender(const Grid::Shard& shard)
      : begin_(shard.begin), state_(shard.size(), State::absent) {}

  // The first pass: chunks in the order in which they are to go, until seal().
  void add(uint32_t chunk);
  void seal() { sealed_ = true; }

  uint32_t pass() const { return pass_; }
  // Chunks of this pass still to be sent.
  uint32_t backlog() const { return stopped_ ? 0 : static_cast<uint32_t>(list_.size() - cursor_); }
  // Nothing will be sent any more.
  bool settled() const { return stopped_ || (sealed_ && open_ == 0); }
  // False when there is nothing to send now.
  bool next(uint32_t& chunk, bool& again);
  bool in_tail() const { return cursor_ + list_.size() / 100 >= list_.size(); }
  // True once for each pass: all of it has gone and its PROBE is due.
  bool take_probe();

  // One part of the answer to pass `pass`. False when no honest receiver says so; one that comes
  // late is not heeded.
  bool bitmap_part(uint32_t pass, uint32_t index, std::span<const uint8_t> part,
                   uint32_t part_bytes);
  // STOP is final, whichever pass it was said of. False when no honest receiver says so.
  bool stop(uint32_t pass);
  // The receiver is known to need this chunk no more.
  void decided(uint32_t chunk);
  void finish() { stopped_ = true; }

 private:
  enum class State : uint8_t { absent, open, settled };
  State& state(uint32_t chunk) { return state_[chunk - begin_]; }
  void skip_settled();
  bool begin_pass(const Bitmap& missing);

  uint32_t begin_;
  std::vector<State> state_;
  std::vector<uint32_t> list_;  // of this pass
  size_t cursor_ = 0;
  uint32_t open_ = 0;  // chunks of this pass that are not settled
  uint32_t pass_ = 1;
  bool sealed_ = false;
  bool probed_ = false;  // the PROBE of this pass has gone
  bool stopped_ = false;
  MessageReceiver bitmap_;
};

// What the receiver has been asked, and whether it has answered.
class PassReceiver {
 public:
  // A PROBE. False when no honest sender says so; one that comes again is not heeded.
  bool probe(uint32_t pass) {
    if (pass == 0 || pass > asked_ + 1) return false;
    if (pass > asked_) asked_ = pass;
    return true;
  }
  bool waiting() const { return asked_ != answered_; }
  // The pass that an answer is of: the one that was asked about, else the one that is under way.
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
