#include "frames.h"
#include "module.h"
#include "proton.h"

#include <stdlib.h>

#define STAGED_BYTES (16 << 10) // given to proton at once
#define PIECE_BYTES (1 << 20)   // of output that is larger: the C library keeps the memory of a piece when it is freed
#define KEPT_WRITTEN_BYTES (8 << 20) // of the buffer for output; a larger one is freed when it was copied
// A push stops when Python has been called so often, and looks after so many frames that Python takes.
#define CALLS_AT_ONCE 64
#define FRAMES_AT_ONCE 32
#define TRANSACTION_FIELDS_BYTES 64 // of a transactional-state with an outcome without fields, at most

// Moves frames between a connection's socket and proton. Of usual transfers proton gets and writes the performatives
// alone; payloads go from the peer's frames to an Incoming, and from an Outgoing to the frames for the peer.
typedef struct {
    PyObject_HEAD
    struct writer writer;
    PyObject *engine;
    struct map by_link;          // address of the link -> its Incoming or Outgoing
    struct map incoming_by_handle, outgoing_by_handle; // channel and handle, see `key_of` -> the same
    struct buffer partial;       // the begin of a transfer whose end has not come yet
    size_t passing;              // bytes still to come of a frame that goes to proton as it is
    struct buffer staged;        // for proton
    struct ring payloads;        // of the transfers in `staged`
    void *part_link;             // the link of the part that is given to proton now, if one is
    struct ring ended;           // Outgoings that were removed, and whose last transfers proton writes next
    size_t calls;                // of Python since the push began
    size_t piece_bytes;          // of output: see `copied_output`
} Pump;

struct payload {
    void *link;
    const uint8_t *bytes;
    size_t size;
    const uint8_t *transaction; // NULL without one
};

static uint64_t key_of(unsigned int channel, unsigned int handle) { return 1 + ((uint64_t)channel << 32 | handle); }

static PyObject *linked(const struct map *map, uint64_t key) {
    uint64_t *found = map_find(map, key);
    return found ? pointer_of(*found) : NULL;
}

// -- events

static int call_engine(Pump *pump) {
    pump->calls++;
    PyObject *result = PyObject_CallMethod(pump->engine, "on_event", NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

// Take the payload of a delivery that has come on the link. False if proton has it, or this is another event.
static bool take_payload(Pump *pump, void *link, void *delivery, struct payload *payload) {
    if (!pump->payloads.count || !proton.delivery_readable(delivery)) return false;
    *payload = *(struct payload *)ring_at(&pump->payloads, 0);
    if (payload->link != link) return false;
    ring_pop(&pump->payloads);
    return true;
}

static int told_unusual(Pump *pump, void *delivery, const uint8_t *message, size_t size, bool settled) {
    pump->calls++;
    PyObject *result = PyObject_CallMethod(pump->engine, "on_unusual", "Ky#O", address_of(delivery), message,
                                           (Py_ssize_t)size, settled ? Py_True : Py_False);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

// A part has come of the delivery that `incoming` has begun.
static int received_part(Pump *pump, Incoming *incoming, void *delivery) {
    if (proton.delivery_partial(delivery)) return 0;
    struct buffer parts = incoming->parts;
    incoming->parts = (struct buffer){0};
    incoming->has_begun = false;
    proton.link_advance(incoming->link);
    bool settled = proton.delivery_settled(delivery);
    const uint8_t *message = parts.size ? parts.bytes : (const uint8_t *)"";
    int taken = 0;
    if (!proton.delivery_remote_state(delivery)) // of a disposition that came meanwhile
        taken = incoming_take(incoming, delivery, message, parts.size, settled, NULL);
    if (taken == 0) taken = told_unusual(pump, delivery, message, parts.size, settled);
    PyObject *result = taken < 0 ? NULL : PyObject_CallMethod(pump->engine, "forget_parts", "n", (Py_ssize_t)parts.size);
    Py_XDECREF(result);
    if (incoming->has_begun || parts.capacity > KEPT_BUFFER_BYTES) buffer_free(&parts);
    parts.size = 0;
    if (parts.bytes) incoming->parts = parts;
    return result ? 0 : -1;
}

// `incoming` is NULL if it was removed after the transfer was staged, or never was there.
static int received(Pump *pump, Incoming *incoming, void *link, void *delivery) {
    struct payload payload;
    if (link == pump->part_link && incoming && incoming->has_begun && proton.delivery_readable(delivery))
        return received_part(pump, incoming, delivery);
    if (!take_payload(pump, link, delivery, &payload)) return call_engine(pump);
    proton.link_advance(link);
    bool settled = proton.delivery_settled(delivery); // by the transfer, or by a disposition behind it
    int taken = 0;
    if (incoming && (!payload.transaction || incoming->takes_transactions))
        taken = incoming_take(incoming, delivery, payload.bytes, payload.size, settled, payload.transaction);
    if (taken) return taken < 0 ? -1 : 0;
    return told_unusual(pump, delivery, payload.bytes, payload.size, settled);
}

// Copy the id of the transaction in which the peer has accepted the delivery; false if its state is another.
static bool accepted_in(void *delivery, uint8_t *transaction) {
    uint8_t fields[TRANSACTION_FIELDS_BYTES];
    const uint8_t *id;
    void *data = proton.disposition_data(proton.delivery_remote(delivery));
    ssize_t size = proton.data_encode(data, (char *)fields, sizeof fields);
    if (size <= 0 || !transaction_read(fields, (size_t)size, true, &id)) return false;
    memcpy(transaction, id, TRANSACTION_BYTES);
    return true;
}

static int told(Pump *pump, Outgoing *outgoing, void *delivery) {
    if (!map_find(&outgoing->sent, address_of(delivery))) return call_engine(pump);
    bool settled = proton.delivery_settled(delivery);
    uint64_t state = proton.delivery_remote_state(delivery);
    if (!settled && state < ACCEPTED) return 0; // `received` (3.4.1) is no outcome
    uint8_t transaction[TRANSACTION_BYTES];
    if (state == ACCEPTED) return outgoing_accepted(outgoing, delivery, settled, NULL);
    if (state == TRANSACTIONAL && !outgoing->by_partition && accepted_in(delivery, transaction))
        return outgoing_accepted(outgoing, delivery, settled, transaction);
    return call_engine(pump);
}

static int handle_events(Pump *pump) {
    void *event;
    while ((event = proton.collector_peek(pump->writer.collector))) {
        int result;
        if (proton.event_type(event) != DELIVERY_EVENT) {
            result = call_engine(pump);
        } else {
            void *delivery = proton.event_delivery(event), *pointer = proton.delivery_link(delivery);
            PyObject *link = linked(&pump->by_link, address_of(pointer));
            Py_XINCREF(link); // its owner may remove it
            bool is_outgoing = link && (PyObject *)Py_TYPE(link) == outgoing_type;
            result = is_outgoing ? told(pump, (Outgoing *)link, delivery)
                                 : received(pump, (Incoming *)link, pointer, delivery);
            Py_XDECREF(link);
        }
        proton.collector_pop(pump->writer.collector);
        if (result < 0) return -1;
    }
    return 0;
}

static int dispatch(Pump *pump) {
    pump->writer.dispatching = true;
    int result = handle_events(pump);
    pump->writer.dispatching = false;
    return result;
}

static PyObject *pump_dispatch(PyObject *self, PyObject *none) {
    (void)none;
    if (dispatch((Pump *)self) < 0) return NULL;
    Py_RETURN_NONE;
}

// -- input

enum { DECLINED = 2 }; // of a transfer that proton and Python take

// Give bytes to proton, and handle their events: 1, 0 if proton has found a fault, -1 with an exception.
static int give(Pump *pump, const uint8_t *bytes, size_t size) {
    while (size) {
        ssize_t taken = proton.transport_push(pump->writer.transport, (const char *)bytes, size);
        if (dispatch(pump) < 0) return -1;
        if (taken <= 0) return 0;
        bytes += taken;
        size -= (size_t)taken;
    }
    return 1;
}

static int give_staged(Pump *pump) {
    size_t size = pump->staged.size;
    pump->staged.size = 0;
    return give(pump, pump->staged.bytes, size);
}

static int stage(Pump *pump, const uint8_t *bytes, size_t size) {
    if (!buffer_reserve(&pump->staged, size)) {
        PyErr_NoMemory();
        return -1;
    }
    write_bytes(pump->staged.bytes + pump->staged.size, bytes, size);
    pump->staged.size += size;
    return 1;
}

// Stage the performative of a transfer alone.
static int stage_performative(Pump *pump, const uint8_t *frame, const struct transfer *transfer) {
    size_t at = pump->staged.size;
    if (stage(pump, frame, transfer->payload_at) < 0) return -1;
    write_u32(pump->staged.bytes + at, (uint32_t)transfer->payload_at);
    return 1;
}

// Stage the performative of a transfer, whose frame is whole, and note its payload.
static int take_transfer(Pump *pump, Incoming *incoming, const uint8_t *frame, const struct transfer *transfer) {
    struct payload *payload = ring_push(&pump->payloads);
    if (!payload) {
        PyErr_NoMemory();
        return -1;
    }
    size_t size = transfer->size - transfer->payload_at;
    *payload = (struct payload){incoming->link, frame + transfer->payload_at, size, transfer->transaction};
    if (stage_performative(pump, frame, transfer) < 0) return -1;
    return pump->staged.size < STAGED_BYTES && pump->payloads.count < CALLS_AT_ONCE ? 1 : give_staged(pump);
}

// Take a transfer of a delivery of several, whose frame is whole. Its event comes at once, so that no payload of another
// delivery is behind it.
static int take_part(Pump *pump, Incoming *incoming, const uint8_t *frame, const struct transfer *transfer) {
    size_t size = transfer->size - transfer->payload_at;
    size_t most = incoming->max_message_bytes ? incoming->max_message_bytes : SIZE_MAX;
    if (transfer->transaction || !(incoming->has_begun || transfer_begins(transfer))) return DECLINED;
    if (size > most - incoming->parts.size) return DECLINED;
    int result = give_staged(pump);
    if (result <= 0) return result;
    if (linked(&pump->by_link, address_of(incoming->link)) != (PyObject *)incoming) return DECLINED; // it was removed
    pump->calls++;
    PyObject *taken = PyObject_CallMethod(pump->engine, "take_part", "Kn", address_of(incoming->link), (Py_ssize_t)size);
    if (!taken) return -1;
    Py_DECREF(taken);
    if (taken != Py_True) return DECLINED;
    if (!buffer_reserve(&incoming->parts, size)) {
        PyErr_NoMemory();
        return -1;
    }
    if (size) write_bytes(incoming->parts.bytes + incoming->parts.size, frame + transfer->payload_at, size);
    incoming->parts.size += size;
    incoming->has_begun = true;
    if (stage_performative(pump, frame, transfer) < 0) return -1;
    pump->part_link = incoming->link;
    result = give_staged(pump);
    pump->part_link = NULL;
    return result;
}

// Python takes the rest of the delivery that has begun, if one has.
static int hand_over(Pump *pump, Incoming *incoming) {
    if (!incoming->has_begun) return 1;
    PyObject *result = PyObject_CallMethod(pump->engine, "on_parts", "K", address_of(incoming->link));
    Py_XDECREF(result);
    return result ? 1 : -1;
}

// Take a transfer, if its frame is whole; see `take_frames` for `*is_whole`.
static int take_usual(Pump *pump, Incoming *incoming, const uint8_t *frame, size_t here, size_t *size, bool *is_whole) {
    struct transfer transfer;
    if (!transfer_read(frame, here, &transfer)) return hand_over(pump, incoming) < 0 ? -1 : DECLINED;
    *size = transfer.size;
    *is_whole = transfer.size <= here;
    if (!*is_whole) return 1;
    int result = DECLINED;
    if (transfer.more || incoming->has_begun) result = take_part(pump, incoming, frame, &transfer);
    else if (transfer_begins(&transfer)) result = take_transfer(pump, incoming, frame, &transfer);
    return result == DECLINED && hand_over(pump, incoming) < 0 ? -1 : result;
}

// The Incoming of a transfer's link, or NULL.
static Incoming *incoming_of(Pump *pump, const uint8_t *frame, size_t size) {
    uint16_t channel;
    uint32_t handle;
    if (!transfer_link(frame, size, &channel, &handle)) return NULL;
    return (Incoming *)linked(&pump->incoming_by_handle, key_of(channel, handle));
}

// True while a delivery of several transfers is not complete. Its last transfer may look like a whole delivery.
static bool is_unfinished(Incoming *incoming) {
    if (incoming->may_be_unfinished) {
        void *delivery = proton.link_current(incoming->link);
        incoming->may_be_unfinished = delivery && proton.delivery_partial(delivery);
    }
    return incoming->may_be_unfinished;
}

// Take frames from `bytes`, which the walk has checked: up to the offset `*at`. There is the end, or a transfer that is
// not whole if `*is_whole` is false, or Python has done much.
static int take_frames(Pump *pump, const uint8_t *bytes, size_t size, size_t *at, bool *is_whole) {
    int result = 1;
    size_t staged = 0; // frames, since proton was given some
    *is_whole = true;
    if (pump->passing) {
        size_t passed = pump->passing < size ? pump->passing : size;
        pump->passing -= passed;
        *at = passed;
        result = give(pump, bytes, passed);
    }
    while (result > 0 && *at < size && pump->calls < CALLS_AT_ONCE) {
        const uint8_t *frame = bytes + *at;
        size_t here = size - *at;
        Incoming *incoming = incoming_of(pump, frame, here);
        if (incoming && !is_unfinished(incoming)) {
            size_t transfer_bytes = 0;
            Py_INCREF((PyObject *)incoming); // its owner may remove it
            result = take_usual(pump, incoming, frame, here, &transfer_bytes, is_whole);
            Py_DECREF((PyObject *)incoming);
            if (!*is_whole) break;
            if (result != DECLINED) {
                *at += transfer_bytes;
                continue;
            }
            incoming = incoming_of(pump, frame, here);
            result = 1;
        }
        size_t whole = here >= 4 ? size_of_frame(frame) : here;
        size_t passed = whole < here ? whole : here;
        // Proton takes the payload of this one itself. Its event may not come while payloads of its link wait.
        bool is_alone = incoming || passed > STAGED_BYTES;
        if (is_alone) result = give_staged(pump);
        if (incoming) incoming->may_be_unfinished = true;
        if (result > 0) result = is_alone ? give(pump, frame, passed) : stage(pump, frame, passed);
        pump->passing = whole - passed;
        *at += passed;
        staged = is_alone ? 0 : staged + 1;
        if (result > 0 && (pump->staged.size >= STAGED_BYTES || staged >= FRAMES_AT_ONCE)) {
            result = give_staged(pump);
            staged = 0;
        }
    }
    return result;
}

// Take the rest of the transfer that began before: 1 if it is whole now, 2 if not.
static int take_rest(Pump *pump, const uint8_t *bytes, size_t size, size_t *at) {
    struct buffer *partial = &pump->partial;
    size_t missing = read_u32(partial->bytes) - partial->size;
    size_t taken = missing < size ? missing : size;
    if (!buffer_reserve(partial, taken)) {
        PyErr_NoMemory();
        return -1;
    }
    write_bytes(partial->bytes + partial->size, bytes, taken);
    partial->size += taken;
    *at = taken;
    if (taken < missing) return 2;
    size_t frame_at = 0;
    bool is_whole;
    int result = take_frames(pump, partial->bytes, partial->size, &frame_at, &is_whole);
    return result > 0 ? give_staged(pump) : result; // its payload is in `partial`
}

// push(data, at, stop): the offset up to which the bytes were taken; -1 if proton has found a fault.
static PyObject *pump_push(PyObject *self, PyObject *arguments) {
    Pump *pump = (Pump *)self;
    PyObject *data;
    Py_ssize_t from, stop;
    if (!PyArg_ParseTuple(arguments, "Snn", &data, &from, &stop)) return NULL;
    if (from < 0 || stop < from || stop > PyBytes_Size(data)) {
        PyErr_SetString(PyExc_ValueError, "no such bytes");
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data) + from;
    size_t size = (size_t)(stop - from), at = 0;
    int result = 1;
    pump->calls = 0;
    if (pump->partial.size) {
        result = take_rest(pump, bytes, size, &at);
        if (result == 2) return PyLong_FromSsize_t(stop);
        buffer_free(&pump->partial);
    }
    if (result > 0) {
        bool is_whole;
        bytes += at;
        size -= at;
        from += (Py_ssize_t)at;
        at = 0;
        result = take_frames(pump, bytes, size, &at, &is_whole);
        if (result > 0) result = give_staged(pump);
        if (result > 0 && !is_whole) {
            if (buffer_reserve(&pump->partial, read_u32(bytes + at))) {
                pump->partial.size = size - at;
                write_bytes(pump->partial.bytes, bytes + at, size - at);
                at = size;
            } else {
                PyErr_NoMemory();
                result = -1;
            }
        }
    }
    while (pump->payloads.count) ring_pop(&pump->payloads); // proton has found a fault before them
    buffer_free(&pump->staged);
    if (result < 0) return NULL;
    return PyLong_FromSsize_t(result ? from + (Py_ssize_t)at : -1);
}

// -- output

// What proton writes is in it during a pull. All pumps share it, as each pull ends before the next, with the interpreter's
// lock held: memory that was used before costs no page faults.
static struct buffer written;

// Take all frames that proton has written, those that were taken ahead first.
static bool take_all(Pump *pump) {
    struct buffer *ahead = &pump->writer.ahead;
    written.size = 0;
    if (ahead->size) {
        if (!buffer_reserve(&written, ahead->size)) return false;
        write_bytes(written.bytes, ahead->bytes, ahead->size);
        written.size = ahead->size;
        buffer_free(ahead);
    }
    return writer_take(&pump->writer, &written);
}

// Where frames are copied to: one value, or several whose sizes are no more than `piece_bytes` and a frame.
struct output {
    PyObject *pieces;  // memoryviews of those that are full; NULL if there is only one
    PyObject *piece;   // bytes
    uint8_t *at, *end; // what is free of it
    size_t piece_bytes;
};

// Add what there is of the last piece to the others.
static bool end_piece(struct output *output) {
    const uint8_t *begin = (const uint8_t *)PyBytes_AsString(output->piece);
    PyObject *view = PyMemoryView_FromObject(output->piece);
    PyObject *full = view ? PySequence_GetSlice(view, 0, output->at - begin) : NULL;
    Py_XDECREF(view);
    Py_CLEAR(output->piece);
    int result = full ? PyList_Append(output->pieces, full) : -1;
    Py_XDECREF(full);
    return result == 0;
}

// Have room for a frame of so many bytes at most: false with an exception.
static bool output_reserve(struct output *output, size_t bytes) {
    if (bytes <= (size_t)(output->end - output->at)) return true; // the usual case: all have room in one
    if (output->piece && !end_piece(output)) return false;
    size_t size = bytes > output->piece_bytes ? bytes : output->piece_bytes;
    output->piece = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (!output->piece) return false;
    output->at = (uint8_t *)PyBytes_AsString(output->piece);
    output->end = output->at + size;
    return true;
}

// Copy whole frames that proton has written: false with an exception.
static bool copy_written(struct output *output, size_t from, size_t to) {
    while (output->pieces && to - from > output->piece_bytes) { // proton has written so much itself
        size_t end = from, size;
        do {
            const uint8_t *frame = written.bytes + end;
            size = size_of_frame(frame);
            end += size < to - end ? size : to - end;
        } while (end < to && end - from < output->piece_bytes);
        if (!output_reserve(output, end - from)) return false;
        output->at = write_bytes(output->at, written.bytes + from, end - from);
        from = end;
    }
    if (!output_reserve(output, to - from)) return false;
    if (to > from) output->at = write_bytes(output->at, written.bytes + from, to - from);
    return true;
}

// Copy whole frames, with the payloads of transfers that an Outgoing has: in these, proton has written nothing, or a byte
// if there are several of a delivery. False with an exception.
static bool copy_frames(Pump *pump, struct output *output) {
    size_t at = 0, copied = 0;
    while (written.size - at >= 8) {
        const uint8_t *frame = written.bytes + at;
        size_t size = size_of_frame(frame);
        struct transfer transfer;
        at += size;
        if (!transfer_read(frame, size, &transfer) || size - transfer.payload_at > 1) continue;
        Outgoing *outgoing = (Outgoing *)linked(&pump->outgoing_by_handle, key_of(transfer.channel, transfer.handle));
        if (!outgoing || !outgoing_is_next(outgoing, transfer.tag, transfer.tag_bytes)) continue;
        if (output->pieces) {
            if (!copy_written(output, copied, at - size)) return false;
            copied = at - size;
            if (!output_reserve(output, transfer.payload_at + outgoing_most_bytes(outgoing))) return false;
        }
        output->at = write_bytes(output->at, written.bytes + copied, at - size + transfer.payload_at - copied);
        copied = at;
        size_t payload_bytes = outgoing_write(outgoing, transfer.more, output->at);
        if (!payload_bytes) {
            PyErr_NoMemory();
            return false;
        }
        write_u32(output->at - transfer.payload_at, (uint32_t)(transfer.payload_at + payload_bytes));
        output->at += payload_bytes;
    }
    return copy_written(output, copied, written.size);
}

static size_t queued_bytes(const struct map *links) {
    size_t bytes = 0;
    for (size_t at = 0; at < links->capacity; at++)
        if (links->slots[at].key) bytes += ((Outgoing *)pointer_of(links->slots[at].value))->queued_bytes;
    return bytes;
}

static void remove_value(struct map *map, uint64_t value) {
    for (size_t at = 0; at < map->capacity; at++) {
        if (map->slots[at].key && map->slots[at].value == value) {
            map_remove(map, map->slots[at].key);
            return;
        }
    }
}

static void forget_ended(Pump *pump) {
    while (pump->ended.count) {
        PyObject *outgoing = *(PyObject **)ring_at(&pump->ended, 0);
        ring_pop(&pump->ended);
        remove_value(&pump->outgoing_by_handle, address_of(outgoing));
        Py_DECREF(outgoing);
    }
}

static PyObject *pump_write_ahead(PyObject *self, PyObject *none) {
    (void)none;
    if (!writer_take_ahead(&((Pump *)self)->writer)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

// What is written now: bytes; or, if that is more than `piece_bytes`, a list of memoryviews of them.
static PyObject *copied_output(Pump *pump) {
    size_t queued = queued_bytes(&pump->outgoing_by_handle), all = written.size + queued;
    struct output output = {.piece_bytes = pump->piece_bytes};
    if (all > pump->piece_bytes) output.pieces = PyList_New(0);
    else output.piece = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)all);
    if (!output.pieces && !output.piece) return NULL;
    if (output.piece) {
        output.at = (uint8_t *)PyBytes_AsString(output.piece);
        output.end = output.at + all;
    }
    bool is_copied = queued ? copy_frames(pump, &output) : copy_written(&output, 0, written.size);
    if (is_copied && output.pieces && output.piece) is_copied = end_piece(&output);
    if (!is_copied) {
        Py_XDECREF(output.pieces);
        Py_XDECREF(output.piece);
        return NULL;
    }
    if (output.pieces) return output.pieces;
    if (output.at < output.end) { // some deliveries wait for the session's window
        char *bytes = PyBytes_AsString(output.piece);
        PyObject *whole = output.piece;
        output.piece = PyBytes_FromStringAndSize(bytes, (char *)output.at - bytes);
        Py_DECREF(whole);
    }
    return output.piece;
}

static PyObject *pump_pull(PyObject *self, PyObject *none) {
    (void)none;
    Pump *pump = (Pump *)self;
    PyObject *output = NULL;
    if (!take_all(pump)) {
        PyErr_NoMemory();
    } else {
        output = copied_output(pump);
        if (written.size) writer_forget_events(&pump->writer);
        forget_ended(pump);
    }
    if (written.capacity > KEPT_WRITTEN_BYTES) buffer_free(&written);
    return output;
}

// deliver(outgoing, …): see `outgoing_deliver`.
static PyObject *pump_deliver(PyObject *self, PyObject *arguments) {
    PyObject *outgoing = PyTuple_GetItem(arguments, 0);
    if (!outgoing) return NULL;
    if ((PyObject *)Py_TYPE(outgoing) != outgoing_type) {
        PyErr_SetString(PyExc_TypeError, "no Outgoing");
        return NULL;
    }
    return outgoing_deliver((Outgoing *)outgoing, &((Pump *)self)->writer, arguments);
}

// -- links

static PyObject *pump_add(PyObject *self, PyObject *arguments) {
    Pump *pump = (Pump *)self;
    PyObject *link;
    unsigned int channel, handle;
    if (!PyArg_ParseTuple(arguments, "OII", &link, &channel, &handle)) return NULL;
    bool is_incoming = (PyObject *)Py_TYPE(link) == incoming_type;
    if (!is_incoming && (PyObject *)Py_TYPE(link) != outgoing_type) {
        PyErr_SetString(PyExc_TypeError, "no Incoming or Outgoing");
        return NULL;
    }
    void *pointer = is_incoming ? ((Incoming *)link)->link : ((Outgoing *)link)->link;
    struct map *by_handle = is_incoming ? &pump->incoming_by_handle : &pump->outgoing_by_handle;
    if (linked(by_handle, key_of(channel, handle)) == link) Py_RETURN_NONE;
    if (!map_put(&pump->by_link, address_of(pointer), address_of(link)) ||
        !map_put(by_handle, key_of(channel, handle), address_of(link)))
        return PyErr_NoMemory();
    Py_INCREF(link);
    Py_RETURN_NONE;
}

static PyObject *pump_remove(PyObject *self, PyObject *link) {
    Pump *pump = (Pump *)self;
    bool is_incoming = (PyObject *)Py_TYPE(link) == incoming_type;
    uint64_t pointer = address_of(is_incoming ? ((Incoming *)link)->link : ((Outgoing *)link)->link);
    if (linked(&pump->by_link, pointer) != link) Py_RETURN_NONE;
    map_remove(&pump->by_link, pointer);
    if (!is_incoming && ((Outgoing *)link)->parts.count) {
        PyObject **ended = ring_push(&pump->ended);
        if (!ended) return PyErr_NoMemory();
        *ended = link;
        Py_RETURN_NONE;
    }
    remove_value(is_incoming ? &pump->incoming_by_handle : &pump->outgoing_by_handle, address_of(link));
    Py_DECREF(link);
    Py_RETURN_NONE;
}

static int pump_traverse(PyObject *self, visitproc visit, void *arg) {
    Pump *pump = (Pump *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(pump->engine);
    for (size_t at = 0; at < pump->by_link.capacity; at++)
        if (pump->by_link.slots[at].key) Py_VISIT((PyObject *)pointer_of(pump->by_link.slots[at].value));
    for (size_t at = 0; at < pump->ended.count; at++) Py_VISIT(*(PyObject **)ring_at(&pump->ended, at));
    return 0;
}

static int pump_clear(PyObject *self) {
    Pump *pump = (Pump *)self;
    struct map links = pump->by_link;
    pump->by_link = (struct map){0};
    map_free(&pump->incoming_by_handle);
    map_free(&pump->outgoing_by_handle);
    for (size_t at = 0; at < links.capacity; at++)
        if (links.slots[at].key) Py_DECREF((PyObject *)pointer_of(links.slots[at].value));
    map_free(&links);
    forget_ended(pump);
    Py_CLEAR(pump->engine);
    return 0;
}

static void pump_free(Pump *pump) {
    buffer_free(&pump->partial);
    buffer_free(&pump->staged);
    buffer_free(&pump->writer.ahead);
    ring_free(&pump->payloads);
    ring_free(&pump->ended);
}

// Frees what the connection took. Its objects refer to each other, so they may live until Python looks for cycles.
static PyObject *pump_close(PyObject *self, PyObject *none) {
    (void)none;
    Pump *pump = (Pump *)self;
    for (size_t at = 0; at < pump->by_link.capacity; at++) {
        if (!pump->by_link.slots[at].key) continue;
        PyObject *link = pointer_of(pump->by_link.slots[at].value);
        if ((PyObject *)Py_TYPE(link) == incoming_type) incoming_free((Incoming *)link);
        else outgoing_free((Outgoing *)link);
    }
    pump_clear(self);
    pump_free(pump);
    Py_RETURN_NONE;
}

static void pump_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pump_clear(self);
    pump_free((Pump *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int pump_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Pump *pump = (Pump *)self;
    unsigned long long transport, collector;
    PyObject *engine;
    static char *names[] = {"transport", "collector", "engine", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KKO", names, &transport, &collector, &engine)) return -1;
    pump->writer.transport = pointer_of(transport);
    pump->writer.collector = pointer_of(collector);
    pump->engine = Py_NewRef(engine);
    pump->piece_bytes = PIECE_BYTES;
    pump->payloads.item_bytes = sizeof(struct payload);
    pump->ended.item_bytes = sizeof(PyObject *);
    return 0;
}

static PyObject *pump_finished(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(((Pump *)self)->writer.finished);
}

static PyObject *pump_get_piece_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Pump *)self)->piece_bytes);
}

static int pump_set_piece_bytes(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    size_t bytes = value ? PyLong_AsSize_t(value) : 0;
    if (!value || PyErr_Occurred()) {
        if (!value) PyErr_SetString(PyExc_TypeError, "cannot be deleted");
        return -1;
    }
    ((Pump *)self)->piece_bytes = bytes;
    return 0;
}

static PyGetSetDef pump_attributes[] = {
    {"finished", pump_finished, NULL, NULL, NULL},
    {"piece_bytes", pump_get_piece_bytes, pump_set_piece_bytes, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef pump_methods[] = {
    {"push", pump_push, METH_VARARGS, NULL},
    {"dispatch", pump_dispatch, METH_NOARGS, NULL},
    {"pull", pump_pull, METH_NOARGS, NULL},
    {"write_ahead", pump_write_ahead, METH_NOARGS, NULL},
    {"deliver", pump_deliver, METH_VARARGS, NULL},
    {"add", pump_add, METH_VARARGS, NULL},
    {"remove", pump_remove, METH_O, NULL},
    {"close", pump_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot pump_slots[] = {
    {Py_tp_init, pump_init},
    {Py_tp_traverse, pump_traverse},
    {Py_tp_clear, pump_clear},
    {Py_tp_dealloc, pump_dealloc},
    {Py_tp_methods, pump_methods},
    {Py_tp_getset, pump_attributes},
    {0, NULL},
};
PyType_Spec pump_spec = {
    .name = "protocol._native.Pump",
    .basicsize = sizeof(Pump),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = pump_slots,
};
