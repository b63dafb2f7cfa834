// How long a datagram may be to reach one other endpoint. All endpoints agree on a length at the
// start; a path may carry less later, and often nobody says so.
//
// Knowledge lowers the limit at once: the kernel's, of an interface or a route, or the peer's.
// Evidence does after a trial (RFC 8899 in spirit): when none of the longest datagrams has been
// acknowledged for a while, pings of that length and of shorter ones go in turn, and the limit is
// lowered only if shorter ones are answered and none of that length is. Loss alone takes both
// alike, so it never lowers the limit. Nothing raises it again.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/base/time.h"

namespace gradwire {

class PathLimit {
 public:
  explicit PathLimit(uint32_t agreed = 0) : agreed_(agreed), bytes_(agreed) {}

  uint32_t bytes() const { return bytes_; }
  bool reduced() const { return bytes_ < agreed_; }

  // Knowledge. True when that is less than was known.
  bool lower(uint32_t bytes);

  // What goes to the peer, and what it acknowledges: lengths of datagrams.
  void sent(uint32_t bytes, Nanos now);
  void acked(uint32_t bytes);

  // Begins a trial if one is due, and says so. `round`: of the path, in ns.
  bool suspect(Nanos now, Nanos round);
  // Begins one of the agreed length, whatever was sent.
  void try_out(Nanos now, Nanos interval);
  bool on_trial() const { return on_trial_; }

  // The length of the ping that is due now, and its stamp to know the answer by; 0: none is.
  uint32_t ping(Nanos now, uint64_t stamp);
  // The answer to a ping of a trial. True when it lowers the limit.
  bool answered(uint64_t stamp, Nanos now, Nanos round);

  Nanos next_timer(Nanos round) const;

  // The next shorter length that is tried, for one that is too long by an unknown amount.
  static uint32_t shorter(uint32_t bytes);

 private:
  void begin(uint32_t bytes, Nanos now, Nanos interval);
  void end();

  struct Ping {
    uint64_t stamp;
    uint32_t bytes;
    Nanos time;
  };
  uint32_t agreed_;
  uint32_t bytes_;
  uint32_t longest_ = 0;  // of what has been sent since one of that length was acknowledged
  uint32_t waiting_ = 0;  // how many of that length have not been
  Nanos since_ = 0;       // when the first of them went

  bool on_trial_ = false;
  Nanos began_ = 0;
  Nanos interval_ = 0;
  Nanos next_ = 0;
  uint32_t turn_ = 0;
  std::vector<Ping> pings_;  // not answered yet
  uint32_t answers_ = 0;     // to shorter ones
  uint32_t best_ = 0;        // the longest of those
};

}  // namespace gradwire
