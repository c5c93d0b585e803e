// The bytes of a turn, as `storage.log.frames` has them: keys and items of QUEUE, items of MESSAGES, and their records.
#ifndef PEEKLOCK_TURNS_H
#define PEEKLOCK_TURNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory.h"
#include "packed.h"

// Where an array of items is in the payload.
struct place {
    uint64_t start, end;
};

// The items of some arrays, one after the other.
struct items {
    const uint8_t *payload;
    size_t size;
    const struct place *places;
    size_t count;         // of places
    struct packed packed; // the next item, when `items_next` has found one
    size_t left;          // of the array there
    bool bad;             // what should be an array was none
};

// True if there is another item.
bool items_next(struct items *items);

struct queue_key {
    uint32_t queue_id;
    uint8_t place;
    uint64_t number;
};

// Read one; false if it is none.
bool queue_key_read(struct packed *packed, struct queue_key *key);

// A new entry of a queue, and its record.
struct entered {
    const uint8_t *record;
    size_t record_bytes;
    uint64_t number;
    uint32_t count;
};

// Find entries (items of QUEUE) and their records (items of MESSAGES), which are in the same order: `found` gets a
// `struct entered` for each. False if an entry has an overlay, is scheduled, has numbers that no row has, or no record.
bool entered_find(struct items *entries, struct items *records, struct buffer *found);

enum text { TEXT_MESSAGE_ID, TEXT_SESSION_ID, TEXT_PARTITION_KEY, TEXT_CORRELATION_ID, TEXT_SUBJECT, TEXT_CONTENT_TYPE, TEXTS };

// Texts of a record: where the length of each is, which is a byte before it; NULL where there is none. False if one is
// no short string of ASCII.
bool record_texts(const uint8_t *record, size_t size, const uint8_t *texts[TEXTS]);

#endif
