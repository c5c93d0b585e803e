// What fuzzers give bytes to: TARGET is one of the functions below. All of it is the C of the extension that knows
// nothing of Python. A target fails by a trap, or by what the sanitizers find.
#include <stdlib.h>
#include <string.h>

#include "frames.h"
#include "intake.h"
#include "memory.h"
#include "records.h"
#include "stored.h"
#include "turns.h"

static void require(bool holds) {
    if (!holds) abort();
}

// What is taken apart has as many bytes as it says, and is rendered.
static void intake(const uint8_t *data, size_t size) {
    static const uint8_t id[MESSAGE_ID_BYTES] = "\xA1\x20""0123456789abcdef0123456789abcdef";
    for (int way = 0; way < 4; way++) {
        bool new_id = way & 1, sessions = way & 2;
        struct intake found;
        if (!intake_take(data, size, new_id, sessions, &found)) continue;
        require(found.stored_at <= found.properties_at && found.properties_at <= found.rest_at && found.rest_at <= size);
        uint8_t *record = malloc(RECORD_HEADER_BYTES + found.stored_bytes);
        memset(record, 0, LAYOUT_AT);
        memset(record + 16, 0xFF, 8);
        record[16] = 0x7F; // never expires
        memcpy(record + LAYOUT_AT, found.layout, LAYOUT_BYTES);
        intake_store(&found, data, size, id, record + RECORD_HEADER_BYTES);
        size_t record_bytes = RECORD_HEADER_BYTES + found.stored_bytes, text_bytes;
        const uint8_t *properties = record + RECORD_HEADER_BYTES + read_u32(found.layout + 4);
        const uint8_t *session = property_text(properties, read_u32(found.layout + 8), GROUP_ID, &text_bytes);
        require(found.has_session == (session != NULL) && (sessions || !session));
        require(record_is_usual(record, record_bytes, NO_KEYS));
        for (int form = 0; form < 12; form++) {
            bool locked = form & 1;
            enum keys keys = (enum keys)(form >> 2);
            if (!record_is_usual(record, record_bytes, keys)) continue;
            struct delivery delivery = {.sequence_number = 1, .locked = locked, .keys = keys, .is_copy = form & 2};
            size_t rendered_bytes = record_rendered_bytes(record, record_bytes, &delivery);
            uint8_t *rendered = malloc(rendered_bytes);
            require(record_render(record, record_bytes, &delivery, rendered) == rendered + rendered_bytes);
            free(rendered);
        }
        free(record);
    }
}

// The first bytes say how the form is cut out of the rest.
static void frames(const uint8_t *data, size_t size) {
    if (size < 8) return;
    struct form form = {.head_bytes = data[0] % 24, .id_bytes = data[1] & 1 ? 1 : 4, .rest_bytes = data[2] % 24};
    size_t form_bytes = form.head_bytes + 2 + form.rest_bytes, largest = (size_t)data[3] << 4;
    uint64_t next_id = data[4];
    bool dispositions = data[5] & 1;
    data += 8;
    size -= 8;
    if (size < form_bytes) return;
    form.head = data;
    memcpy(form.tag_head, data + form.head_bytes, 2);
    form.rest = data + form.head_bytes + 2;
    data += form_bytes;
    size -= form_bytes;
    size_t at = frames_walk(data, 0, size, largest, &form, dispositions, &next_id);
    require(at <= size && next_id <= UINT64_C(1) << 32);
    while (size >= 4) {
        struct transfer transfer;
        uint16_t channel;
        uint32_t handle;
        bool is_known = transfer_link(data, size, &channel, &handle);
        if (transfer_read(data, size, &transfer)) {
            require(is_known && transfer.channel == channel && transfer.handle == handle);
            require(transfer.payload_at <= transfer.size && transfer.payload_at <= size);
            if (transfer.tag) require(transfer.tag >= data && transfer.tag + transfer.tag_bytes <= data + transfer.payload_at);
            require(transfer.tag || !transfer.tag_bytes);
            const uint8_t *transaction = transfer.transaction;
            require(!transaction || transaction + TRANSACTION_BYTES <= data + transfer.payload_at);
        }
        for (int accepted = 0; accepted < 2; accepted++) {
            const uint8_t *transaction;
            if (transaction_read(data, size, accepted, &transaction))
                require(transaction > data && transaction + TRANSACTION_BYTES <= data + size);
        }
        size_t next = read_u32(data);
        if (next < 8 || next > size) break;
        data += next;
        size -= next;
    }
}

// A run of any bytes.
static void records(const uint8_t *data, size_t size) {
    size_t at = 0, bytes;
    while ((bytes = run_next(data, size, &at))) {
        require(at + bytes <= size);
        enum keys keys = (enum keys)(bytes % 3);
        if (record_is_usual(data + at, bytes, keys)) {
            struct delivery delivery = {.delivery_count = 7, .locked = bytes & 1, .keys = keys, .is_copy = bytes & 2};
            size_t rendered_bytes = record_rendered_bytes(data + at, bytes, &delivery);
            uint8_t *rendered = malloc(rendered_bytes);
            require(record_render(data + at, bytes, &delivery, rendered) == rendered + rendered_bytes);
            free(rendered);
        }
        at += bytes;
    }
}

// Each byte is an operation on a map and a ring, beside a table of the keys that the map must have.
static void memory(const uint8_t *data, size_t size) {
    struct map map = {0};
    struct ring ring = {.item_bytes = sizeof(uint64_t)};
    struct buffer buffer = {0};
    uint64_t expected[64] = {0}, pushed = 0, popped = 0;
    for (size_t at = 0; at < size; at++) {
        uint64_t key = 1 + (data[at] & 63), value = at + 1;
        switch (data[at] >> 6) {
        case 0:
        case 1:
            require(map_put(&map, key << 32 | key, value));
            expected[key - 1] = value;
            break;
        case 2:
            require(map_remove(&map, key << 32 | key) == (expected[key - 1] != 0));
            expected[key - 1] = 0;
            break;
        default:
            if (data[at] & 1 || !ring.count) *(uint64_t *)ring_push(&ring) = pushed++;
            else if (data[at] & 2) require(*(uint64_t *)ring_at(&ring, 0) == popped++), ring_pop(&ring);
            else require(*(uint64_t *)ring_at(&ring, ring.count - 1) == --pushed), ring_pop_last(&ring);
            require(ring.count == pushed - popped);
        }
        require(buffer_reserve(&buffer, data[at]));
        buffer.size += data[at];
        for (uint64_t each = 1; each <= 64; each++) {
            uint64_t *found = map_find(&map, each << 32 | each);
            require(found ? *found == expected[each - 1] : !expected[each - 1]);
        }
    }
    map_free(&map);
    ring_free(&ring);
    buffer_free(&buffer);
}

// Any value, and the items of two arrays as entries and records.
static void turns(const uint8_t *data, size_t size) {
    struct packed packed = {data, data + size};
    size_t count = 0, bytes;
    uint64_t number;
    const uint8_t *found_bytes, *texts[TEXTS];
    if (packed_skip(&packed)) require(packed.at > data && packed.at <= packed.end);
    packed.at = data;
    if (packed_number(&packed, &number)) require(packed.at > data && packed.at <= packed.end);
    packed.at = data;
    if (packed_bytes(&packed, &found_bytes, &bytes)) require(found_bytes >= data && found_bytes + bytes == packed.at);
    packed.at = data;
    if (!packed_array(&packed, &count) || count != 2) return;
    struct place places[2];
    for (int index = 0; index < 2; index++) {
        places[index].start = (uint64_t)(packed.at - data);
        if (!packed_skip(&packed)) return;
        places[index].end = (uint64_t)(packed.at - data);
    }
    struct items entries = {.payload = data, .size = size, .places = places, .count = 1};
    struct items records = {.payload = data, .size = size, .places = places + 1, .count = 1};
    struct buffer found = {0};
    if (entered_find(&entries, &records, &found)) {
        for (size_t at = 0; at < found.size; at += sizeof(struct entered)) {
            struct entered one;
            memcpy(&one, found.bytes + at, sizeof one);
            require(one.record > data && one.record + one.record_bytes <= data + size);
            if (!record_texts(one.record, one.record_bytes, texts)) continue;
            for (int text = 0; text < TEXTS; text++)
                require(!texts[text] || texts[text] + 1 + *texts[text] <= one.record + one.record_bytes);
        }
    }
    buffer_free(&found);
}

static bool is_in(struct span span, const uint8_t *data, size_t size) {
    return span.at >= data && span.at + span.bytes <= data + size;
}

// One record of any bytes.
static void stored(const uint8_t *data, size_t size) {
    struct sections sections;
    struct span text, key;
    if (!stored_sections(data, size, &sections)) return;
    require(is_in(sections.properties, data, size) && is_in(sections.body, data, size));
    if (stored_content(sections.body, &text)) require(is_in(text, data, size));
    if (stored_reply_to(sections.properties, &text) && text.at) require(is_in(text, data, size));
    struct pairs pairs;
    if (!pairs_begin(sections.application_properties, &pairs)) return;
    while (pairs.left && pairs_next(&pairs, &key, &text)) {
        uint8_t seen = 0;
        require(is_in(key, data, size));
        for (size_t at = 0; text.at && at < text.bytes; at++) seen |= text.at[at];
        require(!text.at || text.bytes || !seen);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const targets[])(const uint8_t *, size_t) = {intake, frames, records, memory, turns, stored};
    static const char *const names[] = {"intake", "frames", "records", "memory", "turns", "stored"};
    uint8_t *copy = malloc(size ? size : 1); // so that a read behind the end is found
    memcpy(copy, data, size);
    for (size_t each = 0; each < sizeof targets / sizeof *targets; each++)
        if (!strcmp(names[each], TARGET)) targets[each](copy, size);
    free(copy);
    return 0;
}
