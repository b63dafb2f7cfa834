#include "codec/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/half.h"
#include "codec/int8.h"
#include "codec/topk.h"

namespace gradwire::codec {

std::string Format::validate() const {
  if (!(kept > 0.0 && kept <= 1.0))
    return "kept is " + std::to_string(kept) + "; a share of the elements is in (0, 1]";
  if (encoding != Encoding::topk && kept != 1.0)
    return "kept is " + std::to_string(kept) + " without encoding \"topk\"; it must be 1";
  return "";
}

uint32_t Format::entries(uint32_t elements) const {
  // The small deficit keeps rounding from turning 0.1 × 30 into 4.
  const auto most = static_cast<uint32_t>(std::ceil(kept * elements - 1e-9));
  return std::clamp<uint32_t>(most, 1, elements);
}

size_t Format::encoded_bytes(uint32_t elements) const {
  switch (encoding) {
    case Encoding::f32:
      return f32_bytes(elements);
    case Encoding::f16:
      return kF16Prefix + size_t{2} * elements;
    case Encoding::bf16:
    case Encoding::half:
      return size_t{2} * elements;
    case Encoding::int8:
      return kInt8Prefix + elements;
    case Encoding::topk:
      return kEntryBytes * entries(elements);
  }
  return 0;
}

uint32_t Format::chunk_elements(size_t bytes) const {
  size_t most = 0;
  switch (encoding) {
    case Encoding::f32:
      most = bytes / kF32Bytes;
      break;
    case Encoding::f16:
      most = (bytes - kF16Prefix) / 2;
      break;
    case Encoding::bf16:
    case Encoding::half:
      most = bytes / 2;
      break;
    case Encoding::int8:
      most = bytes - kInt8Prefix;
      break;
    case Encoding::topk: {
      const auto room = static_cast<double>(bytes / kEntryBytes);
      most = static_cast<size_t>(std::min(std::ceil(room / kept), double{kMostElements}));
      while (most > 1 && this->bytes(static_cast<uint32_t>(most)) > bytes) --most;
      break;
    }
  }
  return static_cast<uint32_t>(std::min<size_t>(most, kMostElements));
}

void encode(const Format& format, const float* values, uint32_t count, uint8_t* out) {
  switch (format.encoding) {
    case Encoding::f32:
      std::memcpy(out, values, f32_bytes(count));
      return;
    case Encoding::f16:
      encode_f16(values, count, out);
      return;
    case Encoding::bf16:
      encode_bf16(values, count, out);
      return;
    case Encoding::int8:
      encode_int8(values, count, out);
      return;
    case Encoding::topk:
      encode_topk(values, count, format.entries(count), out);
      return;
    case Encoding::half:
      encode_half(values, count, out);
      return;
  }
}

bool valid_encoded(const Format& format, std::span<const uint8_t> payload, uint32_t count) {
  if (payload.size() != format.bytes(count)) return false;
  switch (format.encoding) {
    case Encoding::f32:
    case Encoding::bf16:
    case Encoding::half:
      return true;
    case Encoding::f16:
      return valid_f16(payload.data());
    case Encoding::int8:
      return valid_int8(payload.data());
    case Encoding::topk:
      return valid_topk(payload.data(), count, format.entries(count));
  }
  return false;
}

void decode(const Format& format, const uint8_t* payload, uint32_t count, float* out) {
  switch (format.encoding) {
    case Encoding::f32:
      std::memcpy(out, payload, f32_bytes(count));
      return;
    case Encoding::f16:
      decode_f16(payload, count, out);
      return;
    case Encoding::bf16:
      decode_bf16(payload, count, out);
      return;
    case Encoding::int8:
      decode_int8(payload, count, out);
      return;
    case Encoding::topk:
      decode_topk(payload, count, format.entries(count), out);
      return;
    case Encoding::half:
      decode_half(payload, count, out);
      return;
  }
}

void round_trip(const Format& format, float* values, uint32_t count, uint8_t* scratch) {
  if (format.plain()) return;
  encode(format, values, count, scratch);
  decode(format, scratch, count, values);
}

}  // namespace gradwire::codec
