#include "records.h"

#include "constructors.h"
#include "intake.h"

enum { DURABLE = 1, HAS_PRIORITY = 2 };

#define NEVER UINT64_C(0x7FFFFFFFFFFFFFFF)
#define MAX_EXPIRY_MS UINT64_C(253402243199000) // as `protocol.message.rendering` has it

// Keys of our annotations with the constructors of their values, encoded.
#define SEQUENCE_NUMBER "\xA3\x15x-opt-sequence-number\x81"
#define ENQUEUED_TIME "\xA3\x13x-opt-enqueued-time\x83"
#define LOCKED_UNTIL "\xA3\x12x-opt-locked-until\x83"
#define ENQUEUE_SEQUENCE_NUMBER "\xA3\x1Dx-opt-enqueue-sequence-number\x81"
#define PARTITION_ID "\xA3\x12x-opt-partition-id\x61"
#define PARTITION_KEY "\xA3\x13x-opt-partition-key\xA1"
#define LOCK_TOKEN "\x00\x53\x71\xC1\x24\x02\xA3\x10x-opt-lock-token\x98" // the whole section up to the token
#define TEXT_BYTES(text) (sizeof(text) - 1)

struct layout {
    uint8_t flags, priority;
    uint16_t annotation_values;
    uint32_t annotation_bytes, properties_bytes, application_properties_bytes;
};

static struct layout layout_of(const uint8_t *record) {
    const uint8_t *at = record + LAYOUT_AT;
    return (struct layout){at[0], at[1], read_u16(at + 2), read_u32(at + 4), read_u32(at + 8), read_u32(at + 12)};
}

static bool expires(const uint8_t *record) { return read_u64(record + EXPIRES_AT) != NEVER; }

static uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

// The properties of a record that expires, with its times in place of those that they have.
struct timed_properties {
    struct properties before; // of the record; times go behind the first `head` fields, and fields from `tail` on follow
    uint32_t head, tail, nulls, count;
    size_t bytes; // of the new section
};

static bool with_times(const uint8_t *section, size_t size, struct timed_properties *timed) {
    if (!properties_read(section, size, &timed->before)) return false;
    uint32_t count = timed->before.count;
    timed->head = count < EXPIRY_TIME ? count : EXPIRY_TIME;
    timed->nulls = EXPIRY_TIME - timed->head;
    timed->tail = count < CREATION_TIME + 1 ? count : CREATION_TIME + 1;
    timed->count = count < CREATION_TIME + 1 ? CREATION_TIME + 1 : count;
    const size_t *at = timed->before.at;
    timed->bytes = 12 + at[timed->head] - at[0] + timed->nulls + 18 + at[count] - at[timed->tail];
    return true;
}

static const uint8_t *properties_of(const uint8_t *record, const struct layout *layout) {
    return record + RECORD_HEADER_BYTES + layout->annotation_bytes;
}

// A key that is added to a message. Its text is NULL if there is none.
struct added_key {
    const uint8_t *text;
    size_t bytes;
};

// True if one of the sender's annotations is its partition key, in `*has_key`; false if they are not all short.
static bool read_annotations(const uint8_t *pairs, const struct layout *layout, bool *has_key) {
    size_t at = 0, end = layout->annotation_bytes, key_bytes = TEXT_BYTES(PARTITION_KEY) - 1;
    *has_key = false;
    while (at < end) {
        size_t bytes = short_value_bytes(pairs + at, end - at);
        if (!bytes || pairs[at] != SYMBOL_8) return false;
        if (bytes == key_bytes && !memcmp(pairs + at, PARTITION_KEY, key_bytes)) *has_key = true;
        at += bytes;
        bytes = short_value_bytes(pairs + at, end - at);
        if (!bytes) return false;
        at += bytes;
    }
    return true;
}

// Read an id that may be the key of a message: false if it is none that is simply added.
static bool read_key(const uint8_t *section, const struct properties *properties, unsigned int field,
                     struct added_key *key) {
    if (field >= properties->count || section[properties->at[field]] == NULL_VALUE) return true;
    const uint8_t *value = section + properties->at[field];
    *key = (struct added_key){value + 2, value[1]};
    return *value == STRING_8;
}

// Find the key that chose the fragment of a message and that its sender did not set. False if that is not simple.
static bool find_key(const uint8_t *record, const struct layout *layout, enum keys keys, struct added_key *key) {
    *key = (struct added_key){NULL, 0};
    if (keys == NO_KEYS) return true;
    bool has_key;
    if (!read_annotations(record + RECORD_HEADER_BYTES, layout, &has_key)) return false;
    if (has_key) return true;
    struct properties properties;
    const uint8_t *section = properties_of(record, layout);
    if (!properties_read(section, layout->properties_bytes, &properties)) return false;
    if (!read_key(section, &properties, GROUP_ID, key)) return false;
    return key->text || keys == SET_KEYS || read_key(section, &properties, MESSAGE_ID, key);
}

bool record_is_usual(const uint8_t *record, size_t size, enum keys keys) {
    if (size < RECORD_HEADER_BYTES) return false;
    struct layout layout = layout_of(record);
    uint64_t parts = (uint64_t)layout.annotation_bytes + layout.properties_bytes + layout.application_properties_bytes;
    if (layout.flags > (DURABLE | HAS_PRIORITY) || parts > size - RECORD_HEADER_BYTES) return false;
    struct added_key key;
    if (!find_key(record, &layout, keys, &key)) return false;
    if (!expires(record)) return true;
    uint64_t enqueued_ms = read_u64(record + ENQUEUED_AT), expires_ms = read_u64(record + EXPIRES_AT);
    struct timed_properties timed;
    return enqueued_ms <= expires_ms && expires_ms < NEVER &&
           with_times(properties_of(record, &layout), layout.properties_bytes, &timed);
}

// Bytes of our annotations.
static uint32_t ours(const struct delivery *delivery, const struct added_key *key) {
    uint32_t bytes = TEXT_BYTES(SEQUENCE_NUMBER) + 8 + TEXT_BYTES(ENQUEUED_TIME) + 8;
    if (delivery->locked) bytes += TEXT_BYTES(LOCKED_UNTIL) + 8;
    if (delivery->is_copy) bytes += TEXT_BYTES(ENQUEUE_SEQUENCE_NUMBER) + 8;
    if (delivery->keys != NO_KEYS) bytes += TEXT_BYTES(PARTITION_ID) + 2;
    if (key->text) bytes += TEXT_BYTES(PARTITION_KEY) + 1 + (uint32_t)key->bytes;
    return bytes;
}

size_t record_rendered_bytes(const uint8_t *record, size_t size, const struct delivery *delivery) {
    struct layout layout = layout_of(record);
    size_t bytes = 4 + 2 + 1 + (layout.flags & HAS_PRIORITY ? 2 : 1) + 3 + 4;
    if (delivery->locked) bytes += TEXT_BYTES(LOCK_TOKEN) + 16;
    struct added_key key;
    find_key(record, &layout, delivery->keys, &key);
    bytes += 4 + 4 + 4 + ours(delivery, &key);
    if (expires(record)) {
        struct timed_properties timed;
        with_times(properties_of(record, &layout), layout.properties_bytes, &timed);
        bytes += 4 + timed.bytes - layout.properties_bytes;
    } else if (!layout.properties_bytes) {
        bytes += 4;
    }
    return bytes + size - RECORD_HEADER_BYTES;
}

uint8_t *record_render_head(const uint8_t *record, size_t size, const struct delivery *delivery, uint8_t *to,
                            const uint8_t **rest_at, size_t *rest_bytes) {
    struct layout layout = layout_of(record);
    uint8_t *at = write_bytes(to, "\x00\x53\x70\xC0", 4);
    *at++ = (uint8_t)((layout.flags & HAS_PRIORITY ? 11 : 10) + (expires(record) ? 4 : 0));
    *at++ = 5;
    *at++ = layout.flags & DURABLE ? 0x41 : 0x42;
    if (layout.flags & HAS_PRIORITY) {
        *at++ = 0x50;
        *at++ = layout.priority;
    } else {
        *at++ = 0x40;
    }
    uint64_t enqueued_ms = read_u64(record + ENQUEUED_AT), expires_ms = read_u64(record + EXPIRES_AT);
    if (expires(record)) {
        *at++ = 0x70;
        at = write_u32(at, (uint32_t)least(expires_ms - enqueued_ms, UINT32_MAX));
    } else {
        *at++ = 0x40;
    }
    at = write_bytes(at, "\x40\x70", 2); // no first-acquirer; the delivery-count follows
    at = write_u32(at, delivery->delivery_count);
    if (delivery->locked) {
        at = write_bytes(at, LOCK_TOKEN, TEXT_BYTES(LOCK_TOKEN));
        at = write_bytes(at, delivery->lock_token, sizeof delivery->lock_token);
    }
    struct added_key key;
    find_key(record, &layout, delivery->keys, &key);
    at = write_bytes(at, "\x00\x53\x72\xD1", 4);
    at = write_u32(at, 4 + ours(delivery, &key) + layout.annotation_bytes);
    at = write_u32(at, 4u + (delivery->locked ? 2u : 0u) + (delivery->is_copy ? 2u : 0u) +
                           (delivery->keys != NO_KEYS ? 2u : 0u) + (key.text ? 2u : 0u) + layout.annotation_values);
    at = write_bytes(at, SEQUENCE_NUMBER, TEXT_BYTES(SEQUENCE_NUMBER));
    at = write_u64(at, delivery->sequence_number);
    at = write_bytes(at, ENQUEUED_TIME, TEXT_BYTES(ENQUEUED_TIME));
    at = write_bytes(at, record + 8, 8);
    if (delivery->locked) {
        at = write_bytes(at, LOCKED_UNTIL, TEXT_BYTES(LOCKED_UNTIL));
        at = write_u64(at, delivery->locked_until_ms);
    }
    if (delivery->is_copy) {
        at = write_bytes(at, ENQUEUE_SEQUENCE_NUMBER, TEXT_BYTES(ENQUEUE_SEQUENCE_NUMBER));
        at = write_u64(at, delivery->sequence_number);
    }
    if (delivery->keys != NO_KEYS) {
        at = write_bytes(at, PARTITION_ID, TEXT_BYTES(PARTITION_ID));
        at = write_u16(at, (uint16_t)(delivery->sequence_number >> 48)); // the partition that gave the number
    }
    if (key.text) {
        at = write_bytes(at, PARTITION_KEY, TEXT_BYTES(PARTITION_KEY));
        *at++ = (uint8_t)key.bytes;
        at = write_bytes(at, key.text, key.bytes);
    }
    const uint8_t *stored = record + RECORD_HEADER_BYTES;
    size_t rest = size - RECORD_HEADER_BYTES;
    if (expires(record)) {
        struct timed_properties timed;
        const uint8_t *section = properties_of(record, &layout);
        with_times(section, layout.properties_bytes, &timed);
        const size_t *field = timed.before.at;
        at = write_bytes(at, stored, layout.annotation_bytes);
        at = write_bytes(at, "\x00\x53\x73\xD0", 4);
        at = write_u32(write_u32(at, (uint32_t)timed.bytes - 8), timed.count);
        at = write_bytes(at, section + field[0], field[timed.head] - field[0]);
        memset(at, 0x40, timed.nulls);
        at += timed.nulls;
        *at++ = 0x83;
        at = write_u64(at, least(expires_ms, MAX_EXPIRY_MS));
        *at++ = 0x83;
        at = write_u64(at, enqueued_ms);
        at = write_bytes(at, section + field[timed.tail], field[timed.before.count] - field[timed.tail]);
        stored += layout.annotation_bytes + layout.properties_bytes;
        rest -= layout.annotation_bytes + layout.properties_bytes;
    } else if (!layout.properties_bytes) { // some clients rely on the section
        at = write_bytes(at, stored, layout.annotation_bytes);
        at = write_bytes(at, "\x00\x53\x73\x45", 4);
        stored += layout.annotation_bytes;
        rest -= layout.annotation_bytes;
    }
    *rest_at = stored;
    *rest_bytes = rest;
    return at;
}

uint8_t *record_render(const uint8_t *record, size_t size, const struct delivery *delivery, uint8_t *to) {
    const uint8_t *rest;
    size_t rest_bytes;
    uint8_t *at = record_render_head(record, size, delivery, to, &rest, &rest_bytes);
    return write_bytes(at, rest, rest_bytes);
}
