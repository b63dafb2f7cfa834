// Mac is one key by which short messages are authenticated: SipHash-2-4 with tags of 128 bits, a
// fourth of the work of a cipher for a header, computed by libcrypto.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "seal/secrets.h"
#include "wire/packet.h"

namespace gradwire::seal {

class Mac {
 public:
  using Tag = std::array<uint8_t, wire::kTagBytes>;

  // The key follows from the secret.
  explicit Mac(const Secret& secret);
  // The tag of these parts, one after the other.
  Tag tag(std::initializer_list<Bytes> parts);
  // True when the tag is of these parts; the time does not tell where it differs.
  bool right(std::initializer_list<Bytes> parts, const uint8_t* tag);

 private:
  std::unique_ptr<evp_mac_ctx_st, void (*)(evp_mac_ctx_st*)> context_;
  std::array<uint8_t, 16> key_;
};

}  // namespace gradwire::seal
