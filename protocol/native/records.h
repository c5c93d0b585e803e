// Message records, and runs of them.
//
// A record is as `storage.records` has it: checksum (8 bytes), enqueued time (8), time when it expires (8), layout (16),
// and what is stored of the message. A run is records one behind the other, each with its size before it (4 bytes).
#ifndef PEEKLOCK_RECORDS_H
#define PEEKLOCK_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bytes.h"

enum { RECORD_SIZE_BYTES = 4, ENQUEUED_AT = 8, EXPIRES_AT = 16, LAYOUT_AT = 24, RECORD_HEADER_BYTES = 40 };

// Keys of MESSAGES, QUEUE and DUE, and entries of QUEUE without an overlay: checksum, message id, delivery count.
enum { MESSAGE_KEY_BYTES = 8, QUEUE_KEY_BYTES = 13, DUE_KEY_BYTES = 21 };
enum { ENTRY_BYTES = 16, ENTRY_MESSAGE_AT = 4, ENTRY_COUNT_AT = 12 };
enum { PLACE_AVAILABLE = 0, PLACE_SCHEDULED = 2 };

static inline void write_available_key(uint8_t *key, uint32_t queue_id, uint64_t number) {
    uint8_t *at = write_u32(key, queue_id);
    *at++ = PLACE_AVAILABLE;
    write_u64(at, number);
}

// The size of the record behind `*at`, which is moved to the record itself; 0 if the run ends before the record does.
static inline size_t run_next(const uint8_t *run, size_t size, size_t *at) {
    if (size - *at < RECORD_SIZE_BYTES) return 0;
    size_t bytes = read_u32(run + *at);
    *at += RECORD_SIZE_BYTES;
    return bytes > size - *at ? 0 : bytes;
}

// What chooses the fragment of a message, as `broker.namespace.fragments.Keys`.
enum keys { NO_KEYS = 0, SET_KEYS = 1, KEYS_WITH_MESSAGE_ID = 2 };

// What all deliveries of a run have in common. `locked` is false for messages that are received and deleted. `is_copy`: they
// are a subscription's, and say their sequence number as that at which they were enqueued, too.
struct delivery {
    uint64_t sequence_number;
    uint32_t delivery_count;
    bool locked;
    uint64_t locked_until_ms;
    uint8_t lock_token[16]; // in the order of an AMQP uuid
    enum keys keys;
    bool is_copy;
};

// True if the record is rendered by `record_render`: its layout fits its size, it has no delivery annotations of its
// sender, and if it expires, its times are sound and its properties short. On a partitioned entity, its annotations and
// properties are short, and the id that is its key is a text.
bool record_is_usual(const uint8_t *record, size_t size, enum keys keys);

// The number of bytes that `record_render` writes.
size_t record_rendered_bytes(const uint8_t *record, size_t size, const struct delivery *delivery);

// As `record_render`, up to the bytes that are as in the record: these are at `*rest_at`.
uint8_t *record_render_head(const uint8_t *record, size_t size, const struct delivery *delivery, uint8_t *to,
                            const uint8_t **rest_at, size_t *rest_bytes);

// Write the message as a receiver gets it, as `protocol.message.rendering.render`. Returns the place behind it.
uint8_t *record_render(const uint8_t *record, size_t size, const struct delivery *delivery, uint8_t *to);

#endif
