// GRADWIRE_VECTORISED marks a plain loop over floats. The compiler makes an AVX2 version of it as
// well, which is chosen at program start. Both round alike, since neither uses fused multiply-add.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GRADWIRE_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define GRADWIRE_VECTORISED
#endif

namespace gradwire {

// LooseFloat is read from any address; the compiler vectorises such reads.
using LooseFloat = float __attribute__((aligned(1), may_alias));

}  // namespace gradwire
