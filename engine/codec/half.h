// The codecs f16, bf16 and half.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

inline constexpr size_t kF16Prefix = 2;  // the shift

void encode_f16(const float* values, uint32_t count, uint8_t* out);
bool valid_f16(const uint8_t* payload);
void decode_f16(const uint8_t* payload, uint32_t count, float* out);

void encode_bf16(const float* values, uint32_t count, uint8_t* out);
void decode_bf16(const uint8_t* payload, uint32_t count, float* out);

void encode_half(const float* values, uint32_t count, uint8_t* out);
void decode_half(const uint8_t* payload, uint32_t count, float* out);

}  // namespace gradwire::codec
