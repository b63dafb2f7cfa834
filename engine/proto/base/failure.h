// Failure is the reason why an endpoint or one of its ops failed: a text for people, and a cause
// and a rank for programs.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace gradwire {

// The causes of gradwire.errors.Cause, in the same order. ERROR carries the number, so numbers
// never change.
enum class Cause : uint8_t {
  engine = 0,   // every failure that has no cause of its own
  bound = 1,    // a peer gave up more than its bound allows
  closed = 2,   // this endpoint was closed
  left = 3,     // a peer closed before the op was complete
  memory = 4,   // the op needs more memory than the limit
  mtu = 5,      // the path does not carry datagrams of the agreed size any more
  plan = 6,     // a peer has another plan for the op
  silence = 7,  // a peer sent nothing for the peer time-out
  timeout = 8,  // the op was not complete in time
  version = 9,  // a peer speaks another version of the protocol
};
inline constexpr std::array<const char*, 10> kCauses{
    "engine", "bound", "closed", "left", "memory", "mtu", "plan", "silence", "timeout", "version"};

inline const char* word_of(Cause cause) {
  const auto index = static_cast<size_t>(cause);
  return kCauses[index < kCauses.size() ? index : 0];
}

struct Failure {
  std::string text;   // empty: nothing has failed
  int32_t rank = -1;  // the endpoint at fault; -1: none
  Cause cause = Cause::engine;

  explicit operator bool() const { return !text.empty(); }
};

}  // namespace gradwire
