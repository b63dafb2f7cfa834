// Streaming accumulation of f32 chunks. A `const void*` may have any address, since receive buffers
// are read in place; other pointers are aligned float arrays. Outputs and inputs do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace gradwire::reduce {

// sum[i] += in[i]
void add(float* sum, const void* in, size_t count);
// sum[i] = a[i] + b[i], in this order
void add_pair(float* sum, const void* a, const void* b, size_t count);
// out[i] = (parts[0][i] + parts[1][i] + …) * factor, added in this order; each part is read once.
// `out` may be a part.
void add_run(float* out, std::span<const void* const> parts, float factor, size_t count);
// sum[i] -= in[i]
void subtract(float* sum, const float* in, size_t count);
// sum[i] += the decoded payload, which must be valid, rounded as if it had been decoded first.
// `scratch` has room for `count` values.
void add(const codec::Format& format, float* sum, const uint8_t* payload, uint32_t count,
         float* scratch);
// values[i] *= factor
void scale(float* values, float factor, size_t count);
// True when every value is finite.
bool all_finite(const float* values, size_t count);
// The mean of |values|; infinity when that is not finite, or `count` is 0. It is the same to the
// bit on any machine.
float mean_magnitude(const float* values, size_t count);
// The sum of the squares; it is not finite only if a value is not.
double square_sum(const float* values, size_t count);
// out[i] = in[i] * factor
void write_scaled(float* out, const float* in, float factor, size_t count);

}  // namespace gradwire::reduce
