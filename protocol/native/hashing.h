// XXH3 of 64 bits, as fast as the processor can.
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const uint8_t *bytes, size_t size);

// To be called once, before `hash64`.
void choose_hash(void);
