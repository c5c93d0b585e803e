// Takes an encoded message apart, as `protocol.message.intake` does, if it is a usual one.
#ifndef PEEKLOCK_INTAKE_H
#define PEEKLOCK_INTAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LAYOUT_BYTES 16
#define MESSAGE_ID_BYTES 34 // an encoded string of 32 hex digits: see `broker.gateway.message_ids`
#define PROPERTIES_HEAD_BYTES 12

// What is stored of a message is message[stored_at:properties_at], then a new properties section up to its message-id
// and the id, if it gets one, then message[rest_at:].
struct intake {
    uint8_t layout[LAYOUT_BYTES]; // see `protocol.message.layout`
    size_t stored_at;
    size_t properties_at;
    size_t rest_at;
    uint8_t properties_head[PROPERTIES_HEAD_BYTES];
    size_t properties_head_bytes; // 0 if the message gets no message-id
    size_t stored_bytes;
    bool has_id; // the message came with a message-id
};

// True if `take_apart` of the Python module would take the message without an error, without a time to live and
// without anything in its extra map; then `intake` has its result. False says nothing about the message: the caller
// lets the Python module look at it. With `new_id`, a message without a message-id gets one.
bool intake_take(const uint8_t *message, size_t size, bool new_id, struct intake *intake);

// Write what is stored, `stored_bytes` in all. `message_id` is that for a message that gets one.
void intake_store(const struct intake *intake, const uint8_t *message, size_t size, const uint8_t *message_id,
                  uint8_t *to);

#endif
