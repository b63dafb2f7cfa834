#include "proto/push/stream_sender.h"

namespace gradwire {

bool StreamSender::peek_again(uint32_t& chunk) {
  for (ChunkFifo* fifo : {&again_, &forgivable_}) {
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

bool StreamSender::next(uint32_t& chunk, bool& again, bool fresh) {
  if (!StreamSender::peek(chunk, fresh)) return false;
  again = state(chunk) == State::queued;
  if (again) {
    (again_.empty() ? forgivable_ : again_).pop();
    --queued_;
  } else {
    ++cursor_;
  }
  state(chunk) = State::flight;
  return true;
}

void StreamSender::queue(uint32_t chunk, bool forgivable) {
  state(chunk) = State::queued;
  ++queued_;
  (forgivable ? forgivable_ : again_).push(chunk);
}

void StreamSender::settle(uint32_t chunk, State to) {
  if (over(chunk)) return;
  queued_ -= state(chunk) == State::queued;
  ++over_;
  state(chunk) = to;
}

}  // namespace gradwire
