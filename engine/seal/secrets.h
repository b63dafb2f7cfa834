// Secrets and how others follow from them: X25519 (RFC 7748), HKDF (RFC 5869) with SHA-256, and
// labels as TLS 1.3 has them (RFC 8446, section 7.1). libcrypto computes all of it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "seal/libcrypto.h"

namespace gradwire::seal {

using Secret = std::array<uint8_t, 32>;

// HKDF-Extract. Neither may be empty.
Secret extract(Bytes salt, Bytes key);
// HKDF-Expand-Label with this project's own prefix.
std::vector<uint8_t> expand_label(const Secret& secret, std::string_view label, Bytes context,
                                  size_t bytes);
Secret next_secret(const Secret& secret);  // of the next epoch: "traffic upd", RFC 8446, 7.2

Secret x25519_public(const Secret& own);
// Throws std::invalid_argument for a public key that yields nothing secret.
Secret x25519(const Secret& own, const Secret& peer);

}  // namespace gradwire::seal
