#include "intake.h"
#include "module.h"
#include "proton.h"

// Messages that have gathered to so many bytes leave before the end of the turn: see `broker.gateway.router`.
#define EARLY_BYTES (64 << 10)

uint8_t message_id_prefix[18];
static uint64_t message_ids;

static void next_message_id(uint8_t *id) {
    uint8_t *at = write_bytes(id, message_id_prefix, sizeof message_id_prefix);
    uint64_t number = ++message_ids;
    for (int shift = 60; shift >= 0; shift -= 4) *at++ = (uint8_t)"0123456789abcdef"[number >> shift & 15];
}

static int call(PyObject *owner, const char *method) {
    PyObject *result = PyObject_CallMethod(owner, method, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

bool transaction_is(const struct transaction *transaction, const uint8_t *id) {
    if (!id || !transaction->is_one) return !id && !transaction->is_one;
    return !memcmp(transaction->id, id, TRANSACTION_BYTES);
}

void transaction_set(struct transaction *transaction, const uint8_t *id) {
    transaction->is_one = id;
    if (id) memcpy(transaction->id, id, TRANSACTION_BYTES);
}

PyObject *transaction_id(const struct transaction *transaction) {
    if (!transaction->is_one) return Py_NewRef(Py_None);
    return PyBytes_FromStringAndSize((const char *)transaction->id, TRANSACTION_BYTES);
}

// The place of a record of so many bytes, with its size: behind those that have gathered. NULL with an exception.
static uint8_t *place_in_run(Incoming *incoming, size_t bytes) {
    struct buffer *run = &incoming->run;
    if (bytes > run->capacity - run->size) {
        if (bytes > EARLY_BYTES && !incoming->count) { // it leaves at once, so that it needs no copy
            incoming->large = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
            return incoming->large ? (uint8_t *)PyBytes_AsString(incoming->large) : NULL;
        }
        if (!buffer_reserve(run, bytes)) {
            PyErr_NoMemory();
            return NULL;
        }
    }
    run->size += bytes;
    return run->bytes + run->size - bytes;
}

int incoming_take(Incoming *incoming, void *delivery, const uint8_t *message, size_t size, bool settled,
                  const uint8_t *transaction) {
    struct intake intake;
    uint8_t id[MESSAGE_ID_BYTES];
    if (incoming->max_message_bytes && size > incoming->max_message_bytes) return 0;
    if (!intake_take(message, size, incoming->gives_ids, incoming->takes_sessions, &intake)) return 0;
    if ((incoming->needs_id && !intake.has_id) || (incoming->needs_session && !intake.has_session)) return 0;
    if (intake.stored_bytes > UINT32_MAX - RECORD_HEADER_BYTES) return 0;
    if (!transaction_is(&incoming->transaction, transaction)) {
        if (incoming->count && call(incoming->owner, "post_early") < 0) return -1;
        transaction_set(&incoming->transaction, transaction);
    }
    struct pending *pending = ring_push(&incoming->pending);
    if (!pending) {
        PyErr_NoMemory();
        return -1;
    }
    uint8_t *at = place_in_run(incoming, RECORD_SIZE_BYTES + RECORD_HEADER_BYTES + intake.stored_bytes);
    if (!at) {
        ring_pop_last(&incoming->pending);
        return -1;
    }
    *pending = (struct pending){settled ? NULL : delivery, 0};
    if (settled) proton.delivery_settle(delivery);
    at = write_u32(at, (uint32_t)(RECORD_HEADER_BYTES + intake.stored_bytes));
    memset(at, 0, LAYOUT_AT); // the partition knows the times
    write_u64(at + EXPIRES_AT, intake.ttl_ms);
    at = write_bytes(at + LAYOUT_AT, intake.layout, LAYOUT_BYTES);
    if (intake.properties_head_bytes) next_message_id(id);
    intake_store(&intake, message, size, id, at);
    incoming->message_bytes += size;
    if (incoming->count++ == 0 && call(incoming->owner, "on_gathering") < 0) return -1;
    if (incoming->message_bytes > EARLY_BYTES && call(incoming->owner, "post_early") < 0) return -1;
    return 1;
}

static int incoming_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Incoming *incoming = (Incoming *)self;
    unsigned long long link, max_message_bytes;
    PyObject *owner;
    int gives_ids = 0, needs_id = 0, takes_sessions = 0, needs_session = 0, takes_transactions = 0;
    static char *names[] = {"link",           "owner",         "max_message_bytes",  "gives_ids", "needs_id",
                            "takes_sessions", "needs_session", "takes_transactions", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KOK|ppppp", names, &link, &owner, &max_message_bytes,
                                     &gives_ids, &needs_id, &takes_sessions, &needs_session, &takes_transactions))
        return -1;
    incoming->link = pointer_of(link);
    incoming->owner = Py_NewRef(owner);
    incoming->max_message_bytes = max_message_bytes;
    incoming->gives_ids = gives_ids;
    incoming->needs_id = needs_id;
    incoming->takes_sessions = takes_sessions;
    incoming->needs_session = needs_session;
    incoming->takes_transactions = takes_transactions;
    incoming->may_be_unfinished = true; // a delivery that began before
    incoming->pending.item_bytes = sizeof(struct pending);
    return 0;
}

static int incoming_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Incoming *)self)->owner);
    return 0;
}

static int incoming_clear(PyObject *self) {
    Py_CLEAR(((Incoming *)self)->owner);
    return 0;
}

void incoming_free(Incoming *incoming) {
    Py_CLEAR(incoming->large);
    buffer_free(&incoming->run);
    buffer_free(&incoming->parts);
    ring_free(&incoming->pending);
    incoming->count = incoming->message_bytes = 0;
    incoming->has_begun = false;
}

static void incoming_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    incoming_clear(self);
    incoming_free((Incoming *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *incoming_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Incoming *)self)->count);
}

static PyObject *incoming_message_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((Incoming *)self)->message_bytes);
}

static Py_ssize_t incoming_length(PyObject *self) { return (Py_ssize_t)((Incoming *)self)->pending.count; }

static PyObject *incoming_take_run(PyObject *self, PyObject *none) {
    (void)none;
    Incoming *incoming = (Incoming *)self;
    PyObject *large = incoming->large, *run = large;
    size_t large_bytes = large ? (size_t)PyBytes_Size(large) : 0;
    if (!large || incoming->run.size) {
        run = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(large_bytes + incoming->run.size));
        if (!run) return NULL;
        uint8_t *at = (uint8_t *)PyBytes_AsString(run);
        if (large) at = write_bytes(at, PyBytes_AsString(large), large_bytes);
        if (incoming->run.size) write_bytes(at, incoming->run.bytes, incoming->run.size);
        Py_XDECREF(large);
    }
    incoming->large = NULL;
    incoming->run.size = incoming->count = incoming->message_bytes = 0;
    if (incoming->run.capacity > KEPT_BUFFER_BYTES) buffer_free(&incoming->run);
    return run;
}

static PyObject *incoming_take_parts(PyObject *self, PyObject *none) {
    (void)none;
    Incoming *incoming = (Incoming *)self;
    if (!incoming->has_begun) Py_RETURN_NONE;
    PyObject *parts = PyBytes_FromStringAndSize((const char *)incoming->parts.bytes, (Py_ssize_t)incoming->parts.size);
    if (!parts) return NULL;
    incoming->has_begun = false;
    buffer_free(&incoming->parts);
    return parts;
}

static PyObject *incoming_append(PyObject *self, PyObject *address) {
    unsigned long long delivery = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return NULL;
    struct pending *pending = ring_push(&((Incoming *)self)->pending);
    if (!pending) return PyErr_NoMemory();
    *pending = (struct pending){pointer_of(delivery), 0};
    Py_RETURN_NONE;
}

static PyObject *incoming_transaction(PyObject *self, void *closure) {
    (void)closure;
    return transaction_id(&((Incoming *)self)->transaction);
}

static PyObject *pop(Incoming *incoming, bool first) {
    struct ring *ring = &incoming->pending;
    if (!ring->count) {
        PyErr_SetString(PyExc_IndexError, "no delivery is pending");
        return NULL;
    }
    struct pending *pending = ring_at(ring, first ? 0 : ring->count - 1);
    PyObject *address = PyLong_FromUnsignedLongLong(address_of(pending->delivery));
    (first ? ring_pop : ring_pop_last)(ring);
    return address;
}

static PyObject *incoming_popleft(PyObject *self, PyObject *none) {
    (void)none;
    return pop((Incoming *)self, true);
}

static PyObject *incoming_pop(PyObject *self, PyObject *none) {
    (void)none;
    return pop((Incoming *)self, false);
}

static PyObject *incoming_take_pending(PyObject *self, PyObject *number) {
    struct ring *ring = &((Incoming *)self)->pending;
    size_t count = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) return NULL;
    if (count > ring->count) {
        PyErr_SetString(PyExc_IndexError, "fewer deliveries are pending");
        return NULL;
    }
    PyObject *taken = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(uint64_t)));
    if (!taken) return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(taken) + count * sizeof(uint64_t);
    for (; count; count--, ring_pop_last(ring)) {
        uint64_t address = address_of(((struct pending *)ring_at(ring, ring->count - 1))->delivery);
        at -= sizeof address;
        write_bytes(at, &address, sizeof address);
    }
    return taken;
}

PyObject *accept_all(PyObject *module, PyObject *addresses) {
    (void)module;
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(addresses, &bytes, &size) < 0) return NULL;
    for (Py_ssize_t at = 0; size - at >= (Py_ssize_t)sizeof(uint64_t); at += sizeof(uint64_t)) {
        uint64_t address;
        memcpy(&address, bytes + at, sizeof address);
        if (address) {
            proton.delivery_update(pointer_of(address), ACCEPTED);
            proton.delivery_settle(pointer_of(address));
        }
    }
    Py_RETURN_NONE;
}

// settle_all(addresses, state, its fields)
PyObject *settle_all(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *bytes, *fields;
    Py_ssize_t size, fields_bytes;
    unsigned long long state;
    if (!PyArg_ParseTuple(arguments, "y#Ky#", &bytes, &size, &state, &fields, &fields_bytes)) return NULL;
    for (Py_ssize_t at = 0; size - at >= (Py_ssize_t)sizeof(uint64_t); at += sizeof(uint64_t)) {
        uint64_t address;
        memcpy(&address, bytes + at, sizeof address);
        if (!address) continue;
        void *data = proton.disposition_data(proton.delivery_local(pointer_of(address)));
        proton.data_clear(data);
        proton.data_decode(data, fields, (size_t)fields_bytes);
        proton.delivery_update(pointer_of(address), state);
        proton.delivery_settle(pointer_of(address));
    }
    Py_RETURN_NONE;
}

static PyObject *incoming_accept(PyObject *self, PyObject *number) {
    struct ring *ring = &((Incoming *)self)->pending;
    size_t count = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) return NULL;
    if (count > ring->count) {
        PyErr_SetString(PyExc_IndexError, "fewer deliveries are pending");
        return NULL;
    }
    for (; count; count--) {
        void *delivery = ((struct pending *)ring_at(ring, 0))->delivery;
        ring_pop(ring);
        if (delivery) {
            proton.delivery_update(delivery, ACCEPTED);
            proton.delivery_settle(delivery);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *incoming_forget(PyObject *self, PyObject *none) {
    (void)none;
    incoming_free((Incoming *)self);
    Py_RETURN_NONE;
}

static PyGetSetDef incoming_attributes[] = {
    {"count", incoming_count, NULL, NULL, NULL},
    {"message_bytes", incoming_message_bytes, NULL, NULL, NULL},
    {"transaction", incoming_transaction, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef incoming_methods[] = {
    {"take_run", incoming_take_run, METH_NOARGS, NULL},
    {"take_parts", incoming_take_parts, METH_NOARGS, NULL},
    {"append", incoming_append, METH_O, NULL},
    {"popleft", incoming_popleft, METH_NOARGS, NULL},
    {"pop", incoming_pop, METH_NOARGS, NULL},
    {"take_pending", incoming_take_pending, METH_O, NULL},
    {"accept", incoming_accept, METH_O, NULL},
    {"clear", incoming_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot incoming_slots[] = {
    {Py_tp_init, incoming_init},
    {Py_tp_traverse, incoming_traverse},
    {Py_tp_clear, incoming_clear},
    {Py_tp_dealloc, incoming_dealloc},
    {Py_tp_methods, incoming_methods},
    {Py_tp_getset, incoming_attributes},
    {Py_sq_length, incoming_length},
    {0, NULL},
};
PyType_Spec incoming_spec = {
    .name = "protocol._native.Incoming",
    .basicsize = sizeof(Incoming),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = incoming_slots,
};
