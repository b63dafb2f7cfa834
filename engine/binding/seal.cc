// The keys of authenticated datagrams in Python: what the schedule of a meeting is made of.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "binding/binding.h"
#include "seal/aead.h"
#include "seal/secrets.h"
#include "wire/packet.h"

namespace gradwire::binding {

using namespace nb::literals;

namespace {

seal::Bytes view(const nb::bytes& bytes) {
  return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

nb::bytes to_bytes(seal::Bytes bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

seal::Secret to_secret(const nb::bytes& bytes) {
  seal::Secret secret;
  if (bytes.size() != secret.size()) {
    throw nb::value_error(("a secret has " + std::to_string(secret.size()) + " bytes, not " +
                           std::to_string(bytes.size()))
                              .c_str());
  }
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return secret;
}

void bind_seal(nb::module_& module) {
  module.attr("TAG_BYTES") = static_cast<int>(wire::kTagBytes);
  module.def("load_libcrypto", &seal::load_libcrypto, "names"_a = std::vector<std::string>{});
  module.def("has_aes", &seal::has_aes);
  module.def(
      "hkdf_extract",
      [](const nb::bytes& salt, const nb::bytes& key) {
        if (salt.size() == 0 || key.size() == 0) throw nb::value_error("salt or key is empty");
        return to_bytes(seal::extract(view(salt), view(key)));
      },
      "salt"_a, "key"_a);
  module.def(
      "hkdf_expand_label",
      [](const nb::bytes& secret, const std::string& label, const nb::bytes& context,
         size_t bytes) {
        return to_bytes(seal::expand_label(to_secret(secret), label, view(context), bytes));
      },
      "secret"_a, "label"_a, "context"_a, "size"_a = 32);
  module.def(
      "x25519_public",
      [](const nb::bytes& own) { return to_bytes(seal::x25519_public(to_secret(own))); }, "own"_a);
  module.def(
      "x25519",
      [](const nb::bytes& own, const nb::bytes& peer) {
        return to_bytes(seal::x25519(to_secret(own), to_secret(peer)));
      },
      "own"_a, "peer"_a);
}

}  // namespace gradwire::binding
