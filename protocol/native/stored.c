#include "stored.h"

#include "bytes.h"
#include "constructors.h"
#include "intake.h"
#include "records.h"

enum { REPLY_TO = 4, DATA = 0x75, AMQP_VALUE = 0x77 };

// UTF-8 as the standard has it: no surrogates, nothing longer than it must be.
static bool is_utf8(const uint8_t *text, size_t size) {
    const uint8_t *end = text + size;
    while (text < end) {
        uint64_t word;
        if (end - text >= 8 && (memcpy(&word, text, 8), !(word & UINT64_C(0x8080808080808080)))) {
            text += 8;
            continue;
        }
        uint8_t first = *text++;
        if (first < 0x80) continue;
        int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || end - text < more) return false;
        uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*text < least || *text > most) return false;
        for (int index = 1; index < more; index++)
            if ((text[index] & 0xC0) != 0x80) return false;
        text += more;
    }
    return true;
}

static bool is_ascii(const uint8_t *text, size_t size) {
    uint8_t seen = 0;
    for (size_t index = 0; index < size; index++) seen |= text[index];
    return seen < 0x80;
}

// Read the bytes of a value whose constructor is `small` or `large`, at `*at`, which is moved behind it.
static bool take_bytes_of(const uint8_t **at, const uint8_t *end, uint8_t small, uint8_t large, struct span *found) {
    size_t left = (size_t)(end - *at), head, bytes;
    if (left >= 2 && **at == small) {
        head = 2;
        bytes = (*at)[1];
    } else if (left >= 5 && **at == large) {
        head = 5;
        bytes = read_u32(*at + 1);
    } else {
        return false;
    }
    if (bytes > left - head) return false;
    *found = (struct span){*at + head, bytes};
    *at += head + bytes;
    return true;
}

enum { SYMBOL_32 = 0xB3 };

// A string or a symbol.
static bool take_text(const uint8_t **at, const uint8_t *end, struct span *text) {
    if (take_bytes_of(at, end, STRING_8, STRING_32, text)) return is_utf8(text->at, text->bytes);
    return take_bytes_of(at, end, SYMBOL_8, SYMBOL_32, text) && is_ascii(text->at, text->bytes);
}

bool stored_sections(const uint8_t *record, size_t size, struct sections *sections) {
    if (size < RECORD_HEADER_BYTES) return false;
    uint64_t annotations = read_u32(record + LAYOUT_AT + 4), properties = read_u32(record + LAYOUT_AT + 8);
    uint64_t application = read_u32(record + LAYOUT_AT + 12), left = size - RECORD_HEADER_BYTES;
    if (annotations + properties + application > left) return false;
    const uint8_t *at = record + RECORD_HEADER_BYTES + annotations;
    sections->properties = (struct span){at, (size_t)properties};
    at += properties;
    sections->application_properties = (struct span){at, (size_t)application};
    at += application;
    sections->body = (struct span){at, (size_t)(record + size - at)};
    return true;
}

bool stored_content(struct span body, struct span *content) {
    const uint8_t *at = body.at, *end = at + body.bytes;
    if (body.bytes < 5 || at[0] != 0 || at[1] != 0x53 || (at[2] != DATA && at[2] != AMQP_VALUE)) return false;
    bool is_value = at[2] == AMQP_VALUE;
    at += 3;
    if (!take_bytes_of(&at, end, BINARY_8, BINARY_32, content) &&
        !(is_value && take_bytes_of(&at, end, STRING_8, STRING_32, content) && is_utf8(content->at, content->bytes)))
        return false;
    return at == end;
}

bool stored_reply_to(struct span section, struct span *text) {
    struct properties properties;
    if (!properties_read(section.at, section.bytes, &properties)) return false;
    *text = (struct span){NULL, 0};
    if (properties.count <= REPLY_TO) return true;
    const uint8_t *at = section.at + properties.at[REPLY_TO];
    return *at == NULL_VALUE || take_text(&at, section.at + properties.at[REPLY_TO + 1], text);
}

bool pairs_begin(struct span section, struct pairs *pairs) {
    pairs->count = pairs->left = 0;
    pairs->at = pairs->end = section.at;
    if (!section.bytes) return true;
    const uint8_t *at = section.at;
    uint32_t values;
    size_t bytes;
    if (section.bytes < 6 || at[0] != 0 || at[1] != 0x53 || at[2] != 0x74) return false;
    if (at[3] == MAP_8) {
        bytes = 5 + (size_t)at[4];
        values = at[5];
        pairs->at = at + 6;
    } else if (at[3] == MAP_32 && section.bytes >= 12) {
        bytes = 8 + (size_t)read_u32(at + 4);
        values = read_u32(at + 8);
        pairs->at = at + 12;
    } else {
        return false;
    }
    pairs->end = at + section.bytes;
    pairs->left = values / 2;
    return bytes == section.bytes && !(values & 1) && (values || pairs->at == pairs->end) &&
           pairs->left <= sizeof pairs->keys / sizeof *pairs->keys;
}

// The decimal digits of a number, in `pairs`.
static struct span number(struct pairs *pairs, uint64_t size, bool is_negative) {
    uint8_t *end = pairs->digits + MAX_DIGITS, *at = end;
    do *--at = (uint8_t)('0' + size % 10);
    while (size /= 10);
    if (is_negative) *--at = '-';
    return (struct span){at, (size_t)(end - at)};
}

static struct span signed_number(struct pairs *pairs, int64_t value) {
    return number(pairs, value < 0 ? -(uint64_t)value : (uint64_t)value, value < 0);
}

static struct span truth(bool value) {
    return value ? (struct span){(const uint8_t *)"true", 4} : (struct span){(const uint8_t *)"false", 5};
}

// A value that is neither text nor null. `fixed` are its bytes behind the constructor.
static bool take_fixed(struct pairs *pairs, uint8_t constructor, const uint8_t *fixed, struct span *value) {
    switch (constructor) {
    case TRUE_VALUE: case FALSE_VALUE: *value = truth(constructor == TRUE_VALUE); return true;
    case 0x56: *value = truth(*fixed); return *fixed < 2;                              // boolean
    case UINT_0: case 0x44: *value = number(pairs, 0, false); return true;             // 0x44: ulong 0
    case UBYTE: case SMALL_UINT: case 0x53: *value = number(pairs, *fixed, false); return true; // 0x53: ulong
    case 0x51: case 0x54: case 0x55: *value = signed_number(pairs, (int8_t)*fixed); return true; // byte, int, long
    case 0x60: *value = number(pairs, read_u16(fixed), false); return true;            // ushort
    case 0x61: *value = signed_number(pairs, (int16_t)read_u16(fixed)); return true;   // short
    case UINT: *value = number(pairs, read_u32(fixed), false); return true;
    case 0x71: *value = signed_number(pairs, (int32_t)read_u32(fixed)); return true;   // int
    case 0x80: *value = number(pairs, read_u64(fixed), false); return true;            // ulong
    case 0x81: case 0x83: *value = signed_number(pairs, (int64_t)read_u64(fixed)); return true; // long, timestamp
    default: return false;
    }
}

static size_t fixed_bytes(uint8_t constructor) {
    switch (constructor >> 4) {
    case 0x4: return 0;
    case 0x5: return 1;
    case 0x6: return 2;
    case 0x7: return 4;
    default: return 8;
    }
}

bool pairs_next(struct pairs *pairs, struct span *key, struct span *value) {
    if (!take_text(&pairs->at, pairs->end, key) || pairs->at == pairs->end) return false;
    for (uint32_t other = 0; other < pairs->count; other++)
        if (pairs->keys[other].bytes == key->bytes && !memcmp(pairs->keys[other].at, key->at, key->bytes)) return false;
    pairs->keys[pairs->count++] = *key;
    uint8_t constructor = *pairs->at;
    if (constructor == NULL_VALUE) {
        *value = (struct span){NULL, 0};
        pairs->at++;
    } else if (!take_text(&pairs->at, pairs->end, value)) {
        size_t bytes = fixed_bytes(constructor);
        if ((size_t)(pairs->end - pairs->at) < 1 + bytes || !take_fixed(pairs, constructor, pairs->at + 1, value)) return false;
        pairs->at += 1 + bytes;
    }
    return --pairs->left || pairs->at == pairs->end;
}
