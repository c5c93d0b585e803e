#include "module.h"
#include "proton.h"

#include <stdlib.h>

// States in the answers to outcomes, which are of the same kind: by `broker.wire.Outcome`.
static const uint64_t STATE_OF[] = {ACCEPTED, MODIFIED, MODIFIED, REJECTED, RELEASED};
enum { OUTCOMES = sizeof STATE_OF / sizeof *STATE_OF };

enum { TOKEN_BYTES = 16, RANGE_BYTES = TOKEN_BYTES + 4, NUMBER_BYTES = 8 };
#define PERFORMATIVE_BYTES 72 // of a frame with a transfer without its payload, at most

// As `protocol.lock_tokens.uuid_bytes`.
static void lock_token_of(const uint8_t *token, uint8_t *uuid) {
    static const uint8_t ORDER[8] = {3, 2, 1, 0, 5, 4, 7, 6};
    for (int at = 0; at < 8; at++) uuid[at] = token[ORDER[at]];
    memcpy(uuid + 8, token + 8, 8);
}

static void next_token(uint8_t *token) { write_u64(token + 8, read_u64(token + 8) + 1); }

static void pop_part(Outgoing *outgoing) {
    struct part *part = ring_at(&outgoing->parts, 0);
    Py_DECREF(part->run);
    Py_XDECREF(part->numbers);
    ring_pop(&outgoing->parts);
}

// The line of a partition; NULL if there is no memory.
static struct ring *pending_of(Outgoing *outgoing, uint32_t partition) {
    struct line *lines = (struct line *)outgoing->lines.bytes;
    size_t count = outgoing->lines.size / sizeof *lines;
    for (size_t at = 0; at < count; at++)
        if (lines[at].partition == partition) return &lines[at].pending;
    if (!buffer_reserve(&outgoing->lines, sizeof *lines)) return NULL;
    struct line *line = (struct line *)outgoing->lines.bytes + count;
    *line = (struct line){partition, {.item_bytes = sizeof(struct pending)}};
    outgoing->lines.size += sizeof *line;
    return &line->pending;
}

static void lines_clear(Outgoing *outgoing) {
    struct line *lines = (struct line *)outgoing->lines.bytes;
    for (size_t at = 0; at < outgoing->lines.size / sizeof *lines; at++) ring_free(&lines[at].pending);
    buffer_free(&outgoing->lines);
}

static void parts_clear(Outgoing *outgoing) {
    while (outgoing->parts.count) pop_part(outgoing);
    buffer_free(&outgoing->large.head);
    outgoing->queued_bytes = 0;
}

bool outgoing_is_next(Outgoing *outgoing, const uint8_t *tag, size_t tag_bytes) {
    if (!outgoing->parts.count || tag_bytes != TOKEN_BYTES) return false;
    return !memcmp(((struct part *)ring_at(&outgoing->parts, 0))->token, tag, TOKEN_BYTES);
}

// The record of the next delivery, with its size. What is different in each delivery of the part is set.
static const uint8_t *next_record(struct part *part, size_t *bytes) {
    const uint8_t *run = part->bytes;
    *bytes = run_next(run, SIZE_MAX / 2, &part->at); // `deliver` has checked the run
    lock_token_of(part->token, part->delivery.lock_token);
    if (part->numbers) {
        part->delivery.sequence_number = read_u64((const uint8_t *)PyBytes_AsString(part->numbers) + part->number_at);
        part->number_at += NUMBER_BYTES;
    }
    const uint8_t *record = run + part->at;
    part->at += *bytes;
    return record;
}

static void forget_delivery(Outgoing *outgoing, struct part *part) {
    part->delivery.sequence_number++;
    next_token(part->token);
    if (--part->left == 0) pop_part(outgoing);
}

static bool begin_large(struct large *large, struct part *part) {
    size_t bytes;
    const uint8_t *record = next_record(part, &bytes);
    if (!buffer_reserve(&large->head, record_rendered_bytes(record, bytes, &part->delivery))) return false;
    uint8_t *end = record_render_head(record, bytes, &part->delivery, large->head.bytes, &large->rest, &large->rest_bytes);
    large->head.size = (size_t)(end - large->head.bytes);
    large->at = 0;
    return true;
}

size_t outgoing_write(Outgoing *outgoing, bool more, uint8_t *to) {
    struct part *part = ring_at(&outgoing->parts, 0);
    struct large *large = &outgoing->large;
    size_t written;
    if (more || large->head.size) {
        if (!large->head.size && !begin_large(large, part)) return 0;
        size_t head_bytes = large->at < large->head.size ? large->head.size - large->at : 0;
        size_t left = head_bytes + large->rest_bytes;
        written = more && part->frame_bytes < left ? part->frame_bytes : left;
        if (head_bytes > written) head_bytes = written;
        to = write_bytes(to, large->head.bytes + large->at, head_bytes);
        write_bytes(to, large->rest, written - head_bytes);
        large->at += head_bytes;
        large->rest += written - head_bytes;
        large->rest_bytes -= written - head_bytes;
        if (!more) buffer_free(&large->head);
    } else {
        size_t bytes;
        const uint8_t *record = next_record(part, &bytes);
        written = (size_t)(record_render(record, bytes, &part->delivery, to) - to);
    }
    outgoing->queued_bytes -= written;
    if (!more) forget_delivery(outgoing, part);
    return written;
}

size_t outgoing_most_bytes(const Outgoing *outgoing) {
    const struct part *part = ring_at(&outgoing->parts, 0);
    return part->frame_bytes < outgoing->queued_bytes ? part->frame_bytes : outgoing->queued_bytes;
}

static size_t frames_of(size_t bytes, size_t frame_bytes) { return bytes / frame_bytes + (bytes % frame_bytes != 0); }

// Keep an accepted delivery until its answer comes: false if there is no memory.
static bool keep_accepted(Outgoing *outgoing, void *delivery, const uint8_t *token) {
    if (outgoing->transaction.is_one) {
        uint64_t address = address_of(delivery);
        if (!buffer_reserve(&outgoing->transacted, sizeof address)) return false;
        write_bytes(outgoing->transacted.bytes + outgoing->transacted.size, &address, sizeof address);
        outgoing->transacted.size += sizeof address;
        return true;
    }
    struct ring *line = pending_of(outgoing, outgoing->by_partition ? read_u16(token) : 0);
    struct pending *pending = line ? ring_push(line) : NULL;
    if (pending) *pending = (struct pending){delivery, 0};
    return pending;
}

int outgoing_accepted(Outgoing *outgoing, void *delivery, bool settled, const uint8_t *transaction) {
    struct pn_bytes tag = proton.delivery_tag(delivery);
    bool is_other = outgoing->is_quiet != settled || !transaction_is(&outgoing->transaction, transaction);
    if (outgoing->count && is_other) {
        PyObject *result = PyObject_CallMethod(outgoing->owner, "post_accepted", NULL);
        if (!result) return -1;
        Py_DECREF(result);
    }
    struct buffer *accepted = &outgoing->accepted;
    struct tokens *last = accepted->size ? (struct tokens *)(accepted->bytes + accepted->size) - 1 : NULL;
    const uint8_t *token = (const uint8_t *)tag.start;
    if (last && last->count < UINT32_MAX && !memcmp(last->first, token, 8) &&
        read_u64(last->first + 8) + last->count == read_u64(token + 8)) {
        last->count++;
    } else {
        if (!buffer_reserve(accepted, sizeof *last)) {
            PyErr_NoMemory();
            return -1;
        }
        last = (struct tokens *)(accepted->bytes + accepted->size);
        memcpy(last->first, token, TOKEN_BYTES);
        last->count = 1;
        accepted->size += sizeof *last;
    }
    map_remove(&outgoing->sent, address_of(delivery));
    outgoing->is_quiet = settled;
    transaction_set(&outgoing->transaction, transaction);
    if (settled) {
        proton.delivery_settle(delivery);
    } else if (!keep_accepted(outgoing, delivery, token)) {
        PyErr_NoMemory();
        return -1;
    }
    if (outgoing->count++ == 0) {
        PyObject *result = PyObject_CallMethod(outgoing->owner, "on_accepting", NULL);
        if (!result) return -1;
        Py_DECREF(result);
    }
    return 0;
}

static int outgoing_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Outgoing *outgoing = (Outgoing *)self;
    unsigned long long link;
    PyObject *owner;
    int settled, by_partition = 0, keys = NO_KEYS, is_copy = 0;
    static char *names[] = {"link", "owner", "settled", "by_partition", "keys", "is_copy", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KOp|pip", names, &link, &owner, &settled, &by_partition, &keys,
                                     &is_copy))
        return -1;
    if (keys < NO_KEYS || keys > KEYS_WITH_MESSAGE_ID) {
        PyErr_SetString(PyExc_ValueError, "no such keys");
        return -1;
    }
    outgoing->link = pointer_of(link);
    outgoing->owner = Py_NewRef(owner);
    outgoing->settled = settled;
    outgoing->by_partition = by_partition;
    outgoing->keys = (enum keys)keys;
    outgoing->is_copy = is_copy;
    outgoing->parts.item_bytes = sizeof(struct part);
    return 0;
}

static int outgoing_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Outgoing *)self)->owner);
    return 0; // runs are bytes, which refer to nothing
}

static int outgoing_clear(PyObject *self) {
    Py_CLEAR(((Outgoing *)self)->owner);
    return 0;
}

static void free_outcomes(Outgoing *outgoing) {
    buffer_free(&outgoing->transacted);
    lines_clear(outgoing);
    buffer_free(&outgoing->accepted);
    map_free(&outgoing->sent);
    outgoing->count = 0;
}

void outgoing_free(Outgoing *outgoing) {
    parts_clear(outgoing);
    ring_free(&outgoing->parts);
    free_outcomes(outgoing);
}

static void outgoing_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    outgoing_clear(self);
    outgoing_free((Outgoing *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Let proton write what it can now, ahead of the next pull: false with an exception.
static bool write_ahead(struct writer *writer) {
    if (writer_take_ahead(writer)) return true;
    PyErr_NoMemory();
    return false;
}

// What proton is given of a message that takes several frames: it writes a transfer for each byte.
static int send_large(Outgoing *outgoing, struct writer *writer, size_t frames) {
    for (; frames > 1; frames--)
        if (proton.link_send(outgoing->link, "", 1) != 1 || !write_ahead(writer)) return -1;
    return proton.link_send(outgoing->link, "", 1) == 1 ? 0 : -1;
}

// True if the peer's session takes so many frames now. All that was sent before is written then.
static bool has_window(Outgoing *outgoing, struct writer *writer, size_t frames) {
    void *session = proton.link_session(outgoing->link);
    return write_ahead(writer) && proton.session_remote_incoming_window(session) >= frames;
}

// Deliver the messages of a run of bytes; `arguments` are those of `outgoing_deliver`.
static PyObject *deliver(Outgoing *outgoing, struct writer *writer, PyObject *arguments, PyObject *run) {
    PyObject *itself, *given, *numbers, *locked_until;
    Py_ssize_t at, count, token_bytes;
    const char *token;
    unsigned long long sequence_number = 0;
    unsigned int delivery_count;
    if (!PyArg_ParseTuple(arguments, "OOnny#OIO", &itself, &given, &at, &count, &token, &token_bytes, &numbers,
                          &delivery_count, &locked_until))
        return NULL;
    bool are_consecutive = !PyBytes_Check(numbers);
    if (are_consecutive) sequence_number = PyLong_AsUnsignedLongLong(numbers);
    if (PyErr_Occurred()) return NULL;
    size_t size, end = (size_t)at, queued_bytes = 0, frames = 0;
    const uint8_t *bytes = run_bytes(run, &size);
    if (!bytes) return NULL;
    if (at < 0 || count <= 0 || (size_t)at > size || token_bytes != TOKEN_BYTES ||
        (!are_consecutive && PyBytes_Size(numbers) / NUMBER_BYTES < count)) {
        PyErr_SetString(PyExc_ValueError, "no such messages");
        return NULL;
    }
    uint32_t largest = writer_max_frame(writer);
    size_t frame_bytes = largest ? (largest > PERFORMATIVE_BYTES ? largest - PERFORMATIVE_BYTES : 0) : SIZE_MAX;
    struct delivery common = {.sequence_number = sequence_number,
                              .delivery_count = delivery_count,
                              .locked = locked_until != Py_None,
                              .keys = outgoing->keys,
                              .is_copy = outgoing->is_copy};
    if (common.locked) {
        common.locked_until_ms = (uint64_t)PyLong_AsLongLong(locked_until);
        if (PyErr_Occurred()) return NULL;
    }
    long long enqueued_ms = 0;
    for (Py_ssize_t left = count; left; left--) {
        size_t record_bytes = run_next(bytes, size, &end);
        if (!record_bytes || !record_is_usual(bytes + end, record_bytes, outgoing->keys) || !frame_bytes) Py_RETURN_NONE;
        if (left == count) {
            enqueued_ms = (int64_t)read_u64(bytes + end + ENQUEUED_AT);
            if (enqueued_ms < 0) enqueued_ms = 0; // as `storage.records.message_enqueued_ms`
        }
        size_t rendered_bytes = record_rendered_bytes(bytes + end, record_bytes, &common);
        frames += frames_of(rendered_bytes, frame_bytes);
        queued_bytes += rendered_bytes;
        end += record_bytes;
    }
    bool are_large = frames > (size_t)count; // some of them
    // Of a message that was settled before it was sent, each transfer would have to say so.
    if (are_large && (outgoing->settled || !has_window(outgoing, writer, frames))) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    struct part *part = ring_push(&outgoing->parts);
    if (!part) return PyErr_NoMemory();
    *part = (struct part){.run = Py_NewRef(run),
                          .bytes = bytes,
                          .at = (size_t)at,
                          .left = (size_t)count,
                          .frame_bytes = frame_bytes,
                          .delivery = common};
    if (!are_consecutive) part->numbers = Py_NewRef(numbers);
    memcpy(part->token, token, TOKEN_BYTES);
    outgoing->queued_bytes += queued_bytes;
    uint8_t tag[TOKEN_BYTES];
    memcpy(tag, token, TOKEN_BYTES);
    size_t next = (size_t)at, needed = 1;
    for (; count; count--) {
        if (are_large) {
            size_t record_bytes = run_next(bytes, size, &next);
            needed = frames_of(record_rendered_bytes(bytes + next, record_bytes, &common), frame_bytes);
            next += record_bytes;
        }
        void *delivery = proton.delivery(outgoing->link, (struct pn_bytes){TOKEN_BYTES, (const char *)tag});
        if (!delivery) return PyErr_NoMemory();
        if (needed > 1 && send_large(outgoing, writer, needed) < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "proton takes no bytes of a delivery");
            return NULL;
        }
        if (outgoing->settled) proton.delivery_settle(delivery);
        else if (!map_put(&outgoing->sent, address_of(delivery), ++outgoing->sent_count)) return PyErr_NoMemory();
        proton.link_advance(outgoing->link);
        // The credit might be taken back before the last transfer.
        if (needed > 1 && !write_ahead(writer)) return NULL;
        next_token(tag);
    }
    return Py_BuildValue("nL", (Py_ssize_t)end, enqueued_ms);
}

PyObject *outgoing_deliver(Outgoing *outgoing, struct writer *writer, PyObject *arguments) {
    PyObject *run = PyTuple_GetItem(arguments, 1);
    if (!run) return NULL;
    if (PyBytes_Check(run) || PyMemoryView_Check(run)) return deliver(outgoing, writer, arguments, run);
    run = PyObject_Bytes(run);
    PyObject *result = run ? deliver(outgoing, writer, arguments, run) : NULL;
    Py_XDECREF(run);
    return result;
}

static PyObject *outgoing_take_accepted(PyObject *self, PyObject *none) {
    (void)none;
    Outgoing *outgoing = (Outgoing *)self;
    struct tokens *tokens = (struct tokens *)outgoing->accepted.bytes;
    size_t ranges = outgoing->accepted.size / sizeof *tokens;
    PyObject *list = PyList_New((Py_ssize_t)ranges);
    if (!list) return NULL;
    for (size_t at = 0; at < ranges; at++) {
        uint8_t range[RANGE_BYTES];
        write_u32(write_bytes(range, tokens[at].first, TOKEN_BYTES), tokens[at].count);
        PyObject *item = PyBytes_FromStringAndSize((char *)range, tokens[at].count == 1 ? TOKEN_BYTES : RANGE_BYTES);
        if (!item) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SetItem(list, (Py_ssize_t)at, item);
    }
    struct buffer *transacted = &outgoing->transacted;
    PyObject *result = Py_BuildValue("nNNNN", (Py_ssize_t)outgoing->count, PyBool_FromLong(outgoing->is_quiet), list,
                                     transaction_id(&outgoing->transaction),
                                     PyBytes_FromStringAndSize((char *)transacted->bytes, (Py_ssize_t)transacted->size));
    if (result) outgoing->accepted.size = outgoing->count = transacted->size = 0;
    return result;
}

static PyObject *outgoing_sent(PyObject *self, PyObject *address) {
    Outgoing *outgoing = (Outgoing *)self;
    unsigned long long delivery = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return NULL;
    if (!map_put(&outgoing->sent, delivery, ++outgoing->sent_count)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *outgoing_is_sent(PyObject *self, PyObject *address) {
    unsigned long long delivery = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(map_find(&((Outgoing *)self)->sent, delivery) != NULL);
}

static PyObject *outgoing_told(PyObject *self, PyObject *address) {
    unsigned long long delivery = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(map_remove(&((Outgoing *)self)->sent, delivery));
}

static int by_order(const void *one, const void *other) {
    uint64_t first = ((const struct map_slot *)one)->value, second = ((const struct map_slot *)other)->value;
    return (first > second) - (first < second);
}

static PyObject *outgoing_last_tags(PyObject *self, PyObject *number) {
    struct map *sent = &((Outgoing *)self)->sent;
    size_t wanted = PyLong_AsSize_t(number), found = 0;
    if (PyErr_Occurred()) return NULL;
    struct map_slot *slots = calloc(sent->count ? sent->count : 1, sizeof *slots);
    if (!slots) return PyErr_NoMemory();
    for (size_t at = 0; at < sent->capacity; at++)
        if (sent->slots[at].key) slots[found++] = sent->slots[at];
    qsort(slots, found, sizeof *slots, by_order);
    PyObject *tags = PyList_New(0);
    for (size_t at = found > wanted ? found - wanted : 0; tags && at < found; at++) {
        struct pn_bytes tag = proton.delivery_tag(pointer_of(slots[at].key));
        PyObject *item = PyBytes_FromStringAndSize(tag.start, (Py_ssize_t)tag.size);
        if (!item || PyList_Append(tags, item) < 0) Py_CLEAR(tags);
        Py_XDECREF(item);
    }
    free(slots);
    return tags;
}

static PyObject *outgoing_append(PyObject *self, PyObject *arguments) {
    unsigned int partition;
    unsigned long long delivery, outcome;
    if (!PyArg_ParseTuple(arguments, "IKK", &partition, &delivery, &outcome)) return NULL;
    if (outcome >= OUTCOMES) {
        PyErr_SetString(PyExc_ValueError, "no such outcome");
        return NULL;
    }
    struct ring *line = pending_of((Outgoing *)self, partition);
    struct pending *pending = line ? ring_push(line) : NULL;
    if (!pending) return PyErr_NoMemory();
    *pending = (struct pending){pointer_of(delivery), outcome};
    Py_RETURN_NONE;
}

// The line of the partition whose number Python gives; NULL with an exception.
static struct ring *given_line(PyObject *self, PyObject *number) {
    size_t partition = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) return NULL;
    struct ring *line = partition <= UINT32_MAX ? pending_of((Outgoing *)self, (uint32_t)partition) : NULL;
    if (!line) PyErr_NoMemory();
    return line;
}

static PyObject *outgoing_popleft(PyObject *self, PyObject *partition) {
    struct ring *line = given_line(self, partition);
    if (!line) return NULL;
    if (!line->count) {
        PyErr_SetString(PyExc_IndexError, "no outcome is pending");
        return NULL;
    }
    struct pending *pending = ring_at(line, 0);
    PyObject *item = Py_BuildValue("KK", address_of(pending->delivery), (unsigned long long)pending->outcome);
    ring_pop(line);
    return item;
}

static PyObject *outgoing_settle(PyObject *self, PyObject *arguments) {
    PyObject *partition;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(arguments, "On", &partition, &number)) return NULL;
    struct ring *line = given_line(self, partition);
    if (!line) return NULL;
    Py_ssize_t counts[OUTCOMES] = {0};
    if (number < 0 || (size_t)number > line->count) {
        PyErr_SetString(PyExc_IndexError, "fewer outcomes are pending");
        return NULL;
    }
    for (; number; number--) {
        struct pending pending = *(struct pending *)ring_at(line, 0);
        ring_pop(line);
        counts[pending.outcome]++;
        proton.delivery_update(pending.delivery, STATE_OF[pending.outcome]);
        proton.delivery_settle(pending.delivery);
    }
    return Py_BuildValue("nnnnn", counts[0], counts[1], counts[2], counts[3], counts[4]);
}

static PyObject *outgoing_forget(PyObject *self, PyObject *partition) {
    struct ring *line = given_line(self, partition);
    if (!line) return NULL;
    ring_free(line);
    Py_RETURN_NONE;
}

static PyObject *outgoing_pending(PyObject *self, PyObject *partition) {
    struct ring *line = given_line(self, partition);
    return line ? PyLong_FromSize_t(line->count) : NULL;
}

static PyObject *outgoing_end(PyObject *self, PyObject *none) {
    (void)none;
    Outgoing *outgoing = (Outgoing *)self;
    size_t count = outgoing->sent.count;
    free_outcomes(outgoing);
    return PyLong_FromSize_t(count);
}

static PyObject *outgoing_get_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Outgoing *)self)->count);
}

static PyObject *outgoing_get_unsettled(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Outgoing *)self)->sent.count);
}

static PyObject *outgoing_get_queued_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Outgoing *)self)->queued_bytes);
}

static PyGetSetDef outgoing_attributes[] = {
    {"count", outgoing_get_count, NULL, NULL, NULL},
    {"unsettled", outgoing_get_unsettled, NULL, NULL, NULL},
    {"queued_bytes", outgoing_get_queued_bytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef outgoing_methods[] = {
    {"take_accepted", outgoing_take_accepted, METH_NOARGS, NULL},
    {"sent", outgoing_sent, METH_O, NULL},
    {"is_sent", outgoing_is_sent, METH_O, NULL},
    {"told", outgoing_told, METH_O, NULL},
    {"last_tags", outgoing_last_tags, METH_O, NULL},
    {"append", outgoing_append, METH_VARARGS, NULL},
    {"popleft", outgoing_popleft, METH_O, NULL},
    {"settle", outgoing_settle, METH_VARARGS, NULL},
    {"clear", outgoing_forget, METH_O, NULL},
    {"pending", outgoing_pending, METH_O, NULL},
    {"end", outgoing_end, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot outgoing_slots[] = {
    {Py_tp_init, outgoing_init},
    {Py_tp_traverse, outgoing_traverse},
    {Py_tp_clear, outgoing_clear},
    {Py_tp_dealloc, outgoing_dealloc},
    {Py_tp_methods, outgoing_methods},
    {Py_tp_getset, outgoing_attributes},
    {0, NULL},
};
PyType_Spec outgoing_spec = {
    .name = "protocol._native.Outgoing",
    .basicsize = sizeof(Outgoing),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = outgoing_slots,
};
