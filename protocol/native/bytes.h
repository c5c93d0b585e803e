// Numbers in bytes, big-endian as AMQP and the broker's stores have them.
#ifndef PEEKLOCK_BYTES_H
#define PEEKLOCK_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static inline uint32_t read_u32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t read_u64(const uint8_t *at) { return (uint64_t)read_u32(at) << 32 | read_u32(at + 4); }

// The writers return the place behind what they have written.
static inline uint8_t *write_u16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
    return at + 2;
}

static inline uint8_t *write_u32(uint8_t *at, uint32_t value) {
    at = write_u16(at, (uint16_t)(value >> 16));
    return write_u16(at, (uint16_t)value);
}

static inline uint8_t *write_u64(uint8_t *at, uint64_t value) {
    at = write_u32(at, (uint32_t)(value >> 32));
    return write_u32(at, (uint32_t)value);
}

static inline uint8_t *write_bytes(uint8_t *at, const void *bytes, size_t size) {
    memcpy(at, bytes, size);
    return at + size;
}

#endif
