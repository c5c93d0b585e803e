// The usual message path of a gateway: bytes to bytes, without a Python object for each message.
//
// It takes what it knows and declines everything else, which Python's own code does then. It never names a fault.
#include "module.h"

#include "batches.h"
#include "entries.h"
#include "frames.h"
#include "hashing.h"
#include "intake.h"
#include "journal.h"
#include "proton.h"
#include "reading.h"

#include <stdlib.h>

struct proton proton;
PyObject *incoming_type, *outgoing_type;

// setup(functions, message_id_prefix): `functions` are addresses by name.
static PyObject *setup(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *functions;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    if (!PyArg_ParseTuple(arguments, "O!y#", &PyDict_Type, &functions, &prefix, &prefix_bytes)) return NULL;
    if (prefix_bytes != sizeof message_id_prefix) {
        PyErr_SetString(PyExc_ValueError, "a prefix of another length");
        return NULL;
    }
    memcpy(message_id_prefix, prefix, sizeof message_id_prefix);
#define FIND(result, name, arguments)                                                       \
    {                                                                                       \
        PyObject *address = PyDict_GetItemString(functions, "pn_" #name);                   \
        if (!address) {                                                                     \
            PyErr_SetString(PyExc_KeyError, "pn_" #name);                                   \
            return NULL;                                                                    \
        }                                                                                   \
        void *function = PyLong_AsVoidPtr(address);                                         \
        if (PyErr_Occurred()) return NULL;                                                  \
        memcpy(&proton.name, &function, sizeof function);                                   \
    }
    PROTON_FUNCTIONS(FIND)
#undef FIND
    Py_RETURN_NONE;
}

// transfer(data, at, end) -> end of the performative, handle, delivery-id or None, settled, more; or None
static PyObject *transfer_fields(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *data;
    Py_ssize_t size, at, end;
    if (!PyArg_ParseTuple(arguments, "y#nn", &data, &size, &at, &end)) return NULL;
    if (at < 0 || end < at || end > size) {
        PyErr_SetString(PyExc_ValueError, "no such bytes");
        return NULL;
    }
    struct transfer transfer;
    if (!transfer_read((const uint8_t *)data + at, (size_t)(end - at), &transfer) || transfer.transaction) Py_RETURN_NONE;
    PyObject *id = transfer.has_id ? PyLong_FromUnsignedLong(transfer.delivery_id) : Py_NewRef(Py_None);
    return Py_BuildValue("nINOO", at + (Py_ssize_t)transfer.payload_at, (unsigned int)transfer.handle, id,
                         transfer.settled ? Py_True : Py_False, transfer.more ? Py_True : Py_False);
}

// walk(data, at, largest, form, dispositions, next_id, few deliveries) -> at, next_id
// `form` is the head, the tag's head and the rest behind the tag, and the number of bytes of a delivery-id.
static PyObject *walk(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *data, *head, *tag_head, *rest;
    Py_ssize_t size, at, largest, head_bytes, tag_head_bytes, rest_bytes, id_bytes;
    int dispositions;
    unsigned long long next_id;
    unsigned int few_deliveries = 0;
    if (!PyArg_ParseTuple(arguments, "y#nn(y#y#y#n)pK|I", &data, &size, &at, &largest, &head, &head_bytes, &tag_head,
                          &tag_head_bytes, &rest, &rest_bytes, &id_bytes, &dispositions, &next_id, &few_deliveries))
        return NULL;
    if (at < 0 || at > size || largest < 0 || tag_head_bytes != 2 || (id_bytes != 1 && id_bytes != 4)) {
        PyErr_SetString(PyExc_ValueError, "no such form or bytes");
        return NULL;
    }
    struct form form = {.head = (const uint8_t *)head, .head_bytes = (size_t)head_bytes, .id_bytes = (size_t)id_bytes,
                        .rest = (const uint8_t *)rest, .rest_bytes = (size_t)rest_bytes,
                        .few_deliveries = few_deliveries};
    memcpy(form.tag_head, tag_head, 2);
    uint64_t id = next_id;
    size_t end = frames_walk((const uint8_t *)data, (size_t)at, (size_t)size, (size_t)largest, &form, dispositions, &id);
    return Py_BuildValue("nK", (Py_ssize_t)end, (unsigned long long)id);
}

// take_apart(message, message_id) -> layout, stored bytes, ttl in ms or None; None if the message is not usual
static PyObject *take_apart(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *message, *message_id;
    Py_ssize_t size, message_id_bytes;
    if (!PyArg_ParseTuple(arguments, "y#z#", &message, &size, &message_id, &message_id_bytes)) return NULL;
    if (message_id && message_id_bytes != MESSAGE_ID_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a message-id of another length");
        return NULL;
    }
    struct intake intake;
    if (!intake_take((const uint8_t *)message, (size_t)size, message_id != NULL, false, &intake)) Py_RETURN_NONE;
    PyObject *stored = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)intake.stored_bytes);
    if (!stored) return NULL;
    intake_store(&intake, (const uint8_t *)message, (size_t)size, (const uint8_t *)message_id,
                 (uint8_t *)PyBytes_AsString(stored));
    PyObject *ttl_ms = intake.ttl_ms ? PyLong_FromUnsignedLong(intake.ttl_ms) : Py_NewRef(Py_None);
    return Py_BuildValue("y#NN", intake.layout, (Py_ssize_t)LAYOUT_BYTES, stored, ttl_ms);
}

// render(record, sequence_number, delivery_count, lock token as uuid | None, until ms, keys = 0, is_copy = False)
//   -> bytes | None
static PyObject *render(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *record, *token = NULL;
    Py_ssize_t size, token_bytes = 0;
    unsigned long long sequence_number, locked_until_ms = 0;
    unsigned int delivery_count;
    int number_of_keys = NO_KEYS, is_copy = 0;
    if (!PyArg_ParseTuple(arguments, "y#KIz#K|ip", &record, &size, &sequence_number, &delivery_count, &token, &token_bytes,
                          &locked_until_ms, &number_of_keys, &is_copy))
        return NULL;
    enum keys keys = (enum keys)number_of_keys;
    if (!record_is_usual((const uint8_t *)record, (size_t)size, keys)) Py_RETURN_NONE;
    struct delivery delivery = {sequence_number, delivery_count, token != NULL, locked_until_ms, {0}, keys, is_copy};
    if (token && token_bytes != sizeof delivery.lock_token) {
        PyErr_SetString(PyExc_ValueError, "a token of another length");
        return NULL;
    }
    if (token) memcpy(delivery.lock_token, token, sizeof delivery.lock_token);
    size_t rendered_bytes = record_rendered_bytes((const uint8_t *)record, (size_t)size, &delivery);
    PyObject *rendered = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)rendered_bytes);
    if (rendered) {
        uint8_t *bytes = (uint8_t *)PyBytes_AsString(rendered);
        if (record_render((const uint8_t *)record, (size_t)size, &delivery, bytes) != bytes + rendered_bytes) abort();
    }
    return rendered;
}

// window(session) -> how many transfers its peer takes, besides those that are written
static PyObject *window(PyObject *module, PyObject *address) {
    (void)module;
    void *session = PyLong_AsVoidPtr(address);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(proton.session_remote_incoming_window(session));
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, NULL},
    {"walk", walk, METH_VARARGS, NULL},
    {"transfer", transfer_fields, METH_VARARGS, NULL},
    {"take_apart", take_apart, METH_VARARGS, NULL},
    {"render", render, METH_VARARGS, NULL},
    {"window", window, METH_O, NULL},
    {"accept_all", accept_all, METH_O, NULL},
    {"settle_all", settle_all, METH_VARARGS, NULL},
    {"store_run", store_run, METH_VARARGS, NULL},
    {"digests_of", digests_of, METH_O, NULL},
    {"refs_of", refs_of, METH_O, NULL},
    {"run_of_refs", run_of_refs, METH_O, NULL},
    {"split", split, METH_O, NULL},
    {"are_whole", are_whole, METH_O, NULL},
    {"take_usual", take_usual, METH_VARARGS, NULL},
    {"run_of_taken", run_of_taken, METH_VARARGS, NULL},
    {"give", give, METH_VARARGS, NULL},
    {"together", together, METH_VARARGS, NULL},
    {"ranges_of", ranges_of, METH_O, NULL},
    {"held_of", held_of, METH_VARARGS, NULL},
    {"lock", lock, METH_VARARGS, NULL},
    {"unlock", unlock, METH_VARARGS, NULL},
    {"keys_of", keys_of, METH_VARARGS, NULL},
    {"run_of", run_of, METH_O, NULL},
    {"parts_of", parts_of, METH_O, NULL},
    {"tokens_of", tokens_of, METH_O, NULL},
    {"pack_into", pack_into, METH_VARARGS, NULL},
    {"delete_all", delete_all, METH_VARARGS, NULL},
    {"passing", passing, METH_VARARGS, NULL},
    {"add_to_filter", add_to_filter, METH_VARARGS, NULL},
    {"seen_rows", seen_rows, METH_VARARGS, NULL},
    {"by_first_byte", by_first_byte, METH_O, NULL},
    {"skim", skim, METH_O, NULL},
    {"entries_of", entries_of, METH_VARARGS, NULL},
    {"numbers_of", numbers_of, METH_VARARGS, NULL},
    {"record_columns", record_columns, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **type) {
    *type = PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddObjectRef(module, name, *type) : -1;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "protocol._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    choose_hash();
    PyObject *module = PyModule_Create(&definition), *pump_type, *columns_type;
    if (!module) return NULL;
    if (add_type(module, &incoming_spec, "Incoming", &incoming_type) < 0 ||
        add_type(module, &outgoing_spec, "Outgoing", &outgoing_type) < 0 ||
        add_type(module, &pump_spec, "Pump", &pump_type) < 0 ||
        add_type(module, &columns_spec, "Columns", &columns_type) < 0 ||
        add_type(module, &entries_spec, "Entries", &entries_type) < 0 ||
        add_type(module, &keys_spec, "Keys", &keys_type) < 0 ||
        add_type(module, &bytes_spec, "Bytes", &bytes_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
