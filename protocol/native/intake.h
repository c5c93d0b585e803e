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
    uint32_t ttl_ms;          // 0 if the message has none
    bool has_id, has_session; // the message came with a message-id, and a group-id
};

// True if `take_apart` of the Python module would take the message without an error and without anything in its extra
// map; then `intake` has its result. False says nothing about the message: the caller
// lets the Python module look at it. With `new_id`, a message without a message-id gets one. `sessions`: a group-id is
// usual, which the Python module has in the extra map.
bool intake_take(const uint8_t *message, size_t size, bool new_id, bool sessions, struct intake *intake);

enum { MESSAGE_ID = 0, EXPIRY_TIME = 8, CREATION_TIME = 9, GROUP_ID = 10, PROPERTIES = 13 };

// The fields of a properties section: field i goes from at[i] to at[i + 1].
struct properties {
    uint32_t count;
    size_t at[PROPERTIES + 1];
};

// False if the section, whose size this is, has a field that is not short. A message without the section has size 0.
bool properties_read(const uint8_t *section, size_t size, struct properties *properties);

// The bytes of a short text, or of a value of fixed width, with its constructor; 0 if there is no such value whole.
size_t short_value_bytes(const uint8_t *value, size_t size);

// The text of a field of the section; NULL if it is not a short string.
const uint8_t *property_text(const uint8_t *section, size_t size, unsigned int field, size_t *text_bytes);

// Write what is stored, `stored_bytes` in all. `message_id` is that for a message that gets one.
void intake_store(const struct intake *intake, const uint8_t *message, size_t size, const uint8_t *message_id,
                  uint8_t *to);

#endif
