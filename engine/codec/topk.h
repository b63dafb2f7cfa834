// The codec topk: the `entries` largest magnitudes of a chunk, lower indices first among equals.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

inline constexpr size_t kEntryBytes = 6;  // u16 index, f32 value

void encode_topk(const float* values, uint32_t count, uint32_t entries, uint8_t* out);
bool valid_topk(const uint8_t* payload, uint32_t count, uint32_t entries);
void decode_topk(const uint8_t* payload, uint32_t count, uint32_t entries, float* out);
// Adds the decoded values to `sum`, with the result of adding all elements to the bit. The zeros
// between the entries need not be added: they would only turn a negative zero positive, and no sum
// is one.
void add_topk(float* sum, const uint8_t* payload, uint32_t count, uint32_t entries);

}  // namespace gradwire::codec
