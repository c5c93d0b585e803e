#include "intake.h"

#include "bytes.h"
#include "constructors.h"

enum {
    HEADER = 0x70,
    MESSAGE_ANNOTATIONS = 0x72,
    PROPERTIES_CODE = 0x73,
    APPLICATION_PROPERTIES = 0x74,
    DATA = 0x75,
    AMQP_VALUE = 0x77,
};
enum { DURABLE = 1, HAS_PRIORITY = 2 };

#define MAX_HEADER_BYTES (64 * 1024) // all sections but the body
#define MAX_PAIRS 32                 // each key is compared with all others
#define MAX_ID_BYTES 128
#define PING_BYTES 34 // of the content type by which a ping is known

static bool is_ascii(const uint8_t *text, size_t size) {
    uint64_t word, seen = 0;
    for (; size >= 8; text += 8, size -= 8) {
        memcpy(&word, text, 8);
        seen |= word;
    }
    for (; size; text++, size--) seen |= *text;
    return !(seen & 0x8080808080808080u);
}

// Bytes of a value of fixed width with its constructor; 0 for other constructors.
static size_t fixed_width(uint8_t constructor) {
    switch (constructor) {
    case 0x40: case 0x41: case 0x42: case 0x43: case 0x44: return 1;
    case 0x50: case 0x51: case 0x52: case 0x53: case 0x54: case 0x55: return 2;
    case 0x60: case 0x61: return 3;
    case 0x70: case 0x71: case 0x72: case 0x74: return 5;
    case 0x80: case 0x81: case 0x82: case 0x83: case 0x84: return 9;
    case 0x94: case 0x98: return 17;
    default: return 0;
    }
}

// A section: its descriptor is at `at`, its values from `values_at` to `end`; `count` of them.
struct section {
    size_t at;
    size_t values_at;
    size_t end;
    uint32_t count;
};

// True if a section with this code is at `at`. Its end may be behind the end of the message.
static bool is_section(const uint8_t *message, size_t size, size_t at, uint8_t code) {
    return size - at >= 4 && message[at] == 0 && message[at + 1] == 0x53 && message[at + 2] == code;
}

// Read where a list or map begins and ends. `small` and `large` are its constructors.
static bool read_section(const uint8_t *message, size_t size, size_t at, uint8_t small, uint8_t large,
                         struct section *section) {
    size_t length;
    section->at = at;
    uint8_t constructor = message[at + 3];
    if (constructor == LIST_0 && small == LIST_8) {
        section->values_at = section->end = at + 4;
        section->count = 0;
        return true;
    }
    if (constructor == small) {
        if (size - at < 6) return false;
        length = message[at + 4];
        section->values_at = at + 6;
        section->end = at + 5 + length;
        section->count = message[at + 5];
    } else if (constructor == large) {
        if (size - at < 12) return false;
        length = read_u32(message + at + 4);
        if (length > MAX_HEADER_BYTES) return false;
        section->values_at = at + 12;
        section->end = at + 8 + length;
        section->count = read_u32(message + at + 8);
    } else {
        return false;
    }
    return section->end <= size && section->values_at <= section->end;
}

static bool take_header(const uint8_t *message, const struct section *section, uint8_t *flags, uint8_t *priority,
                        uint32_t *ttl_ms) {
    size_t at = section->values_at, end = section->end;
    if (section->count > 5) return false;
    for (uint32_t index = 0; index < section->count; index++) {
        if (at >= end) return false;
        uint8_t constructor = message[at++];
        if (constructor == NULL_VALUE) continue;
        switch (index) {
        case 0: // durable
            if (constructor != TRUE_VALUE && constructor != FALSE_VALUE) return false;
            if (constructor == TRUE_VALUE) *flags |= DURABLE;
            break;
        case 1: // priority
            if (constructor != UBYTE || at >= end) return false;
            *flags |= HAS_PRIORITY;
            *priority = message[at++];
            break;
        case 2: // ttl: of none at all, and of the longest that fits, Python's code knows what they mean
            if (constructor == SMALL_UINT && at < end) *ttl_ms = message[at++];
            else if (constructor == UINT && end - at >= 4) *ttl_ms = read_u32(message + at), at += 4;
            else return false;
            if (!*ttl_ms || *ttl_ms == UINT32_MAX) return false;
            break;
        case 4: // delivery-count
            if (constructor == UINT_0) break;
            if (constructor == SMALL_UINT) at += 1;
            else if (constructor == UINT) at += 4;
            else return false;
            break;
        default: // first-acquirer, which is stored
            return false;
        }
    }
    return at == end;
}

// Take pairs of short keys and values of short text or of fixed width. Keys have the constructor `key`, and none of
// them begins with `reserved`.
static bool take_pairs(const uint8_t *message, const struct section *section, uint8_t key, const char *reserved) {
    size_t at = section->values_at, end = section->end, reserved_bytes = strlen(reserved);
    size_t key_at[MAX_PAIRS], key_bytes[MAX_PAIRS];
    if (section->count & 1 || section->count > 2 * MAX_PAIRS) return false;
    for (uint32_t pair = 0; pair < section->count / 2; pair++) {
        if (end - at < 2 || message[at] != key) return false;
        size_t bytes = message[at + 1];
        at += 2;
        if (end - at <= bytes || !is_ascii(message + at, bytes)) return false;
        if (reserved_bytes && bytes >= reserved_bytes && !memcmp(message + at, reserved, reserved_bytes)) return false;
        for (uint32_t other = 0; other < pair; other++)
            if (key_bytes[other] == bytes && !memcmp(message + key_at[other], message + at, bytes)) return false;
        key_at[pair] = at;
        key_bytes[pair] = bytes;
        at += bytes;
        if (message[at] == STRING_8) {
            if (end - at < 2) return false;
            bytes = message[at + 1];
            at += 2;
            if (end - at < bytes || !is_ascii(message + at, bytes)) return false;
            at += bytes;
        } else {
            size_t width = fixed_width(message[at]);
            if (!width || end - at < width) return false;
            at += width;
        }
    }
    return at == end;
}

// The kinds of values that a field of properties may have (3.2.4). The group-id is a session id.
enum { ID = 1, STRING = 2, SYMBOL = 4, TIME = 8, NUMBER = 16, BINARY = 32 };
static const uint8_t PROPERTY[PROPERTIES] = {ID, BINARY, STRING, STRING, STRING, ID, SYMBOL, SYMBOL, TIME, TIME, 0, NUMBER, STRING};
enum { CONTENT_TYPE = 6 };

static uint8_t kinds_of(uint8_t constructor) {
    switch (constructor) {
    case STRING_8: return ID | STRING | SYMBOL;
    case BINARY_8: return ID | BINARY;
    case SYMBOL_8: return SYMBOL;
    case 0x44: case 0x53: case 0x80: case 0x98: return ID;
    case 0x83: return TIME;
    case 0x43: case 0x52: case 0x70: return NUMBER;
    default: return 0;
    }
}

static bool take_properties(const uint8_t *message, const struct section *section, bool sessions, bool *has_session) {
    size_t at = section->values_at, end = section->end;
    if (section->count > sizeof PROPERTY) return false;
    for (uint32_t index = 0; index < section->count; index++) {
        if (at >= end) return false;
        uint8_t constructor = message[at];
        if (constructor == NULL_VALUE) {
            at++;
            continue;
        }
        bool is_session = sessions && index == GROUP_ID;
        if (!(kinds_of(constructor) & (is_session ? STRING : PROPERTY[index]))) return false;
        if (is_session) *has_session = true;
        size_t width = fixed_width(constructor);
        if (!width) {
            if (end - at < 2) return false;
            size_t bytes = message[at + 1];
            width = 2 + bytes;
            if (end - at < width) return false;
            if (constructor != BINARY_8 && !is_ascii(message + at + 2, bytes)) return false;
            if ((index == MESSAGE_ID || index == GROUP_ID) && bytes > MAX_ID_BYTES) return false;
            if (index == CONTENT_TYPE && bytes == PING_BYTES) return false;
        }
        if (end - at < width) return false;
        at += width;
    }
    return at == end;
}

// The offset behind the body at `at`: one section of data, or a value that is a binary or a string. 0 for others.
static size_t body_end(const uint8_t *message, size_t size, size_t at) {
    if (size - at < 5) return 0;
    bool is_value = is_section(message, size, at, AMQP_VALUE);
    if (!is_value && !is_section(message, size, at, DATA)) return 0;
    switch (message[at + 3]) {
    case STRING_8:
        if (!is_value) return 0;
        // fall through
    case BINARY_8: return at + 5 + message[at + 4];
    case STRING_32:
        if (!is_value) return 0;
        // fall through
    case BINARY_32: return size - at < 8 ? 0 : at + 8 + (size_t)read_u32(message + at + 4);
    default: return 0;
    }
}

size_t short_value_bytes(const uint8_t *value, size_t size) {
    if (!size) return 0;
    bool is_text = *value == BINARY_8 || *value == STRING_8 || *value == SYMBOL_8;
    if (is_text && size < 2) return 0;
    size_t width = is_text ? 2 + (size_t)value[1] : fixed_width(*value);
    return width > size ? 0 : width;
}

bool properties_read(const uint8_t *section, size_t size, struct properties *properties) {
    struct section list;
    properties->count = 0;
    properties->at[0] = 0;
    if (!size) return true;
    if (!is_section(section, size, 0, PROPERTIES_CODE)) return false;
    if (!read_section(section, size, 0, LIST_8, LIST_32, &list) || list.count > PROPERTIES) return false;
    size_t at = list.values_at;
    for (properties->count = 0; properties->count < list.count; properties->count++) {
        if (at >= list.end) return false;
        size_t width = short_value_bytes(section + at, list.end - at);
        if (!width) return false;
        properties->at[properties->count] = at;
        at += width;
    }
    properties->at[properties->count] = at;
    return at == list.end && at == size;
}

const uint8_t *property_text(const uint8_t *section, size_t size, unsigned int field, size_t *text_bytes) {
    struct properties properties;
    if (!properties_read(section, size, &properties) || properties.count <= field) return NULL;
    const uint8_t *value = section + properties.at[field];
    if (*value != STRING_8) return NULL;
    *text_bytes = value[1];
    return value + 2;
}

bool intake_take(const uint8_t *message, size_t size, bool new_id, bool sessions, struct intake *intake) {
    uint8_t flags = 0, priority = 0;
    uint32_t values = 0, pairs_bytes = 0, properties_bytes = 0, application_properties_bytes = 0;
    struct section section;
    size_t at = 0;
    intake->ttl_ms = 0;
    if (is_section(message, size, at, HEADER)) {
        if (!read_section(message, size, at, LIST_8, LIST_8, &section)) return false;
        if (!take_header(message, &section, &flags, &priority, &intake->ttl_ms)) return false;
        at = section.end;
    }
    intake->stored_at = at;
    intake->has_session = false;
    if (is_section(message, size, at, MESSAGE_ANNOTATIONS)) {
        if (!read_section(message, size, at, MAP_8, MAP_32, &section)) return false;
        if (!take_pairs(message, &section, SYMBOL_8, "x-opt-")) return false;
        intake->stored_at = section.values_at;
        values = section.count;
        pairs_bytes = (uint32_t)(section.end - section.values_at);
        at = section.end;
    }
    intake->properties_at = at;
    section.count = 0;
    section.values_at = section.end = at;
    if (is_section(message, size, at, PROPERTIES_CODE)) {
        if (!read_section(message, size, at, LIST_8, LIST_32, &section)) return false;
        if (!take_properties(message, &section, sessions, &intake->has_session)) return false;
        properties_bytes = (uint32_t)(section.end - at);
        at = section.end;
    }
    intake->properties_head_bytes = 0;
    intake->rest_at = intake->properties_at;
    intake->has_id = section.count && message[section.values_at] != NULL_VALUE;
    if (new_id && !intake->has_id) {
        // As `_with_message_id` of the Python module: the null in the place of the id is left out.
        size_t fields_at = section.count ? section.values_at + 1 : section.end;
        size_t length = MESSAGE_ID_BYTES + (section.end - fields_at);
        uint32_t count = section.count ? section.count : 1;
        uint8_t *head = write_bytes(intake->properties_head, "\x00\x53\x73", 3);
        if (length < 255) {
            *head++ = LIST_8;
            *head++ = (uint8_t)(1 + length);
            *head++ = (uint8_t)count;
        } else {
            *head++ = LIST_32;
            head = write_u32(head, (uint32_t)(4 + length));
            head = write_u32(head, count);
        }
        intake->properties_head_bytes = (size_t)(head - intake->properties_head);
        intake->rest_at = fields_at;
        properties_bytes = (uint32_t)(intake->properties_head_bytes + length);
    }
    if (is_section(message, size, at, APPLICATION_PROPERTIES)) {
        struct section pairs;
        if (!read_section(message, size, at, MAP_8, MAP_32, &pairs)) return false;
        if (!take_pairs(message, &pairs, STRING_8, "")) return false;
        application_properties_bytes = (uint32_t)(pairs.end - at);
        at = pairs.end;
    }
    if (at > MAX_HEADER_BYTES || body_end(message, size, at) != size) return false;
    intake->stored_bytes = intake->properties_at - intake->stored_at + size - intake->rest_at;
    if (intake->properties_head_bytes) intake->stored_bytes += intake->properties_head_bytes + MESSAGE_ID_BYTES;
    uint8_t *layout = intake->layout;
    *layout++ = flags;
    *layout++ = priority;
    layout = write_u16(layout, (uint16_t)values);
    layout = write_u32(layout, pairs_bytes);
    layout = write_u32(layout, properties_bytes);
    write_u32(layout, application_properties_bytes);
    return true;
}

void intake_store(const struct intake *intake, const uint8_t *message, size_t size, const uint8_t *message_id,
                  uint8_t *to) {
    to = write_bytes(to, message + intake->stored_at, intake->properties_at - intake->stored_at);
    if (intake->properties_head_bytes) {
        to = write_bytes(to, intake->properties_head, intake->properties_head_bytes);
        to = write_bytes(to, message_id, MESSAGE_ID_BYTES);
    }
    write_bytes(to, message + intake->rest_at, size - intake->rest_at);
}
