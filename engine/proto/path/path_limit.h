// PathLimit decides how long a datagram to one peer may be. All endpoints agree on a length at the
// start; a path may carry less later, often without any error.
//
// The limit falls at once when the kernel reports a shorter length. Otherwise a trial decides (RFC
// 8899). It begins when of several datagrams longer than any acknowledged one none has been for a
// while, or when the peer claims a shorter length: pings of the present length and of shorter ones
// go in turn. The shortest come first, since their answer proves that the peer is there; then the
// best so far and longer ones take turns. The limit falls only if shorter ones are answered and
// none of that length is; loss hits both alike, so loss never lowers it.
//
// A limit that has fallen is tried larger again, ever more rarely: one ping of each longer length
// goes, and the longest that is answered is the new limit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/base/time.h"

namespace gradwire {

class PathLimit {
 public:
  // `tag`: the bytes by which the driver makes each datagram longer.
  explicit PathLimit(uint32_t agreed = 0, uint32_t tag = 0)
      : agreed_(agreed), tag_(tag), bytes_(agreed) {}

  uint32_t bytes() const { return bytes_; }
  bool reduced() const { return bytes_ < agreed_; }

  // Lowers the limit to a length that the kernel reports; true when that changes it.
  bool lower(uint32_t bytes, Nanos now);
  // The peer claims that it can send no more than this; 0: it claims nothing. A new claim begins a
  // trial of this way, which an acknowledged datagram of the present length ends.
  void claimed(uint32_t bytes, Nanos now);
  // A datagram has arrived. A longer one than the peer claims to send refutes it.
  void arrived(size_t bytes) {
    if (bytes > claim_) claim_ = 0;
  }
  // The longest datagram that the path carries both ways, as far as known.
  uint32_t both_ways() const { return claim_ ? std::min(bytes_, claim_) : bytes_; }

  // Records the lengths of sent and of acknowledged datagrams.
  void sent(uint32_t bytes, Nanos now, uint32_t count = 1);
  void acked(uint32_t bytes);

  // Begins a trial if one is due; true when it did. `round`: the path's round-trip time.
  bool suspect(Nanos now, Nanos round);
  // Begins a trial of the present limit, whatever was sent.
  void try_out(Nanos now, Nanos interval);
  bool on_trial() const { return on_trial_; }

  // The length of the ping that is due now, else 0. `stamp` identifies its answer.
  uint32_t ping(Nanos now, uint64_t stamp);
  // Takes the answer to such a ping; true when it changes the limit.
  bool answered(uint64_t stamp, Nanos now, Nanos round);

  // The time of the next ping, and of a trial that may be due.
  Nanos next_ping() const { return on_trial_ ? next_ : next_longer_; }
  Nanos next_timer(Nanos round) const;

  // The next shorter length to try, for a length that is too long by an unknown amount.
  static uint32_t shorter(uint32_t bytes, uint32_t tag = 0);

 private:
  void begin(uint32_t bytes, Nanos now, Nanos interval);
  void end();
  uint32_t next_shorter();
  uint32_t next_longer(Nanos now);

  struct Ping {
    uint64_t stamp;
    uint32_t bytes;
    Nanos time;
  };
  // The time until the first round of longer lengths; it doubles with each.
  static constexpr Nanos kFirstRise = 10 * kSecond;
  uint32_t agreed_;
  uint32_t tag_;
  uint32_t bytes_;
  uint32_t longest_ = 0;     // longest datagram sent since one as long was acknowledged
  uint32_t carried_ = 0;     // the longest that was acknowledged since
  uint32_t waiting_ = 0;     // unacknowledged datagrams above that length
  uint32_t of_longest_ = 0;  // those of the longest
  Nanos since_ = 0;          // when the first of them was sent, or the trial began

  bool on_trial_ = false;
  Nanos interval_ = 0;
  Nanos quick_until_ = 0;  // pings go at intervals until then, and more rarely after it
  Nanos next_ = 0;
  uint32_t turn_ = 0;
  std::vector<Ping> pings_;  // without an answer so far; of longer lengths where there is no trial
  uint32_t answers_ = 0;     // answers to shorter pings
  uint32_t best_ = 0;        // the longest of these

  uint32_t claim_ = 0;               // the peer's latest; 0: none, or it was refuted
  Nanos next_longer_ = kNever;       // when the next longer length is tried
  Nanos longer_after_ = kFirstRise;  // the time from one round of longer lengths to the next
  uint32_t tried_ = 0;               // the latest length of this round; 0: it has not begun
};

}  // namespace gradwire
