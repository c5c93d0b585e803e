#include "frames.h"

#include "bytes.h"
#include "constructors.h"

enum { FRAME_HEAD_BYTES = 8, PERFORMATIVE_AT = 11, TRANSFER = 0x14, DISPOSITION = 0x15 };
enum { SHORT_DISPOSITION_BYTES = 40, MAX_TAG_BYTES = 32 };

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

bool transfer_read(const uint8_t *frame, size_t size, struct transfer *transfer) {
    if (size < PERFORMATIVE_AT + 3 || !is_usual(frame, TRANSFER) || frame[PERFORMATIVE_AT] != LIST_8) return false;
    transfer->size = read_u32(frame);
    transfer->channel = read_u16(frame + 6);
    size_t end = PERFORMATIVE_AT + 2 + frame[PERFORMATIVE_AT + 1], at = PERFORMATIVE_AT + 3;
    uint8_t count = frame[PERFORMATIVE_AT + 2];
    if (end > size || end > transfer->size || count < 3 || count > 11) return false;
    if (!read_uint(frame, &at, end, &transfer->handle) || !read_uint(frame, &at, end, &transfer->delivery_id)) return false;
    if (end - at < 2 || frame[at] != BINARY_8) return false;
    transfer->tag_bytes = frame[at + 1];
    at += 2;
    if (transfer->tag_bytes > MAX_TAG_BYTES || end - at < transfer->tag_bytes) return false;
    transfer->tag = frame + at;
    at += transfer->tag_bytes;
    transfer->settled = false;
    for (uint8_t index = 3; index < count; index++) {
        if (at >= end) return false;
        uint8_t constructor = frame[at];
        if (index == 3 && constructor != NULL_VALUE) { // message-format
            uint32_t format;
            if (!read_uint(frame, &at, end, &format) || format != 0) return false;
            continue;
        }
        at++;
        if (constructor == NULL_VALUE) continue;
        switch (index) {
        case 4: // settled
            if (constructor != TRUE_VALUE && constructor != FALSE_VALUE) return false;
            transfer->settled = constructor == TRUE_VALUE;
            break;
        case 6: // rcv-settle-mode
            if (constructor != UBYTE || at >= end) return false;
            at++;
            break;
        case 7: // state
            return false;
        case 10: // batchable
            if (constructor != TRUE_VALUE && constructor != FALSE_VALUE) return false;
            break;
        default: // more, resume, aborted
            if (constructor != FALSE_VALUE) return false;
        }
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

size_t frames_walk(const uint8_t *data, size_t at, size_t end, size_t largest, const struct form *form,
                   bool dispositions, uint64_t *next_id) {
    size_t id_at = 4 + form->head_bytes, tag_at = id_at + form->id_bytes;
    size_t rest_at = tag_at + 2 + form->tag_head[1], least = rest_at + form->rest_bytes;
    while (end - at >= FRAME_HEAD_BYTES + 4) {
        const uint8_t *frame = data + at;
        size_t size = read_u32(frame);
        if (size > end - at || size > largest || size < FRAME_HEAD_BYTES + 4) break;
        if (size >= least && !memcmp(frame + 4, form->head, form->head_bytes)) {
            uint64_t id = form->id_bytes == 1 ? frame[id_at] : read_u32(frame + id_at);
            if (id != *next_id || memcmp(frame + tag_at, form->tag_head, 2)) break;
            if (memcmp(frame + rest_at, form->rest, form->rest_bytes)) break;
            *next_id = id + 1;
        } else if (dispositions && size >= 16 && size <= SHORT_DISPOSITION_BYTES && is_usual(frame, DISPOSITION)) {
            uint8_t first = frame[15];
            if (frame[14] != TRUE_VALUE || (first != UINT_0 && first != SMALL_UINT && first != UINT)) break;
        } else {
            break;
        }
        at += size;
    }
    return at;
}
