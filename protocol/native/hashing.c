#include "hashing.h"

#include <stdbool.h>

#include "hashing_avx2.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#ifdef BUILDS_FOR_AVX2

enum { LARGE_BYTES = 240 }; // up to this XXH3 has no loop that AVX2 makes faster

static bool has_avx2;

void choose_hash(void) { has_avx2 = __builtin_cpu_supports("avx2"); }

uint64_t hash64(const uint8_t *bytes, size_t size) {
    return has_avx2 && size > LARGE_BYTES ? hash64_avx2(bytes, size) : XXH3_64bits(bytes, size);
}

#else

void choose_hash(void) {}

uint64_t hash64(const uint8_t *bytes, size_t size) { return XXH3_64bits(bytes, size); }

#endif
