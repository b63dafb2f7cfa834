// OpenSSL's libcrypto, found when it is first needed: at run time, since building needs no headers
// of it and Python has one loaded as a rule. What is declared here is the same from version 3 on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

struct engine_st;
struct evp_cipher_ctx_st;
struct evp_cipher_st;
struct evp_mac_ctx_st;
struct evp_mac_st;
struct evp_pkey_ctx_st;
struct evp_pkey_st;
struct ossl_lib_ctx_st;
struct ossl_param_st;

namespace gradwire::seal {

using Bytes = std::span<const uint8_t>;

struct Libcrypto {
  // <openssl/evp.h>
  const evp_cipher_st* (*EVP_aes_128_gcm)();
  const evp_cipher_st* (*EVP_chacha20_poly1305)();
  evp_cipher_ctx_st* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(evp_cipher_ctx_st*);
  int (*EVP_CIPHER_CTX_ctrl)(evp_cipher_ctx_st*, int type, int arg, void* ptr);
  int (*EVP_CipherInit_ex)(evp_cipher_ctx_st*, const evp_cipher_st*, engine_st*,
                           const unsigned char* key, const unsigned char* iv, int encrypt);
  int (*EVP_CipherUpdate)(evp_cipher_ctx_st*, unsigned char* out, int* written,
                          const unsigned char* in, int size);
  int (*EVP_CipherFinal_ex)(evp_cipher_ctx_st*, unsigned char* out, int* written);
  evp_mac_st* (*EVP_MAC_fetch)(ossl_lib_ctx_st*, const char* name, const char* properties);
  void (*EVP_MAC_free)(evp_mac_st*);
  evp_mac_ctx_st* (*EVP_MAC_CTX_new)(evp_mac_st*);
  void (*EVP_MAC_CTX_free)(evp_mac_ctx_st*);
  int (*EVP_MAC_init)(evp_mac_ctx_st*, const unsigned char* key, size_t, const ossl_param_st*);
  int (*EVP_MAC_update)(evp_mac_ctx_st*, const unsigned char*, size_t);
  int (*EVP_MAC_final)(evp_mac_ctx_st*, unsigned char* out, size_t* written, size_t room);
  evp_pkey_st* (*EVP_PKEY_new_raw_private_key)(int type, engine_st*, const unsigned char*, size_t);
  evp_pkey_st* (*EVP_PKEY_new_raw_public_key)(int type, engine_st*, const unsigned char*, size_t);
  int (*EVP_PKEY_get_raw_public_key)(const evp_pkey_st*, unsigned char*, size_t*);
  void (*EVP_PKEY_free)(evp_pkey_st*);
  evp_pkey_ctx_st* (*EVP_PKEY_CTX_new)(evp_pkey_st*, engine_st*);
  evp_pkey_ctx_st* (*EVP_PKEY_CTX_new_id)(int type, engine_st*);
  void (*EVP_PKEY_CTX_free)(evp_pkey_ctx_st*);
  int (*EVP_PKEY_CTX_ctrl_str)(evp_pkey_ctx_st*, const char* type, const char* value);
  int (*EVP_PKEY_derive_init)(evp_pkey_ctx_st*);
  int (*EVP_PKEY_derive_set_peer)(evp_pkey_ctx_st*, evp_pkey_st*);
  int (*EVP_PKEY_derive)(evp_pkey_ctx_st*, unsigned char*, size_t*);
  // <openssl/crypto.h>
  int (*CRYPTO_memcmp)(const void*, const void*, size_t);
  const char* (*OpenSSL_version)(int type);
};

// Tries these names and files, then the names that systems give it; returns its version. The first
// that is found serves the process from then on. Throws std::runtime_error where none is.
std::string load_libcrypto(const std::vector<std::string>& names = {});
// That one. Throws as load_libcrypto does.
const Libcrypto& libcrypto();

}  // namespace gradwire::seal
