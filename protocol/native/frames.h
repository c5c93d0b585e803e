// Frames of a connection: recognizes the usual ones.
#ifndef PEEKLOCK_FRAMES_H
#define PEEKLOCK_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "bytes.h"

enum { TRANSACTION_BYTES = 16 }; // of the ids of transactions that the broker gives

// The bytes of the frame that begins there, of which four are here; or of the header of the protocol.
static inline size_t size_of_frame(const uint8_t *frame) { return memcmp(frame, "AMQP", 4) ? read_u32(frame) : 8; }

// A transfer of a delivery of message format 0, without a state or in a transaction (AMQP 1.0, 2.7.5, 4.5.8).
struct transfer {
    size_t size; // of the frame
    uint16_t channel;
    uint32_t handle;
    bool has_id;
    uint32_t delivery_id;
    const uint8_t *tag; // NULL without one
    size_t tag_bytes;
    bool settled;
    bool more; // further transfers of the delivery follow
    const uint8_t *transaction; // its id; NULL without a state
    size_t payload_at;          // in the frame
};

// True if a delivery begins with this transfer, unless its link has an unfinished one.
static inline bool transfer_begins(const struct transfer *transfer) { return transfer->has_id && transfer->tag; }

// Read the transfer whose frame begins at `frame` and of which `size` bytes are here. False if it is not usual, or not
// here up to its payload.
bool transfer_read(const uint8_t *frame, size_t size, struct transfer *transfer);

// The channel and handle of any transfer; false if they are not here, or it is of an unusual encoding.
bool transfer_link(const uint8_t *frame, size_t size, uint16_t *channel, uint32_t *handle);

// The id of a transaction in the fields of a transactional-state (4.5.8), with the outcome accepted or without one. False
// if it is no id of the broker's, or the encoding is unusual.
bool transaction_read(const uint8_t *fields, size_t size, bool accepted, const uint8_t **transaction);

// The form of transfers that differ only in delivery-id and tag: see `_UsualTransfer` in
// `protocol.engine.proton.incoming`.
struct form {
    const uint8_t *head; // the bytes of the frame from its fifth one up to the delivery-id
    size_t head_bytes;
    size_t id_bytes; // 1 or 4
    uint8_t tag_head[2];
    const uint8_t *rest; // the bytes of the performative behind the tag
    size_t rest_bytes;
    uint32_t few_deliveries; // the most that a usual disposition is for; 0 is any number
};

// The offset behind the frames from `at` on that are transfers of this form, with consecutive delivery-ids from
// `*next_id` on, or usual dispositions of a receiver if `dispositions`: for few deliveries, and short or accepted in a
// transaction. All of them end before `end`, and none has more than `largest` bytes. `*next_id` becomes the id behind the
// last one, which may be 2^32.
size_t frames_walk(const uint8_t *data, size_t at, size_t end, size_t largest, const struct form *form,
                   bool dispositions, uint64_t *next_id);

#endif
