// What a message record shows of its message: body, reply-to and application properties, where they are in it.
//
// As `pyspark_peeklock.records` shows them. A function that returns false says nothing of the record: Python looks at it.
#ifndef PEEKLOCK_STORED_H
#define PEEKLOCK_STORED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes somewhere; `at` is NULL for a value that is null.
struct span {
    const uint8_t *at;
    size_t bytes;
};

// The sections of a record; one that it does not have has no bytes.
struct sections {
    struct span properties, application_properties, body;
};

bool stored_sections(const uint8_t *record, size_t size, struct sections *sections);

// The content of a body that is one data section, or one value that is a string or a binary.
bool stored_content(struct span body, struct span *content);

bool stored_reply_to(struct span properties, struct span *text);

enum { MAX_DIGITS = 20 };

// Application properties, one after the other, up to `left`. Keys are texts and differ.
struct pairs {
    const uint8_t *at, *end;
    uint32_t left, count;
    struct span keys[64];
    uint8_t digits[MAX_DIGITS]; // of the value, if that is a number
};

bool pairs_begin(struct span section, struct pairs *pairs);
// Only if there are any left. `value` is good until the next call.
bool pairs_next(struct pairs *pairs, struct span *key, struct span *value);

#endif
