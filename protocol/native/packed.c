#include "packed.h"

#include "bytes.h"

// `size` bytes, which it moves behind; NULL if they are not there.
static const uint8_t *take(struct packed *packed, size_t size) {
    if ((size_t)(packed->end - packed->at) < size) return NULL;
    const uint8_t *at = packed->at;
    packed->at += size;
    return at;
}

// An unsigned number of so many bytes.
static bool take_number(struct packed *packed, size_t bytes, uint64_t *value) {
    const uint8_t *at = take(packed, bytes);
    if (!at) return false;
    *value = bytes == 1 ? *at : bytes == 2 ? read_u16(at) : bytes == 4 ? read_u32(at) : read_u64(at);
    return true;
}

static bool take_count(struct packed *packed, size_t bytes, size_t *count) {
    uint64_t value;
    if (!take_number(packed, bytes, &value)) return false;
    *count = (size_t)value;
    return true;
}

bool packed_array(struct packed *packed, size_t *count) {
    const uint8_t *first = take(packed, 1);
    if (!first) return false;
    if (*first >> 4 == 9) {
        *count = *first & 15;
        return true;
    }
    return (*first == 0xDC && take_count(packed, 2, count)) || (*first == 0xDD && take_count(packed, 4, count));
}

bool packed_number(struct packed *packed, uint64_t *value) {
    const uint8_t *first = take(packed, 1);
    if (!first) return false;
    if (*first < 0x80) {
        *value = *first;
        return true;
    }
    return *first >= 0xCC && *first <= 0xCF && take_number(packed, (size_t)1 << (*first - 0xCC), value);
}

bool packed_bytes(struct packed *packed, const uint8_t **bytes, size_t *size) {
    const uint8_t *first = take(packed, 1);
    if (!first || *first < 0xC4 || *first > 0xC6) return false;
    if (!take_count(packed, (size_t)1 << (*first - 0xC4), size)) return false;
    *bytes = take(packed, *size);
    return *bytes != NULL;
}

bool packed_skip(struct packed *packed) {
    // Values that are still to be skipped: an array or a map adds those in it. None of them is shorter than a byte, so
    // that more than there are bytes cannot be whole.
    for (uint64_t left = 1; left; left--) {
        const uint8_t *first = take(packed, 1);
        if (!first || left > (uint64_t)(packed->end - packed->at) + 1) return false;
        size_t count = 0, bytes = 0;
        uint8_t kind = *first;
        bool whole = true;
        if (kind < 0x80 || kind >= 0xE0) {
            continue; // a small number
        } else if (kind < 0x90) {
            left += 2 * (uint64_t)(kind & 15);
        } else if (kind < 0xA0) {
            left += kind & 15;
        } else if (kind < 0xC0) {
            bytes = kind & 31;
        } else if (kind == 0xC0 || kind == 0xC2 || kind == 0xC3) {
            continue; // nil, false, true
        } else if (kind >= 0xC4 && kind <= 0xC6) {
            whole = take_count(packed, (size_t)1 << (kind - 0xC4), &bytes);
        } else if (kind == 0xCA || kind == 0xCB) {
            bytes = (size_t)4 << (kind - 0xCA);
        } else if (kind >= 0xCC && kind <= 0xD3) {
            bytes = (size_t)1 << ((kind - 0xCC) & 3);
        } else if (kind >= 0xD9 && kind <= 0xDB) {
            whole = take_count(packed, (size_t)1 << (kind - 0xD9), &bytes);
        } else if (kind >= 0xDC) {
            whole = take_count(packed, kind & 1 ? 4 : 2, &count);
            left += kind < 0xDE ? count : 2 * (uint64_t)count;
        } else {
            return false; // an extension, or nothing that msgpack has
        }
        if (!whole || !take(packed, bytes)) return false;
    }
    return true;
}
