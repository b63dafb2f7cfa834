#include "seal/libcrypto.h"

#include <dlfcn.h>

#include <optional>
#include <stdexcept>

namespace gradwire::seal {
namespace {

constexpr const char* kNames[] = {"libcrypto.so.3", "libcrypto.so.4"};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

std::optional<Libcrypto> load(const char* name) {
  void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  Libcrypto found{};
#define GRADWIRE_FIND(function) find(library, #function, found.function)
  const bool all = GRADWIRE_FIND(EVP_aes_128_gcm) && GRADWIRE_FIND(EVP_chacha20_poly1305) &&
                   GRADWIRE_FIND(EVP_CIPHER_CTX_new) && GRADWIRE_FIND(EVP_CIPHER_CTX_free) &&
                   GRADWIRE_FIND(EVP_CIPHER_CTX_ctrl) && GRADWIRE_FIND(EVP_CipherInit_ex) &&
                   GRADWIRE_FIND(EVP_CipherUpdate) && GRADWIRE_FIND(EVP_CipherFinal_ex) &&
                   GRADWIRE_FIND(EVP_PKEY_new_raw_private_key) &&
                   GRADWIRE_FIND(EVP_PKEY_new_raw_public_key) &&
                   GRADWIRE_FIND(EVP_PKEY_get_raw_public_key) && GRADWIRE_FIND(EVP_PKEY_free) &&
                   GRADWIRE_FIND(EVP_PKEY_CTX_new) && GRADWIRE_FIND(EVP_PKEY_CTX_new_id) &&
                   GRADWIRE_FIND(EVP_PKEY_CTX_free) && GRADWIRE_FIND(EVP_PKEY_CTX_ctrl_str) &&
                   GRADWIRE_FIND(EVP_PKEY_derive_init) && GRADWIRE_FIND(EVP_PKEY_derive_set_peer) &&
                   GRADWIRE_FIND(EVP_PKEY_derive) && GRADWIRE_FIND(EVP_MAC_fetch) &&
                   GRADWIRE_FIND(EVP_MAC_free) && GRADWIRE_FIND(EVP_MAC_CTX_new) &&
                   GRADWIRE_FIND(EVP_MAC_CTX_free) && GRADWIRE_FIND(EVP_MAC_init) &&
                   GRADWIRE_FIND(EVP_MAC_update) && GRADWIRE_FIND(EVP_MAC_final) &&
                   GRADWIRE_FIND(CRYPTO_memcmp) && GRADWIRE_FIND(OpenSSL_version);
#undef GRADWIRE_FIND
  if (all) return found;
  ::dlclose(library);
  return std::nullopt;
}

Libcrypto search(const std::vector<std::string>& names) {
  std::optional<Libcrypto> found;
  for (const std::string& name : names)
    if (!found) found = load(name.c_str());
  for (const char* const name : kNames)
    if (!found) found = load(name);
  if (found) return *found;
  throw std::runtime_error(
      "OpenSSL's libcrypto (3 or later) is not found on this host: install it (package libssl3 of "
      "Debian and Ubuntu, openssl-libs of Fedora and RHEL, openssl3-libs of RHEL 8)");
}

// The first search that finds one serves the process.
const Libcrypto& loaded(const std::vector<std::string>& names) {
  static const Libcrypto found = search(names);
  return found;
}

}  // namespace

std::string load_libcrypto(const std::vector<std::string>& names) {
  return loaded(names).OpenSSL_version(0);
}

const Libcrypto& libcrypto() {
  return loaded({});
}

}  // namespace gradwire::seal
