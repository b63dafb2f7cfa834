// The randomised Hadamard transform of a bucket spreads the loss of a chunk: each element of its
// block loses a little, instead of a few elements all (OptiReduce, NSDI'25). It is orthonormal, in
// place, and the same to the bit on every processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

// Elements of a block; about eleven datagrams of 1,472 bytes share each loss. The rest of a bucket
// goes in blocks of smaller and smaller powers of two.
inline constexpr size_t kHadamardBlock = 4096;

// Forward: random signs drawn from the seed, then the transform of each block. Inverse: the
// reverse.
void hadamard_forward(float* values, size_t count, uint64_t seed);
void hadamard_inverse(float* values, size_t count, uint64_t seed);

}  // namespace gradwire::codec
