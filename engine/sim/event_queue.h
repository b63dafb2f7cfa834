// EventQueue gives the fabric's events in the order of their times, and of their making where times
// are equal.
//
// Most events are packets on their way through a link, which leave it in the order in which they
// came. So each link has a stream of its own, and only its first event stands in the heap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "proto/base/time.h"

namespace gradwire::sim {

class EventQueue {
 public:
  // The stream of an event that belongs to no link.
  static constexpr uint16_t kNoStream = 0xffff;

  struct Event {
    enum class Kind : uint8_t {
      at_switch,
      at_host,
      wake,
      timer,
      start,
      cross,
      flow,
      flow_acked,
      flow_lost
    };
    Nanos time;
    uint64_t sequence;
    uint32_t index;  // unit, host, op, cross traffic or flow
    Kind kind;
    uint16_t stream = kNoStream;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : sequence > other.sequence;
    }
  };

  explicit EventQueue(size_t streams = 0) : streams_(streams) {}

  bool empty() const { return heap_.empty(); }
  const Event& top() const { return heap_.front(); }
  // Adds an event, which is later in sequence than all before it.
  void push(Event event) {
    if (event.stream != kNoStream) {
      Stream& stream = streams_[event.stream];
      // An event before the stream's last one has overtaken it, so it goes by itself.
      if (stream.in_heap && event.time < stream.last) {
        event.stream = kNoStream;
      } else {
        stream.last = event.time;
        if (stream.in_heap) return stream.later.push_back(event);
        stream.in_heap = true;
      }
    }
    heap_.push_back(event);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }
  Event pop() {
    const Event first = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    if (first.stream == kNoStream) return first;
    Stream& stream = streams_[first.stream];
    stream.in_heap = !stream.later.empty();
    if (!stream.in_heap) return first;
    heap_.push_back(stream.later.front());
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    stream.later.pop_front();
    return first;
  }

 private:
  struct Stream {
    std::deque<Event> later;  // the events behind the one in the heap
    Nanos last = 0;
    bool in_heap = false;
  };
  std::vector<Event> heap_;
  std::vector<Stream> streams_;
};

}  // namespace gradwire::sim
