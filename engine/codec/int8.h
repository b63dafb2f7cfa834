// The codec int8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

inline constexpr size_t kInt8Prefix = 4;  // the scale

void encode_int8(const float* values, uint32_t count, uint8_t* out);
bool valid_int8(const uint8_t* payload);
void decode_int8(const uint8_t* payload, uint32_t count, float* out);

}  // namespace gradwire::codec
