#include "seal/aead.h"

#include <algorithm>
#include <stdexcept>

#include "wire/packet.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace gradwire::seal {
namespace {

// Of <openssl/evp.h>.
constexpr int kGetTag = 0x10;
constexpr int kSetTag = 0x11;

}  // namespace

bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kAes = 1UL << 3, kPmull = 1UL << 4;  // of <asm/hwcap.h>
  return (::getauxval(AT_HWCAP) & (kAes | kPmull)) == (kAes | kPmull);
#else
  return false;
#endif
}

Aead::Aead(Cipher cipher, const Secret& secret, bool seals)
    : context_(libcrypto().EVP_CIPHER_CTX_new(), libcrypto().EVP_CIPHER_CTX_free) {
  const Libcrypto& lib = libcrypto();
  const bool aes = cipher == Cipher::aes_128_gcm;
  const auto key = expand_label(secret, "key", {}, aes ? 16 : 32);
  std::ranges::copy(expand_label(secret, "iv", {}, iv_.size()), iv_.begin());
  if (!context_ || lib.EVP_CipherInit_ex(context_.get(),
                                         aes ? lib.EVP_aes_128_gcm() : lib.EVP_chacha20_poly1305(),
                                         nullptr, key.data(), iv_.data(), seals) <= 0) {
    throw std::runtime_error(std::string("libcrypto refuses ") +
                             (aes ? "AES-128-GCM" : "ChaCha20-Poly1305"));
  }
}

bool Aead::set_nonce(uint64_t number) {
  auto nonce = iv_;
  for (size_t i = 0; i < sizeof(number); ++i)
    nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(number >> 8 * i);
  return libcrypto().EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(),
                                       -1) > 0;
}

// Without `out` the bytes are authenticated only.
bool Aead::update(Bytes in, uint8_t* out) {
  int written = 0;
  return in.empty() || libcrypto().EVP_CipherUpdate(context_.get(), out, &written, in.data(),
                                                    static_cast<int>(in.size())) > 0;
}

bool Aead::finish() {
  std::array<uint8_t, 16> none;
  int written = 0;
  return libcrypto().EVP_CipherFinal_ex(context_.get(), none.data(), &written) > 0;
}

void Aead::seal(uint64_t number, std::initializer_list<Bytes> clear,
                std::initializer_list<Bytes> in, uint8_t* out, uint8_t* tag) {
  bool good = set_nonce(number);
  for (const Bytes part : clear) good = good && update(part, nullptr);
  for (const Bytes part : in) {
    good = good && update(part, out);
    out += part.size();
  }
  good = good && finish() &&
         libcrypto().EVP_CIPHER_CTX_ctrl(context_.get(), kGetTag, wire::kTagBytes, tag) > 0;
  if (!good) throw std::runtime_error("libcrypto refuses to seal a datagram");
}

bool Aead::open(uint64_t number, std::initializer_list<Bytes> clear, std::span<uint8_t> text,
                const uint8_t* tag) {
  bool good =
      set_nonce(number) && libcrypto().EVP_CIPHER_CTX_ctrl(context_.get(), kSetTag, wire::kTagBytes,
                                                           const_cast<uint8_t*>(tag)) > 0;
  for (const Bytes part : clear) good = good && update(part, nullptr);
  return good && update(text, text.data()) && finish();
}

}  // namespace gradwire::seal
