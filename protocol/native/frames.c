#include "frames.h"

#include "constructors.h"

enum { FRAME_HEAD_BYTES = 8, PERFORMATIVE_AT = 11, TRANSFER = 0x14, DISPOSITION = 0x15 };
enum { SHORT_DISPOSITION_BYTES = 40, MAX_TAG_BYTES = 32 };
enum { TRANSACTIONAL = 0x34, ACCEPTED = 0x24 };

// True if the frame is an AMQP frame without an extended header, with the performative of this code in a small ulong.
static bool is_usual(const uint8_t *frame, uint8_t code) {
    return frame[4] == 2 && frame[5] == 0 && frame[8] == 0 && frame[9] == 0x53 && frame[10] == code;
}

static bool read_uint(const uint8_t *frame, size_t *at, size_t end, uint32_t *value) {
    if (*at >= end) return false;
    switch (frame[(*at)++]) {
    case UINT_0:
        *value = 0;
        return true;
    case SMALL_UINT:
        if (end - *at < 1) return false;
        *value = frame[(*at)++];
        return true;
    case UINT:
        if (end - *at < 4) return false;
        *value = read_u32(frame + *at);
        *at += 4;
        return true;
    default: return false;
    }
}

// Read the head of a list: it ends at `*stop`, and has `*count` items from `*at` on.
static bool read_list(const uint8_t *bytes, size_t *at, size_t end, size_t *stop, uint32_t *count) {
    size_t left = end - *at, length;
    if (left >= 3 && bytes[*at] == LIST_8) {
        length = bytes[*at + 1];
        *count = bytes[*at + 2];
        *stop = *at + 2 + length;
        *at += 3;
    } else if (left >= 9 && bytes[*at] == LIST_32) {
        length = read_u32(bytes + *at + 1);
        *count = read_u32(bytes + *at + 5);
        if (length > left) return false;
        *stop = *at + 5 + length;
        *at += 9;
    } else {
        return false;
    }
    return *at <= *stop && *stop <= end;
}

// The fields of a transactional-state, from `*at` on: see `transaction_read`.
static bool read_transaction(const uint8_t *bytes, size_t *at, size_t end, bool accepted, const uint8_t **transaction) {
    static const uint8_t ID[] = {BINARY_8, TRANSACTION_BYTES}, OUTCOME[] = {0, 0x53, ACCEPTED};
    size_t stop, empty_stop;
    uint32_t count, empty_count;
    if (!read_list(bytes, at, end, &stop, &count)) return false;
    if (stop - *at < sizeof ID + TRANSACTION_BYTES || memcmp(bytes + *at, ID, sizeof ID)) return false;
    *transaction = bytes + *at + sizeof ID;
    *at += sizeof ID + TRANSACTION_BYTES;
    if (accepted) {
        if (count != 2 || stop - *at < sizeof OUTCOME + 1 || memcmp(bytes + *at, OUTCOME, sizeof OUTCOME)) return false;
        *at += sizeof OUTCOME;
        if (bytes[*at] == LIST_0) ++*at;
        else if (!read_list(bytes, at, stop, &empty_stop, &empty_count) || empty_count || empty_stop != *at) return false;
    } else if (count == 2) {
        if (*at >= stop || bytes[(*at)++] != NULL_VALUE) return false;
    } else if (count != 1) {
        return false;
    }
    return *at == stop;
}

bool transaction_read(const uint8_t *fields, size_t size, bool accepted, const uint8_t **transaction) {
    size_t at = 0;
    return read_transaction(fields, &at, size, accepted, transaction) && at == size;
}

// As `read_transaction`, of a transactional-state with its descriptor.
static bool read_state(const uint8_t *frame, size_t *at, size_t end, bool accepted, const uint8_t **transaction) {
    static const uint8_t DESCRIPTOR[] = {0, 0x53, TRANSACTIONAL};
    if (end - *at < sizeof DESCRIPTOR || memcmp(frame + *at, DESCRIPTOR, sizeof DESCRIPTOR)) return false;
    *at += sizeof DESCRIPTOR;
    return read_transaction(frame, at, end, accepted, transaction);
}

bool transfer_read(const uint8_t *frame, size_t size, struct transfer *transfer) {
    if (size < PERFORMATIVE_AT + 3 || !is_usual(frame, TRANSFER) || frame[PERFORMATIVE_AT] != LIST_8) return false;
    transfer->size = read_u32(frame);
    transfer->channel = read_u16(frame + 6);
    size_t end = PERFORMATIVE_AT + 2 + frame[PERFORMATIVE_AT + 1], at = PERFORMATIVE_AT + 3;
    uint8_t count = frame[PERFORMATIVE_AT + 2];
    if (end > size || end > transfer->size || count < 1 || count > 11) return false;
    if (!read_uint(frame, &at, end, &transfer->handle)) return false;
    transfer->has_id = transfer->settled = transfer->more = false;
    transfer->tag = transfer->transaction = NULL;
    transfer->tag_bytes = 0;
    for (uint8_t index = 1; index < count; index++) {
        if (at >= end) return false;
        uint8_t constructor = frame[at];
        if (constructor == NULL_VALUE) {
            at++;
            continue;
        }
        uint32_t format;
        switch (index) {
        case 1: // delivery-id
            if (!read_uint(frame, &at, end, &transfer->delivery_id)) return false;
            transfer->has_id = true;
            continue;
        case 2: // delivery-tag
            if (constructor != BINARY_8 || end - at < 2) return false;
            transfer->tag_bytes = frame[at + 1];
            at += 2;
            if (transfer->tag_bytes > MAX_TAG_BYTES || end - at < transfer->tag_bytes) return false;
            transfer->tag = frame + at;
            at += transfer->tag_bytes;
            continue;
        case 3: // message-format
            if (!read_uint(frame, &at, end, &format) || format != 0) return false;
            continue;
        case 6: // rcv-settle-mode
            if (constructor != UBYTE || end - at < 2) return false;
            at += 2;
            continue;
        case 7: // state
            if (!read_state(frame, &at, end, false, &transfer->transaction)) return false;
            continue;
        default:
            if (constructor != TRUE_VALUE && constructor != FALSE_VALUE) return false;
            at++;
        }
        bool is_true = constructor == TRUE_VALUE;
        if (index == 4) transfer->settled = is_true;
        else if (index == 5) transfer->more = is_true;
        else if (index != 10 && is_true) return false; // resume, aborted; batchable says nothing
    }
    transfer->payload_at = end;
    return at == end;
}

bool transfer_link(const uint8_t *frame, size_t size, uint16_t *channel, uint32_t *handle) {
    if (size < PERFORMATIVE_AT + 1 || !is_usual(frame, TRANSFER)) return false;
    size_t at = PERFORMATIVE_AT + (frame[PERFORMATIVE_AT] == LIST_8 ? 3 : 9);
    *channel = read_u16(frame + 6);
    return read_uint(frame, &at, size, handle);
}

// Read the first two numbers of a disposition from `*at` on. False if it is for more than `few` deliveries.
static bool read_few(const uint8_t *frame, size_t *at, size_t end, uint64_t few) {
    uint32_t first, last;
    if (!read_uint(frame, at, end, &first)) return false;
    if (*at >= end) return true;
    if (frame[*at] == NULL_VALUE) {
        ++*at;
        return true;
    }
    return read_uint(frame, at, end, &last) && last - first < few;
}

// True if the frame is a disposition of a receiver that accepts a few deliveries in a transaction.
static bool accepts_in_transaction(const uint8_t *frame, size_t size, uint64_t few) {
    if (size < PERFORMATIVE_AT + 3 || frame[PERFORMATIVE_AT] != LIST_8) return false;
    size_t at = PERFORMATIVE_AT + 3, end = PERFORMATIVE_AT + 2 + frame[PERFORMATIVE_AT + 1];
    uint8_t count = frame[PERFORMATIVE_AT + 2];
    const uint8_t *transaction;
    if (end != size || count < 5 || count > 6 || frame[at++] != TRUE_VALUE || !read_few(frame, &at, end, few)) return false;
    if (at >= end || (frame[at] != TRUE_VALUE && frame[at] != FALSE_VALUE)) return false;
    at++;
    if (!read_state(frame, &at, end, true, &transaction)) return false;
    if (count == 6) { // batchable
        if (at >= end || (frame[at] != TRUE_VALUE && frame[at] != FALSE_VALUE)) return false;
        at++;
    }
    return at == end;
}

// True if the frame is a disposition that need not be read: see `_SHORT_DISPOSITION` in
// `protocol.engine.proton.incoming`.
static bool is_usual_disposition(const uint8_t *frame, size_t size, uint64_t few) {
    if (size < 16 || !is_usual(frame, DISPOSITION)) return false;
    if (size > SHORT_DISPOSITION_BYTES) return accepts_in_transaction(frame, size, few);
    size_t at = 15;
    return frame[14] == TRUE_VALUE && read_few(frame, &at, size, few);
}

size_t frames_walk(const uint8_t *data, size_t at, size_t end, size_t largest, const struct form *form,
                   bool dispositions, uint64_t *next_id) {
    size_t id_at = 4 + form->head_bytes, tag_at = id_at + form->id_bytes;
    size_t rest_at = tag_at + 2 + form->tag_head[1], least = rest_at + form->rest_bytes;
    uint64_t few = form->few_deliveries ? form->few_deliveries : UINT64_MAX;
    while (end - at >= FRAME_HEAD_BYTES + 4) {
        const uint8_t *frame = data + at;
        size_t size = read_u32(frame);
        if (size > end - at || size > largest || size < FRAME_HEAD_BYTES + 4) break;
        if (size >= least && !memcmp(frame + 4, form->head, form->head_bytes)) {
            uint64_t id = form->id_bytes == 1 ? frame[id_at] : read_u32(frame + id_at);
            if (id != *next_id || memcmp(frame + tag_at, form->tag_head, 2)) break;
            if (memcmp(frame + rest_at, form->rest, form->rest_bytes)) break;
            *next_id = id + 1;
        } else if (!dispositions || !is_usual_disposition(frame, size, few)) {
            break;
        }
        at += size;
    }
    return at;
}
