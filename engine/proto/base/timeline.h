// Timeline is what an engine did and why it stopped, kept for the lab, which explains idle ports by
// it. It is off at first; no decision depends on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/time.h"

namespace gradwire {

class Timeline {
 public:
  static constexpr uint16_t kNobody = UINT16_MAX;

  enum class What : uint8_t {
    begun,   // an op begins here; value: its id
    ended,   // its result has been reported here
    sent,    // a train of an op to `peer`; value: bytes on the wire
    signal,  // an ACK, a ping or a farewell, likewise
    timer,   // a timer is served; value: when it was due
    read,    // datagrams of `peer` are taken; value: when they arrived
    turn,    // the thread goes on; value: the processor time that it has taken
    sleep,   // the thread waits for something to do; value as for turn
    full,    // what follows was not kept
    // Why nothing goes to `peer` from now on, until the thread does anything else.
    nothing,  // no op is open
    done,     // all that the ops have for it so far has gone
    sum,      // a sum here is not ready
    peer,     // it has not begun the op
    credit,   // it allows no more
    window,   // as much is in flight as the window allows
    pace,     // the next train has its time
    blocked,  // the socket takes no more; of all peers
  };
  static constexpr size_t kWhats = size_t{static_cast<uint8_t>(What::blocked)} + 1;
  struct Entry {
    Nanos time;
    int64_t value;
    uint16_t peer;
    What what;
  };

  // Keeps so many entries from now on; 0 switches it off.
  void keep(size_t most) {
    most_ = most;
    entries_.clear();
    stops_.clear();
  }
  bool on() const { return most_ > 0; }
  void note(Nanos time, What what, uint16_t peer = kNobody, int64_t value = 0) {
    if (what == What::sent || what == What::signal || what == What::timer || what == What::read)
      stops_.clear();
    if (entries_.size() + 1 < most_)
      entries_.push_back({time, value, peer, what});
    else if (entries_.size() < most_)
      entries_.push_back({time, 0, kNobody, What::full});
  }
  // The same for why nothing goes to a peer, where that is news.
  void stop(Nanos time, What why, uint16_t peer) {
    if (peer >= stops_.size()) stops_.resize(peer + size_t{1}, What::sent);
    if (std::exchange(stops_[peer], why) != why) note(time, why, peer);
  }
  // The entries since the last call.
  std::vector<Entry> take() { return std::exchange(entries_, {}); }

 private:
  size_t most_ = 0;
  std::vector<Entry> entries_;
  std::vector<What> stops_;  // by peer, since anything else happened
};

}  // namespace gradwire
