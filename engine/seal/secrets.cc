#include "seal/secrets.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

namespace gradwire::seal {
namespace {

// Of <openssl/obj_mac.h>.
constexpr int kX25519 = 1034;
constexpr int kHkdf = 1036;

using Key = std::unique_ptr<evp_pkey_st, void (*)(evp_pkey_st*)>;
using Context = std::unique_ptr<evp_pkey_ctx_st, void (*)(evp_pkey_ctx_st*)>;

void require(bool done, const char* what) {
  if (!done) throw std::runtime_error(std::string("libcrypto refuses ") + what);
}

std::string hex(Bytes bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

struct Option {
  const char* name;
  std::string value;
};

void hkdf(const char* mode, std::initializer_list<Option> options, std::span<uint8_t> out) {
  const Libcrypto& lib = libcrypto();
  const Context context(lib.EVP_PKEY_CTX_new_id(kHkdf, nullptr), lib.EVP_PKEY_CTX_free);
  bool good = context && lib.EVP_PKEY_derive_init(context.get()) > 0 &&
              lib.EVP_PKEY_CTX_ctrl_str(context.get(), "mode", mode) > 0 &&
              lib.EVP_PKEY_CTX_ctrl_str(context.get(), "md", "SHA256") > 0;
  for (const auto& [name, value] : options)
    good = good && lib.EVP_PKEY_CTX_ctrl_str(context.get(), name, value.c_str()) > 0;
  size_t bytes = out.size();
  good = good && lib.EVP_PKEY_derive(context.get(), out.data(), &bytes) > 0;
  require(good && bytes == out.size(), "HKDF");
}

Key private_key(const Secret& own) {
  const Libcrypto& lib = libcrypto();
  Key key(lib.EVP_PKEY_new_raw_private_key(kX25519, nullptr, own.data(), own.size()),
          lib.EVP_PKEY_free);
  require(key != nullptr, "X25519");
  return key;
}

}  // namespace

Secret extract(Bytes salt, Bytes key) {
  Secret out;
  hkdf("EXTRACT_ONLY", {{"hexsalt", hex(salt)}, {"hexkey", hex(key)}}, out);
  return out;
}

std::vector<uint8_t> expand_label(const Secret& secret, std::string_view label, Bytes context,
                                  size_t bytes) {
  const std::string name = "gradwire " + std::string(label);
  if (name.size() > 255 || context.size() > 255) throw std::invalid_argument("label is too long");
  const auto size = [](size_t value) { return static_cast<uint8_t>(value); };
  const std::array<uint8_t, 3> lengths = {size(bytes >> 8), size(bytes), size(name.size())};
  const std::array<uint8_t, 1> rest = {size(context.size())};
  const Bytes text(reinterpret_cast<const uint8_t*>(name.data()), name.size());
  const std::string info = hex(lengths) + hex(text) + hex(rest) + hex(context);
  std::vector<uint8_t> out(bytes);
  hkdf("EXPAND_ONLY", {{"hexkey", hex(secret)}, {"hexinfo", info}}, out);
  return out;
}

Secret next_secret(const Secret& secret) {
  Secret next;
  std::ranges::copy(expand_label(secret, "traffic upd", {}, next.size()), next.begin());
  return next;
}

Secret x25519_public(const Secret& own) {
  const Key key = private_key(own);
  Secret out;
  size_t bytes = out.size();
  const bool good = libcrypto().EVP_PKEY_get_raw_public_key(key.get(), out.data(), &bytes) > 0;
  require(good && bytes == out.size(), "X25519");
  return out;
}

Secret x25519(const Secret& own, const Secret& peer) {
  const Libcrypto& lib = libcrypto();
  const Key key = private_key(own);
  const Key other(lib.EVP_PKEY_new_raw_public_key(kX25519, nullptr, peer.data(), peer.size()),
                  lib.EVP_PKEY_free);
  const Context context(lib.EVP_PKEY_CTX_new(key.get(), nullptr), lib.EVP_PKEY_CTX_free);
  Secret out;
  size_t bytes = out.size();
  if (!other || !context || lib.EVP_PKEY_derive_init(context.get()) <= 0 ||
      lib.EVP_PKEY_derive_set_peer(context.get(), other.get()) <= 0 ||
      lib.EVP_PKEY_derive(context.get(), out.data(), &bytes) <= 0 || bytes != out.size())
    throw std::invalid_argument("a public key of X25519 yields nothing secret");
  return out;
}

}  // namespace gradwire::seal
