#include "memory.h"

#include <stdlib.h>
#include <string.h>

bool buffer_reserve(struct buffer *buffer, size_t more) {
    if (more <= buffer->capacity - buffer->size) return true;
    size_t capacity = buffer->capacity ? buffer->capacity : 4096;
    while (capacity - buffer->size < more) {
        if (capacity > SIZE_MAX / 4) return false;
        capacity *= 2;
    }
    uint8_t *bytes = realloc(buffer->bytes, capacity);
    if (!bytes) return false;
    buffer->bytes = bytes;
    buffer->capacity = capacity;
    return true;
}

void buffer_free(struct buffer *buffer) {
    free(buffer->bytes);
    *buffer = (struct buffer){0};
}

void *ring_push(struct ring *ring) {
    if (ring->count == ring->capacity) {
        size_t capacity = ring->capacity ? 2 * ring->capacity : 16;
        uint8_t *items = malloc(capacity * ring->item_bytes);
        if (!items) return NULL;
        for (size_t index = 0; index < ring->count; index++)
            memcpy(items + index * ring->item_bytes, ring_at(ring, index), ring->item_bytes);
        free(ring->items);
        ring->items = items;
        ring->first = 0;
        ring->capacity = capacity;
    }
    ring->count++;
    return ring_at(ring, ring->count - 1);
}

void *ring_at(const struct ring *ring, size_t index) {
    return ring->items + ((ring->first + index) & (ring->capacity - 1)) * ring->item_bytes;
}

void ring_pop(struct ring *ring) {
    ring->first = (ring->first + 1) & (ring->capacity - 1);
    ring->count--;
}

void ring_pop_last(struct ring *ring) { ring->count--; }

void ring_free(struct ring *ring) {
    free(ring->items);
    ring->items = NULL;
    ring->first = ring->count = ring->capacity = 0;
}

// Open addressing; the capacity is a power of two, and at least half of the slots have the key 0, which is none.
static size_t place_of(const struct map *map, uint64_t key) {
    return (size_t)((key * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & (map->capacity - 1);
}

static struct map_slot *slot_of(const struct map *map, uint64_t key) {
    size_t at = place_of(map, key);
    while (map->slots[at].key && map->slots[at].key != key) at = (at + 1) & (map->capacity - 1);
    return &map->slots[at];
}

bool map_put(struct map *map, uint64_t key, uint64_t value) {
    if (2 * (map->count + 1) > map->capacity) {
        struct map grown = {.capacity = map->capacity ? 2 * map->capacity : 16};
        grown.slots = calloc(grown.capacity, sizeof *grown.slots);
        if (!grown.slots) return false;
        for (size_t at = 0; at < map->capacity; at++)
            if (map->slots[at].key) *slot_of(&grown, map->slots[at].key) = map->slots[at];
        grown.count = map->count;
        free(map->slots);
        *map = grown;
    }
    struct map_slot *slot = slot_of(map, key);
    map->count += slot->key == 0;
    *slot = (struct map_slot){key, value};
    return true;
}

uint64_t *map_find(const struct map *map, uint64_t key) {
    if (!map->count) return NULL;
    struct map_slot *slot = slot_of(map, key);
    return slot->key ? &slot->value : NULL;
}

bool map_remove(struct map *map, uint64_t key) {
    if (!map_find(map, key)) return false;
    size_t mask = map->capacity - 1, hole = (size_t)(slot_of(map, key) - map->slots);
    map->slots[hole].key = 0;
    map->count--;
    // Whatever was put behind the hole because its place was taken moves up.
    for (size_t at = (hole + 1) & mask; map->slots[at].key; at = (at + 1) & mask) {
        size_t wanted = place_of(map, map->slots[at].key);
        if (((at - wanted) & mask) < ((at - hole) & mask)) continue;
        map->slots[hole] = map->slots[at];
        map->slots[at].key = 0;
        hole = at;
    }
    return true;
}

void map_free(struct map *map) {
    free(map->slots);
    *map = (struct map){0};
}
