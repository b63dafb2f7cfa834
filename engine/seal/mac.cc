#include "seal/mac.h"

#include <algorithm>
#include <stdexcept>

namespace gradwire::seal {

Mac::Mac(const Secret& secret) : context_(nullptr, libcrypto().EVP_MAC_CTX_free) {
  const Libcrypto& lib = libcrypto();
  std::ranges::copy(expand_label(secret, "mac", {}, key_.size()), key_.begin());
  const std::unique_ptr<evp_mac_st, void (*)(evp_mac_st*)> siphash(
      lib.EVP_MAC_fetch(nullptr, "SIPHASH", nullptr), lib.EVP_MAC_free);
  if (siphash) context_.reset(lib.EVP_MAC_CTX_new(siphash.get()));
  if (!context_) throw std::runtime_error("libcrypto refuses SipHash");
}

Mac::Tag Mac::tag(std::initializer_list<Bytes> parts) {
  const Libcrypto& lib = libcrypto();
  Tag out;
  size_t bytes = 0;
  bool good = lib.EVP_MAC_init(context_.get(), key_.data(), key_.size(), nullptr) > 0;
  for (const Bytes part : parts)
    good = good && lib.EVP_MAC_update(context_.get(), part.data(), part.size()) > 0;
  good = good && lib.EVP_MAC_final(context_.get(), out.data(), &bytes, out.size()) > 0;
  if (!good || bytes != out.size()) throw std::runtime_error("libcrypto refuses SipHash");
  return out;
}

bool Mac::right(std::initializer_list<Bytes> parts, const uint8_t* tag) {
  return libcrypto().CRYPTO_memcmp(this->tag(parts).data(), tag, wire::kTagBytes) == 0;
}

}  // namespace gradwire::seal
