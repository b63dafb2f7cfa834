#include <nanobind/stl/variant.h>

#include <cstring>
#include <variant>

#include "seal/replay_window.h"
#include "seal/seal.h"
#include "tests/parts/parts.h"

namespace gradwire::parts {

namespace {

seal::Secret secret_of(const nb::bytes& bytes) {
  seal::Secret secret;
  if (bytes.size() != secret.size()) throw nb::value_error("secret");
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return secret;
}

}  // namespace

void bind_seal(nb::module_& module) {
  module.attr("EPOCH_BITS") = seal::kEpochBits;

  nb::class_<seal::ReplayWindow> window(module, "ReplayWindow");
  window.def(nb::init<>())
      .def("fresh", &seal::ReplayWindow::fresh, "number"_a)
      .def("record", &seal::ReplayWindow::record, "number"_a);
  window.attr("NUMBERS") = seal::ReplayWindow::kNumbers;

  nb::enum_<seal::Mode>(module, "Mode")
      .value("headers", seal::Mode::headers)
      .value("whole", seal::Mode::whole)
      .value("secret", seal::Mode::secret);
  nb::enum_<seal::Cipher>(module, "Cipher")
      .value("aes_128_gcm", seal::Cipher::aes_128_gcm)
      .value("chacha20_poly1305", seal::Cipher::chacha20_poly1305);

  nb::class_<seal::Sealer>(module, "Sealer")
      .def(
          "__init__",
          [](seal::Sealer* self, seal::Mode mode, seal::Cipher cipher, const nb::bytes& secret) {
            new (self) seal::Sealer(mode, cipher, secret_of(secret));
          },
          "mode"_a, "cipher"_a, "secret"_a)
      .def(
          "seal",
          [](seal::Sealer& self, const nb::bytes& head, const nb::bytes& body) {
            const auto from = span_of(head);
            const auto rest = span_of(body);
            std::vector<uint8_t> first(from.begin(), from.end());
            std::vector<uint8_t> out(first.size() + rest.size() + wire::kTagBytes);
            uint8_t* const at = out.data() + wire::kTagBytes;
            self.seal(first, rest, at, out.data());
            if (!self.encrypts()) std::ranges::copy(rest, std::ranges::copy(first, at).out);
            return bytes_of(out);
          },
          "head"_a, "body"_a)
      .def(
          "skip",
          [](seal::Sealer& self, uint64_t count) {
            std::vector<uint8_t> head(wire::kCommonBytes);
            std::vector<uint8_t> out(wire::kCommonBytes + wire::kTagBytes);
            for (uint64_t i = 0; i < count; ++i)
              self.seal(head, {}, out.data() + wire::kTagBytes, out.data());
          },
          "count"_a);

  using Verdict = seal::Opener::Verdict;
  nb::enum_<Verdict>(module, "Verdict")
      .value("good", Verdict::good)
      .value("forged", Verdict::forged)
      .value("replayed", Verdict::replayed);
  nb::class_<seal::Opener>(module, "Opener")
      .def(
          "__init__",
          [](seal::Opener* self, seal::Mode mode, seal::Cipher cipher, const nb::bytes& secret) {
            new (self) seal::Opener(mode, cipher, secret_of(secret));
          },
          "mode"_a, "cipher"_a, "secret"_a)
      .def(
          "open",
          [](seal::Opener& self, const nb::bytes& datagram,
             uint32_t session) -> std::variant<nb::bytes, Verdict> {
            const auto from = span_of(datagram);
            std::vector<uint8_t> bytes(from.begin(), from.end());
            const Verdict verdict = self.open(bytes, session);
            if (verdict != Verdict::good) return verdict;
            return bytes_of(std::span(bytes).subspan(wire::kTagBytes));
          },
          "datagram"_a, "session"_a = 0);
}

}  // namespace gradwire::parts
