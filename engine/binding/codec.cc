// Encodings and the Hadamard transform in Python, for chunks without a plan.
#include "codec/codec.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/binding.h"
#include "codec/hadamard.h"
#include "wire/packet.h"

namespace gradwire::binding {

using namespace nb::literals;

codec::Format parse_format(const std::string& encoding, double kept) {
  codec::Format format;
  format.encoding = parse<codec::Encoding>(
      "encoding", encoding,
      std::array<std::string_view, 6>{"f32", "f16", "bf16", "int8", "topk", "half"});
  format.kept = kept;
  if (const std::string wrong = format.validate(); !wrong.empty()) {
    throw nb::value_error(wrong.c_str());
  }
  return format;
}

void check_datagram(uint32_t datagram_bytes) {
  if (datagram_bytes < wire::kMinDatagram || datagram_bytes > wire::kMaxDatagram) {
    throw nb::value_error("datagram_bytes: allowed are 256 to 8972");
  }
}

namespace {

uint32_t chunk_length(size_t elements) {
  if (elements >= 1 && elements <= codec::kMostElements) return static_cast<uint32_t>(elements);
  throw nb::value_error(
      ("elements is " + std::to_string(elements) + "; a chunk has 1 to 65535").c_str());
}

nb::bytes encode_chunk(const InputArray<float>& values, const std::string& encoding, double kept) {
  const codec::Format format = parse_format(encoding, kept);
  const uint32_t count = chunk_length(values.shape(0));
  std::vector<uint8_t> payload(format.bytes(count));
  codec::encode(format, values.data(), count, payload.data());
  return nb::bytes(payload.data(), payload.size());
}

Array<float> decode_chunk(const nb::bytes& payload, size_t elements, const std::string& encoding,
                          double kept) {
  const codec::Format format = parse_format(encoding, kept);
  const uint32_t count = chunk_length(elements);
  const std::span bytes(reinterpret_cast<const uint8_t*>(payload.c_str()), payload.size());
  if (!codec::valid(format, bytes, count)) throw nb::value_error("payload: no valid chunk");
  std::vector<float> values(count);
  codec::decode(format, bytes.data(), count, values.data());
  return to_array(std::move(values));
}

}  // namespace

void bind_codec(nb::module_& module) {
  module.def(
      "chunk_elements",
      [](const std::string& encoding, double kept, uint32_t datagram_bytes) {
        check_datagram(datagram_bytes);
        return parse_format(encoding, kept).chunk_elements(datagram_bytes - wire::kHeaderBytes);
      },
      "encoding"_a, "kept"_a, "datagram_bytes"_a, "The most elements that one datagram carries.");
  module.def("encode_chunk", &encode_chunk, "values"_a, "encoding"_a, "kept"_a = 1.0,
             "The payload of one chunk.");
  module.def(
      "hadamard",
      [](const WritableArray& values, uint64_t seed, bool inverse) {
        const nb::gil_scoped_release release;
        if (inverse)
          codec::hadamard_inverse(values.data(), values.shape(0), seed);
        else
          codec::hadamard_forward(values.data(), values.shape(0), seed);
      },
      "values"_a.noconvert(), "seed"_a, "inverse"_a = false,
      "The randomised Hadamard transform, in place.");
  module.attr("HADAMARD_BLOCK") = codec::kHadamardBlock;
  module.def("decode_chunk", &decode_chunk, "payload"_a, "elements"_a, "encoding"_a, "kept"_a = 1.0,
             "The values of one chunk.");
}

}  // namespace gradwire::binding
