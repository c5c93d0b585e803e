// The types of the extension, which only it makes use of; `protocol/_native.pyi` says what Python can do with them.
#ifndef PEEKLOCK_MODULE_H
#define PEEKLOCK_MODULE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 // 3.11
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "frames.h"
#include "memory.h"
#include "records.h"
#include "runs.h"
#include "writer.h"

// A delivery that waits for the broker's outcome. `delivery` is NULL if the peer has settled it.
struct pending {
    void *delivery;
    uint64_t outcome; // as numbered by `broker.wire.Outcome`; 0 on an incoming link
};

// The transaction of what has gathered, if it is in one.
struct transaction {
    bool is_one;
    uint8_t id[TRANSACTION_BYTES];
};

// True if it is the transaction with this id, or none if `id` is NULL.
bool transaction_is(const struct transaction *transaction, const uint8_t *id);
void transaction_set(struct transaction *transaction, const uint8_t *id);
PyObject *transaction_id(const struct transaction *transaction); // a new reference; None without a transaction

// Deliveries that come in on a link, from a client that sends.
typedef struct {
    PyObject_HEAD
    void *link;
    PyObject *owner; // takes what is unusual, and is told that messages have gathered
    uint64_t max_message_bytes;
    bool gives_ids, needs_id, takes_sessions, needs_session, takes_transactions; // see `protocol/_native.pyi`
    bool may_be_unfinished; // Python has taken a transfer, whose delivery may go on
    PyObject *large;        // a message that has gathered before those in `run`, as a run; NULL if there is none
    struct buffer run;      // messages that have gathered
    size_t count;           // of them
    size_t message_bytes;   // of them, as they came
    struct transaction transaction; // of them
    struct ring pending;
    bool has_begun;      // there is a delivery of several transfers that is not complete
    struct buffer parts; // of it
} Incoming;

// Consecutive messages of one run, which are given to proton and not written yet.
struct part {
    PyObject *run;
    const uint8_t *bytes; // of the run
    size_t at; // of the next record in the run
    size_t left;
    PyObject *numbers; // sequence numbers of 8 bytes each; NULL if they are consecutive
    size_t number_at;  // of the next one
    uint8_t token[16]; // of the next delivery
    size_t frame_bytes; // of a message that a frame with further ones behind it has
    struct delivery delivery;
};

// A message that takes several frames, of which some are written.
struct large {
    struct buffer head; // what is not as in the record; empty between messages
    const uint8_t *rest;
    size_t rest_bytes;
    size_t at; // of the next byte
};

// Tokens that follow one another.
struct tokens {
    uint8_t first[16];
    uint32_t count;
};

// Outcomes that wait for the answers of one partition, in order.
struct line {
    uint32_t partition; // 0 if all are in one line
    struct ring pending;
};

// Deliveries that go out on a link, to a client that receives.
typedef struct {
    PyObject_HEAD
    void *link;
    PyObject *owner;
    bool settled;     // messages are deleted when they are sent
    struct map sent;  // deliveries that wait for the peer's outcome: address, order of sending
    uint64_t sent_count;
    struct ring parts;
    size_t queued_bytes; // of the messages in `parts`
    struct large large;  // the one of them whose frames are being written, if it needs several
    struct buffer accepted; // struct tokens: accepted deliveries that have gathered
    size_t count;        // of them
    bool is_quiet;       // the peer has settled these, so that it gets no answer
    struct transaction transaction; // of these
    struct buffer transacted;       // if they are in one, addresses of those that wait for an answer
    bool by_partition;   // outcomes of each partition wait in a line of their own
    enum keys keys;      // of the entity
    bool is_copy;        // the entity is a subscription
    struct buffer lines; // struct line
} Outgoing;

extern PyObject *incoming_type, *outgoing_type; // set when the module is made, like these:
extern PyType_Spec incoming_spec, outgoing_spec, pump_spec;

extern uint8_t message_id_prefix[18];

#define KEPT_BUFFER_BYTES (128 << 10) // of an Incoming; a larger one is freed when it is empty

// Append an ordinary message that came in on the link: 1 if it was taken, 0 if it is unusual, -1 with an exception.
// `transaction` is the id of its transaction, or NULL.
int incoming_take(Incoming *incoming, void *delivery, const uint8_t *message, size_t size, bool settled,
                  const uint8_t *transaction);

// Free the memory of a link whose connection has ended. It has nothing any more.
void incoming_free(Incoming *incoming);
void outgoing_free(Outgoing *outgoing);

// Functions of the module.
PyObject *accept_all(PyObject *module, PyObject *addresses);
PyObject *settle_all(PyObject *module, PyObject *arguments);

// Note an accepted outcome: -1 with an exception. `transaction` is the id of its transaction, or NULL.
int outgoing_accepted(Outgoing *outgoing, void *delivery, bool settled, const uint8_t *transaction);

// True if the delivery with this tag is the next one in `parts`.
bool outgoing_is_next(Outgoing *outgoing, const uint8_t *tag, size_t tag_bytes);
// Write the message of the next delivery, or what a frame of it has if `more` frames follow. Returns the size, 0 if there
// is no memory. `to` has room for `outgoing_most_bytes`.
size_t outgoing_write(Outgoing *outgoing, bool more, uint8_t *to);

// What `outgoing_write` writes is no larger, if there is a next delivery.
size_t outgoing_most_bytes(const Outgoing *outgoing);

// Send messages of a run: (outgoing, run, at, count, token, numbers, delivery_count, locked_until_ms)
//   -> where the messages end in the run, when the first was enqueued | None, if they are not usual
PyObject *outgoing_deliver(Outgoing *outgoing, struct writer *writer, PyObject *arguments);

static inline void *pointer_of(unsigned long long address) { return (void *)(uintptr_t)address; }
static inline unsigned long long address_of(const void *pointer) { return (unsigned long long)(uintptr_t)pointer; }

#endif
