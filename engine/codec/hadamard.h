// The randomised Hadamard transform of a bucket: a chunk that is lost costs each element of its
// block a little in place of a few elements all (OptiReduce, NSDI'25). Orthonormal, in place, and
// the same bits on every processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

// Elements of a block: about eleven datagrams of 1,472 bytes share each loss. What is left of a
// bucket goes in blocks of ever smaller powers of two.
inline constexpr size_t kHadamardBlock = 4096;

// Random signs, drawn from the seed, then the transform of each block; and back.
void hadamard_forward(float* values, size_t count, uint64_t seed);
void hadamard_inverse(float* values, size_t count, uint64_t seed);

}  // namespace gradwire::codec
