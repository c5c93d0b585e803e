// XXH3 of 64 bits, as fast as the processor can.
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const uint8_t *bytes, size_t size);

// To be called once, before `hash64`.
void choose_hash(void);

// What `hash64` is made of; with AVX2 only on a processor that has it.
uint64_t hash64_plain(const uint8_t *bytes, size_t size);
uint64_t hash64_avx2(const uint8_t *bytes, size_t size);
