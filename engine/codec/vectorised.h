// GRADWIRE_VECTORISED marks a plain loop over floats. The compiler makes an AVX2 version of it as
// well, which is chosen at program start. Both round alike, since neither uses fused multiply-add.
// GRADWIRE_ONE_VERSION leaves that out: lines of such functions are not counted (gcov).
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(GRADWIRE_ONE_VERSION)
#define GRADWIRE_VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define GRADWIRE_VECTORISED
#endif

// GRADWIRE_INDEPENDENT marks a loop that may write what it reads, but only at the same place: the
// compiler need not compare addresses before it vectorises.
#if defined(__clang__)
#define GRADWIRE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GRADWIRE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace gradwire {

// LooseFloat is read from any address; the compiler vectorises such reads.
using LooseFloat = float __attribute__((aligned(1), may_alias));

}  // namespace gradwire
