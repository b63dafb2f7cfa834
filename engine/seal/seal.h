// A sealed datagram is numbered, and begins with a tag by which its receiver knows that nobody else
// made or changed it:
//   tag | version | kind | source | u32 number, in place of the session | the rest
//
// Numbers have 64 bits and travel as their low 32. Sealer and Opener are the two ends of one
// direction between two endpoints. Each epoch of numbers has a key of its own, which follows from
// the one before, long before a cipher's limit. The number tells the epoch, so no message does.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "seal/aead.h"
#include "seal/mac.h"
#include "seal/replay_window.h"
#include "wire/packet.h"

namespace gradwire::seal {

enum class Mode : uint8_t {
  none,     // datagrams go as they are
  headers,  // all but the payloads of chunks is authenticated
  whole,    // all is authenticated
  secret,   // all is authenticated, and encrypted behind the common header
};

// Datagrams of one key: RFC 9001 (section 6.6) allows 2^23 of AES-128-GCM.
inline constexpr int kEpochBits = 22;

// Key is that of one epoch.
class Key {
 public:
  // `seals`: the key is of the end that seals.
  Key(Mode mode, Cipher cipher, const Secret& secret, bool seals);
  void seal(uint64_t number, Bytes head, Bytes body, uint8_t* out, uint8_t* tag);
  bool open(uint64_t number, std::span<uint8_t> datagram, const uint8_t* tag);

 private:
  Mode mode_;
  std::optional<Mac> mac_;  // headers
  std::optional<Aead> aead_;
};

class Sealer {
 public:
  Sealer(Mode mode, Cipher cipher, const Secret& secret);
  bool encrypts() const { return mode_ == Mode::secret; }
  // Seals a datagram of two parts: writes its number into `head`, and its tag. If it encrypts, the
  // datagram goes to `out` without the tag; else `out` is not used.
  void seal(std::span<uint8_t> head, Bytes body, uint8_t* out, uint8_t* tag);

 private:
  Mode mode_;
  Cipher cipher_;
  Secret secret_;  // of the epoch
  Key key_;
  uint64_t next_ = 0;  // number
};

class Opener {
 public:
  enum class Verdict : uint8_t { good, forged, replayed };
  Opener(Mode mode, Cipher cipher, const Secret& secret);
  // Opens a datagram in place. If it is good, what follows the tag is as before sealing, with
  // `session` in place of the number.
  Verdict open(std::span<uint8_t> datagram, uint32_t session);

 private:
  Key* of(uint64_t epoch);
  void enter(uint64_t epoch);

  Mode mode_;
  Cipher cipher_;
  uint64_t epoch_ = 0;  // the highest of which a datagram has come
  Secret next_secret_;  // of the epoch after the next
  // The epoch before, this one and the next, whose key is made before anything comes that wants it.
  std::array<std::optional<Key>, 3> keys_;
  ReplayWindow seen_;
};

}  // namespace gradwire::seal
