// Values packed as msgpack: finds its way through them without making objects.
#ifndef PEEKLOCK_PACKED_H
#define PEEKLOCK_PACKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What is read next, and the end of the bytes.
struct packed {
    const uint8_t *at, *end;
};

// Each reads one value, and moves behind it. False if another kind of value comes, or none that is whole.
bool packed_array(struct packed *packed, size_t *count); // its items follow
bool packed_number(struct packed *packed, uint64_t *value); // one that is not negative
bool packed_bytes(struct packed *packed, const uint8_t **bytes, size_t *size);
bool packed_skip(struct packed *packed); // any value, with all that is in it

#endif
