#include "proto/path/path_limit.h"

#include <algorithm>
#include <array>
#include <utility>

#include "wire/packet.h"

namespace gradwire {

namespace {
// UDP payloads of usual MTUs: jumbo frames, Ethernet, PPPoE, tunnels, the minima of IPv6 and IPv4.
constexpr std::array<uint32_t, 20> kLengths{8972, 8192, 4052, 2048, 1472, 1464, 1452,
                                            1444, 1432, 1412, 1392, 1372, 1352, 1312,
                                            1252, 1232, 1200, 1024, 548,  256};
// Unacknowledged datagrams before a trial: so many are not lost by chance.
constexpr uint32_t kFewest = 8;
// The time before a trial: congestion is shorter.
constexpr Nanos kPatience = 500 * kMillisecond;
// The same in rounds: probes for a lost tail are shorter.
constexpr Nanos kRounds = 4;
// The interval of pings in a trial that is younger than kQuick, or whose peer has answered lately.
constexpr Nanos kInterval = 5 * kMillisecond;
// The time for which a trial, or an answer, keeps pings at that interval.
constexpr Nanos kQuick = 3 * kSecond;
// The interval after that.
constexpr Nanos kSlowInterval = 100 * kMillisecond;
// Answers to shorter pings before the limit falls: by chance this happens once in 2^16 trials.
constexpr uint32_t kEnough = 16;
// The shortest trial: a burst of loss is over within it.
constexpr Nanos kShortest = 1 * kSecond;
// The longest time from one round of longer lengths to the next (RFC 8899 §5.1.1).
constexpr Nanos kSlowestRise = 600 * kSecond;
// Pings remembered; older ones count as lost.
constexpr size_t kMostPings = 512;

// What a payload has beside the driver's tag.
uint32_t without(uint32_t tag, uint32_t length) {
  return std::max<uint32_t>(length - tag, wire::kMinDatagram);
}
}  // namespace

uint32_t PathLimit::shorter(uint32_t bytes, uint32_t tag) {
  for (const uint32_t each : kLengths)
    if (const uint32_t length = without(tag, each); length < bytes) return length;
  return 0;
}

bool PathLimit::lower(uint32_t bytes, Nanos now) {
  if (bytes >= bytes_) return false;
  bytes_ = bytes;
  end();
  tried_ = 0;
  next_longer_ = now + longer_after_;
  return true;
}

void PathLimit::claimed(uint32_t bytes, Nanos now) {
  if (bytes == claim_) return;
  claim_ = bytes;
  if (bytes && bytes < bytes_) try_out(now, kInterval);
}

// All lengths above those that are acknowledged count, since what the path does not carry may go
// again and again in several; shorter ones only after a while, when they hardly go for the first
// time.
void PathLimit::sent(uint32_t bytes, Nanos now, uint32_t count) {
  bytes = std::min(bytes, bytes_);  // what is longer goes in fragments
  if (waiting_ == 0 && !on_trial_) {
    longest_ = of_longest_ = carried_ = 0;
    since_ = now;
  }
  const bool goes_again = now - since_ > kPatience;
  if (bytes <= carried_ || (bytes < longest_ && !goes_again)) return;
  waiting_ += count;
  if (bytes > longest_) {
    longest_ = bytes;
    of_longest_ = 0;
  }
  if (bytes == longest_) of_longest_ += count;
}

void PathLimit::acked(uint32_t bytes) {
  bytes = std::min(bytes, bytes_);
  if (bytes >= longest_) return end();
  if (bytes <= carried_) return;
  carried_ = bytes;
  waiting_ = of_longest_;  // how many of the others were as short is not known
}

bool PathLimit::suspect(Nanos now, Nanos round) {
  if (on_trial_ || next_timer(round) > now) return false;
  begin(longest_, now, kInterval);
  return true;
}

void PathLimit::try_out(Nanos now, Nanos interval) {
  if (!on_trial_) begin(bytes_, now, interval);
}

void PathLimit::begin(uint32_t bytes, Nanos now, Nanos interval) {
  on_trial_ = true;
  longest_ = bytes;
  since_ = next_ = now;
  interval_ = interval;
  quick_until_ = now + kQuick;
  turn_ = answers_ = best_ = 0;
  pings_.clear();
}

void PathLimit::end() {
  waiting_ = of_longest_ = 0;
  if (std::exchange(on_trial_, false)) pings_.clear();
}

// The length of a trial's next shorter ping: the shortest ones in turn until one is answered, then
// by turns the best so far and one of those between it and the length on trial.
uint32_t PathLimit::next_shorter() {
  const uint32_t number = turn_ / 2;
  if (best_ != 0 && number % 2 == 1) return best_;
  std::array<uint32_t, kLengths.size()> between{};
  uint32_t count = 0;
  for (uint32_t each = shorter(longest_, tag_); each > best_; each = shorter(each, tag_))
    between[count++] = each;
  if (count == 0) return best_ != 0 ? best_ : longest_;
  return between[count - 1 - (best_ == 0 ? number : number / 2) % count];
}

// The length of the next ping of a round of longer ones, which goes down from the agreed length.
uint32_t PathLimit::next_longer(Nanos now) {
  const uint32_t length = tried_ == 0 ? agreed_ : shorter(tried_, tag_);
  if (length > bytes_) {
    tried_ = length;
    next_longer_ = now + kInterval;
    return length;
  }
  tried_ = 0;
  next_longer_ = now + longer_after_;
  longer_after_ = std::min(2 * longer_after_, kSlowestRise);
  return 0;
}

uint32_t PathLimit::ping(Nanos now, uint64_t stamp) {
  if (now < next_ping()) return 0;
  if (!on_trial_) {
    if (tried_ == 0) pings_.clear();
    const uint32_t bytes = next_longer(now);
    if (bytes) pings_.push_back({stamp, bytes, now});
    return bytes;
  }
  next_ = now + (now < quick_until_ ? interval_ : std::max(interval_, kSlowInterval));
  const uint32_t bytes = turn_ % 2 == 1 ? next_shorter() : longest_;
  ++turn_;
  if (pings_.size() == kMostPings) pings_.erase(pings_.begin());
  pings_.push_back({stamp, bytes, now});
  return bytes;
}

bool PathLimit::answered(uint64_t stamp, Nanos now, Nanos round) {
  const auto at = std::ranges::find(pings_, stamp, &Ping::stamp);
  if (at == pings_.end()) return false;
  const uint32_t bytes = at->bytes;
  pings_.erase(at);
  if (bytes > bytes_) {
    bytes_ = bytes;
    end();
    if (!reduced()) next_longer_ = kNever;
    return true;
  }
  if (!on_trial_) return false;
  if (bytes >= longest_) {
    end();
    return false;
  }
  if (answers_ == 0) next_ = now;
  ++answers_;
  best_ = std::max(best_, bytes);
  interval_ = kInterval;
  quick_until_ = now + kQuick;
  // As many of the longest pings must have had time for an answer.
  const auto unanswered = std::count_if(pings_.begin(), pings_.end(), [&](const Ping& ping) {
    return ping.bytes == longest_ && now - ping.time > 2 * round;
  });
  if (answers_ < kEnough || unanswered < kEnough || now - since_ < kShortest) return false;
  return lower(best_, now);
}

Nanos PathLimit::next_timer(Nanos round) const {
  if (on_trial_) return next_;
  if (waiting_ < kFewest) return kNever;
  return since_ + std::max(kPatience, kRounds * round);
}

}  // namespace gradwire
