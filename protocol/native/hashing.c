#include "hashing.h"

#include <stdbool.h>

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

enum { LARGE_BYTES = 240 }; // up to this XXH3 has no loop that AVX2 makes faster

static bool has_avx2;

void choose_hash(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
}

uint64_t hash64_plain(const uint8_t *bytes, size_t size) { return XXH3_64bits(bytes, size); }

uint64_t hash64(const uint8_t *bytes, size_t size) {
    return has_avx2 && size > LARGE_BYTES ? hash64_avx2(bytes, size) : hash64_plain(bytes, size);
}
