// Marks a plain loop over floats for which the compiler also makes an AVX2 version, chosen when the
// program starts. Both round alike: no fused multiply-add in either.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GRADWIRE_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define GRADWIRE_VECTORISED
#endif

namespace gradwire {

// Reads from any address; the compiler vectorises these.
using LooseFloat = float __attribute__((aligned(1), may_alias));

}  // namespace gradwire
