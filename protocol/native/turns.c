#include "turns.h"

#include "bytes.h"
#include "constructors.h"
#include "intake.h"
#include "records.h"

#define PARTITION_KEY "\x13x-opt-partition-key" // behind its constructor

bool items_next(struct items *items) {
    while (!items->left) {
        if (items->bad || !items->count) return false;
        struct place place = *items->places++;
        items->count--;
        items->bad = true;
        if (place.start > place.end || place.end > items->size) return false;
        items->packed = (struct packed){items->payload + place.start, items->payload + place.end};
        if (!packed_array(&items->packed, &items->left)) return false;
        items->bad = false;
    }
    items->left--;
    return true;
}

bool queue_key_read(struct packed *packed, struct queue_key *key) {
    const uint8_t *bytes;
    size_t size;
    if (!packed_bytes(packed, &bytes, &size) || size != QUEUE_KEY_BYTES) return false;
    *key = (struct queue_key){read_u32(bytes), bytes[4], read_u64(bytes + 5)};
    return true;
}

bool entered_find(struct items *entries, struct items *records, struct buffer *found) {
    const uint8_t *value, *message_key;
    size_t fields, size;
    struct queue_key key;
    while (items_next(entries)) {
        struct packed *packed = &entries->packed;
        if (!packed_array(packed, &fields) || fields != 2 || !queue_key_read(packed, &key)) return false;
        if (!packed_bytes(packed, &value, &size) || size != ENTRY_BYTES || key.place == PLACE_SCHEDULED) return false;
        struct entered one = {.number = key.number, .count = read_u32(value + ENTRY_COUNT_AT)};
        if (one.number > INT64_MAX || one.count > INT32_MAX) return false;
        do {
            packed = &records->packed;
            if (!items_next(records) || !packed_array(packed, &fields) || fields != 2) return false;
            if (!packed_bytes(packed, &message_key, &size) || size != MESSAGE_KEY_BYTES) return false;
            if (!packed_bytes(packed, &one.record, &one.record_bytes)) return false;
        } while (memcmp(message_key, value + ENTRY_MESSAGE_AT, MESSAGE_KEY_BYTES) != 0);
        if (one.record_bytes < RECORD_HEADER_BYTES || !buffer_reserve(found, sizeof one)) return false;
        memcpy(found->bytes + found->size, &one, sizeof one);
        found->size += sizeof one;
    }
    return !entries->bad;
}

static bool is_ascii(const uint8_t *text, size_t size) {
    uint8_t all = 0;
    for (size_t at = 0; at < size; at++) all |= text[at];
    return all < 0x80;
}

bool record_texts(const uint8_t *record, size_t size, const uint8_t *texts[TEXTS]) {
    static const unsigned int FIELDS[TEXTS] = {
        [TEXT_MESSAGE_ID] = 0, [TEXT_SUBJECT] = 3, [TEXT_CORRELATION_ID] = 5, [TEXT_CONTENT_TYPE] = 6, [TEXT_SESSION_ID] = 10,
    };
    const uint8_t *layout = record + LAYOUT_AT, *stored = record + RECORD_HEADER_BYTES;
    uint64_t annotation_bytes = read_u32(layout + 4), properties_bytes = read_u32(layout + 8);
    if (annotation_bytes + properties_bytes > size - RECORD_HEADER_BYTES) return false;
    size_t wanted = sizeof PARTITION_KEY - 1;
    for (size_t at = 0; at + wanted <= annotation_bytes; at++)
        if (stored[at] == wanted - 1 && memcmp(stored + at, PARTITION_KEY, wanted) == 0) return false;
    struct properties properties;
    const uint8_t *section = stored + annotation_bytes;
    if (!properties_read(section, properties_bytes, &properties)) return false;
    for (size_t text = 0; text < TEXTS; text++) {
        texts[text] = NULL;
        if (text == TEXT_PARTITION_KEY || FIELDS[text] >= properties.count) continue;
        const uint8_t *value = section + properties.at[FIELDS[text]];
        if (*value == NULL_VALUE) continue;
        if ((*value != STRING_8 && *value != SYMBOL_8) || !is_ascii(value + 2, value[1])) return false;
        texts[text] = value + 1;
    }
    return true;
}
