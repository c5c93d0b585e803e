// Memory of the extension: buffers, rings, and maps of numbers. Functions that may find no memory return false.
#ifndef PEEKLOCK_MEMORY_H
#define PEEKLOCK_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buffer {
    uint8_t *bytes;
    size_t size, capacity;
};

// Make room for `more` bytes behind those that there are.
bool buffer_reserve(struct buffer *buffer, size_t more);
void buffer_free(struct buffer *buffer);

// Items of equal size, in the order in which they were pushed.
struct ring {
    uint8_t *items;
    size_t item_bytes, first, count, capacity;
};

// The place for another item at the end, which is added; NULL if there is no memory.
void *ring_push(struct ring *ring);
// The item at `index` from the front, which must be there.
void *ring_at(const struct ring *ring, size_t index);
void ring_pop(struct ring *ring);
void ring_pop_last(struct ring *ring);
void ring_free(struct ring *ring);

// Numbers but 0, each with another number.
struct map {
    struct map_slot {
        uint64_t key, value;
    } *slots;
    size_t count, capacity;
};

bool map_put(struct map *map, uint64_t key, uint64_t value);
// The place of the key's value, until the map is changed; NULL if it has none.
uint64_t *map_find(const struct map *map, uint64_t key);
bool map_remove(struct map *map, uint64_t key);
void map_free(struct map *map);

#endif
