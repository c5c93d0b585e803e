// The same hash, compiled for AVX2: the build is for any processor of its kind.
#include "hashing.h"

#if defined(__x86_64__) && defined(__GNUC__)
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
#else

uint64_t hash64_avx2(const uint8_t *bytes, size_t size) { return hash64_plain(bytes, size); }

#endif
