// A file of its own, because it is compiled for AVX2: the rest of the build is for any processor of its kind.
#include "hashing_avx2.h"

#ifdef BUILDS_FOR_AVX2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define XXH_VECTOR 2 // XXH_AVX2
#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

uint64_t hash64_avx2(const uint8_t *bytes, size_t size) { return XXH3_64bits(bytes, size); }

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
