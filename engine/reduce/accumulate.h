// Streaming accumulation of f32 chunks. What is `const void*` may lie at any address (it is read
// from receive buffers in place), the rest are ordinary float arrays. Outputs and inputs do not
// overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"

namespace gradwire::reduce {

// sum[i] += in[i]
void add(float* sum, const void* in, size_t count);
// sum[i] = a[i] + b[i], in this order
void add_pair(float* sum, const void* a, const void* b, size_t count);
// sum[i] -= in[i]
void subtract(float* sum, const float* in, size_t count);
// sum[i] += what a valid payload decodes to, rounded as if it had been decoded first. `scratch` has
// room for `count` values.
void add(const codec::Format& format, float* sum, const uint8_t* payload, uint32_t count,
         float* scratch);
// values[i] *= factor
void scale(float* values, float factor, size_t count);
// True when every value is finite.
bool all_finite(const float* values, size_t count);
// The mean of |values|; infinity where that is not finite, and for none. The same to the bit on any
// machine.
float mean_magnitude(const float* values, size_t count);
// The sum of their squares; not finite only if one of them is not.
double square_sum(const float* values, size_t count);
// out[i] = in[i] * factor
void write_scaled(float* out, const float* in, float factor, size_t count);

}  // namespace gradwire::reduce
