#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define BUILDS_FOR_AVX2

// XXH3 of 64 bits, for a processor with AVX2.
uint64_t hash64_avx2(const uint8_t *bytes, size_t size);

#endif
