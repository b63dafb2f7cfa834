#include "proto/push/stream_sender.h"

#include <algorithm>

namespace gradwire {

bool StreamSender::peek_again(uint32_t& chunk) {
  for (ChunkFifo* fifo : {&holes_.again, &holes_.forgivable}) {
    for (; !fifo->empty(); fifo->pop()) {
      chunk = fifo->front();
      if (state(chunk) == State::queued) return true;
    }
  }
  return false;
}

bool StreamSender::peek_fresh(uint32_t& chunk) {
  while (cursor_ < list_.size() && state(list_[cursor_]) != State::idle) ++cursor_;
  if (cursor_ == list_.size()) return false;
  chunk = list_[cursor_];
  return true;
}

bool StreamSender::peek(uint32_t& chunk, bool fresh) {
  if (holes_first_ && peek_again(chunk)) return true;
  return (fresh && peek_fresh(chunk)) || (!holes_first_ && peek_again(chunk));
}

ChunkSender::Slice StreamSender::next(size_t most, bool fresh) {
  uint32_t first = 0;
  if (!StreamSender::peek(first, fresh)) return {};
  if (state(first) == State::queued) {
    (holes_.again.empty() ? holes_.forgivable : holes_.again).pop();
    --holes_.queued;
    state(first) = State::flight;
    holes_.next = first;
    return {{&holes_.next, 1}, true, in_last(kTailShare)};
  }
  const size_t begin = cursor_;
  const bool tail = last_of(begin + 1, whole_, kTailShare);
  const auto like_first = [&](uint32_t chunk) {
    return state(chunk) == State::idle && grid_.length(chunk) == grid_.length(first) &&
           last_of(cursor_ + 1, whole_, kTailShare) == tail;
  };
  // A shorter chunk ends a train.
  const bool shorter = grid_.length(first) < grid_.chunk_elements;
  const size_t end = std::min(list_.size(), begin + (shorter ? 1 : most));
  do state(list_[cursor_++]) = State::flight;
  while (cursor_ < end && like_first(list_[cursor_]));
  return {{&list_[begin], cursor_ - begin}, false, tail};
}

void StreamSender::queue(uint32_t chunk, bool forgivable) {
  state(chunk) = State::queued;
  ++holes_.queued;
  (forgivable ? holes_.forgivable : holes_.again).push(chunk);
}

}  // namespace gradwire
