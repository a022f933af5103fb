// FOLD3D_VECTORISED before a function: its loops use the widest registers of the CPU that runs them.
#pragma once

#include <cstddef>  // brings __GLIBC__

// One more copy of the function, and of all that it calls, for CPUs with AVX2; the loader picks. Results are the same
// to the bit: the build says -ffp-contract=off. Sanitizers' libraries are not ready yet when the loader asks. On ARM,
// NEON is part of every CPU.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOLD3D_VECTORISED __attribute__((target_clones("default", "avx2"), flatten))
#else
#define FOLD3D_VECTORISED
#endif
