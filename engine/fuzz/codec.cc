// The codecs: any payload of the right length is valid or not, what is valid decodes, and what was
// encoded is valid and as the formats promise.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "fuzz/input.h"

namespace gradwire::fuzz {
namespace {

using codec::Encoding;

// Values of every size, the special ones among them.
float value(Input& input) {
  const uint8_t how = input.byte();
  switch (how % 8) {
    case 0:
      return std::numeric_limits<float>::infinity() * (how & 8 ? -1.0f : 1.0f);
    case 1:
      return std::bit_cast<float>(0x7f800001u | (input.get<uint32_t>() & 0x807fffffu));  // NaN
    case 2:
      return 0.0f * (how & 8 ? -1.0f : 1.0f);
    case 3:
      return std::numeric_limits<float>::max() * (how & 8 ? -1.0f : 1.0f);
    default:
      return std::bit_cast<float>(input.get<uint32_t>());
  }
}

void check_payload(const codec::Format& format, Input& input, uint32_t count) {
  const std::vector<uint8_t> payload = input.take(format.bytes(count));
  if (!codec::valid(format, payload, count)) return;
  // On the heap and of exactly this length, so that a write beyond it is seen.
  std::vector<float> out(count);
  codec::decode(format, payload.data(), count, out.data());
  const std::vector<float> before = out;
  codec::decode(format, payload.data(), count, out.data());
  expect(std::memcmp(before.data(), out.data(), out.size() * sizeof(float)) == 0,
         "a payload decodes to the same values again");
}

void check_values(const codec::Format& format, Input& input, uint32_t count) {
  std::vector<float> values(count);
  for (float& each : values) each = value(input);
  std::vector<uint8_t> payload(format.bytes(count));
  std::vector<uint8_t> again(payload.size());
  codec::encode(format, values.data(), count, payload.data());
  codec::encode(format, values.data(), count, again.data());
  expect(payload == again, "values encode to the same bytes again");
  expect(codec::valid(format, payload, count), "what was encoded is valid");
  std::vector<float> out(count);
  codec::decode(format, payload.data(), count, out.data());
  std::vector<float> round = values;
  codec::round_trip(format, round.data(), count, again.data());
  expect(std::memcmp(round.data(), out.data(), out.size() * sizeof(float)) == 0,
         "a round trip gives what others decode");
  const bool overflows = format.is_type_of_two_bytes();
  const bool left_out = format.encoding == Encoding::topk;
  for (uint32_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i]))
      expect(left_out || !std::isfinite(out[i]), "what is not finite decodes to no finite value");
    else if (!left_out && !overflows)
      expect(std::isfinite(out[i]), "a finite value decodes to a finite one");
    if (format.plain())
      expect(std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(values[i]), "f32 is exact");
  }
}

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gradwire;
  using namespace gradwire::fuzz;
  Input input(data, size);
  codec::Format format;
  format.encoding = static_cast<Encoding>(input.below(6));
  if (format.encoding == Encoding::topk) format.kept = input.get<double>();
  const auto count = input.below(4096) + 1;
  if (!format.validate().empty()) return 0;
  const size_t bytes = format.bytes(count);
  expect(format.chunk_elements(bytes) >= 1, "a chunk has an element");
  if (format.encoding != Encoding::topk)
    expect(format.chunk_elements(bytes) == count, "a payload's length tells its elements");
  input.flip() ? check_payload(format, input, count) : check_values(format, input, count);
  return 0;
}
