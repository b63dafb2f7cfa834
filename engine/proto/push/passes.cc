#include "proto/push/passes.h"

#include <cstring>
#include <utility>

namespace gradwire {

void PassSender::add(std::span<const uint32_t> chunks) {
  for (const uint32_t chunk : chunks) state(chunk) = State::open;
  list_.insert(list_.end(), chunks.begin(), chunks.end());
  open_ += static_cast<uint32_t>(chunks.size());
}

// Appends the results that became final to the first pass.
void PassSender::join() {
  if (!finished_) return;
  add(std::span(*finished_).subspan(joined_));
  joined_ = finished_->size();
}

uint32_t PassSender::backlog(bool fresh) const {
  if (!fresh || stopped_) return 0;
  const size_t joining = finished_ ? finished_->size() - joined_ : 0;
  return static_cast<uint32_t>(list_.size() - cursor_ + joining);
}

void PassSender::seal() {
  join();
  sealed_ = true;
}

void PassSender::skip_settled() {
  while (cursor_ < list_.size() && state(list_[cursor_]) != State::open) ++cursor_;
}

ChunkSender::Slice PassSender::next(size_t, bool fresh) {
  if (!fresh || stopped_) return {};
  join();
  skip_settled();
  if (cursor_ == list_.size()) return {};
  const std::span<const uint32_t> chunk(&list_[cursor_++], 1);
  ++flying_;
  return {chunk, pass_ > 1, last_of(cursor_, list_.size(), kTailShare)};
}

bool PassSender::take_probe() {
  if (probed_ || !sealed_ || settled()) return false;
  skip_settled();
  if (cursor_ < list_.size() || (futile_ && flying_ > 0)) return false;
  probed_ = true;
  return true;
}

bool PassSender::bitmap_part(uint32_t pass, uint32_t index, std::span<const uint8_t> part,
                             uint32_t part_bytes) {
  if (pass < pass_ || stopped_) return pass != 0;
  if (pass > pass_ || !probed_) return false;
  uint32_t total = 0;
  if (part.size() < kPartPrefix) return false;
  std::memcpy(&total, part.data(), sizeof total);
  if (total != (state_.size() + 7) / 8) return false;
  const auto result = bitmap_.part(index, part, part_bytes);
  if (result != MessageReceiver::Result::complete)
    return result == MessageReceiver::Result::incomplete;
  Bitmap missing(state_.size());
  missing.assign_bytes(bitmap_.take().data());
  bitmap_ = MessageReceiver();
  return begin_pass(missing);
}

// Starts the next pass with the missing chunks, in the order of the first pass.
bool PassSender::begin_pass(const Bitmap& missing) {
  if (!missing.any()) return false;  // a receiver that misses nothing sends STOP
  for (size_t i = 0; i < state_.size(); ++i)
    if (missing.test(i) && state_[i] == State::absent) return false;
  std::vector<uint32_t> next;
  for (const uint32_t chunk : list_) {
    if (state(chunk) != State::open) continue;
    if (missing.test(chunk - begin_)) {
      next.push_back(chunk);
    } else {
      state(chunk) = State::settled;
    }
  }
  futile_ = next.size() == open_;
  list_ = std::move(next);
  cursor_ = 0;
  open_ = static_cast<uint32_t>(list_.size());
  ++pass_;
  probed_ = false;
  return true;
}

bool PassSender::stop(uint32_t pass) {
  // The BITMAP that ends the pass before may still be on its way.
  if (pass == 0 || pass > pass_ + 1) return false;
  stopped_ = true;
  return true;
}

void PassSender::forget(uint32_t chunk) {
  if (state(chunk) != State::open) return;
  state(chunk) = State::settled;
  --open_;
}

}  // namespace gradwire
