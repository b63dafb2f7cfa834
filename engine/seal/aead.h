// Aead is one key of an authenticated cipher (RFC 5116) for one direction, computed by libcrypto.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "seal/secrets.h"

namespace gradwire::seal {

enum class Cipher : uint8_t { aes_128_gcm, chacha20_poly1305 };

// True when this processor has instructions for AES-GCM; without them ChaCha20 is quicker.
bool has_aes();

class Aead {
 public:
  // Key and nonces follow from the secret. `seals`: this end encrypts, else it decrypts.
  Aead(Cipher cipher, const Secret& secret, bool seals);

  // Authenticates `clear` and what is encrypted from `in` to `out`, and writes the tag. No number
  // comes twice.
  void seal(uint64_t number, std::initializer_list<Bytes> clear, std::initializer_list<Bytes> in,
            uint8_t* out, uint8_t* tag);
  // Decrypts in place; false where the tag is not of these bytes, which are worthless then.
  bool open(uint64_t number, std::initializer_list<Bytes> clear, std::span<uint8_t> text,
            const uint8_t* tag);

 private:
  // The nonce is the number, XORed with bytes that follow from the secret (RFC 8446, section 5.3).
  bool set_nonce(uint64_t number);
  bool update(Bytes in, uint8_t* out);
  bool finish();

  std::unique_ptr<evp_cipher_ctx_st, void (*)(evp_cipher_ctx_st*)> context_;
  std::array<uint8_t, 12> iv_;
};

}  // namespace gradwire::seal
