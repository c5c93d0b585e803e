#include "entries.h"

#include "batches.h"
#include "bytes.h"

PyObject *entries_type;

Py_ssize_t entries_length(PyObject *self) {
    Entries *entries = (Entries *)self;
    return PyTuple_Size(entries->values) * (Py_ssize_t)(entries->queues.size / sizeof(struct entries_queue));
}

// Entries(values, [(queue id, first number), ...])
static int entries_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Entries *entries = (Entries *)self;
    PyObject *values, *queues;
    static char *names[] = {"values", "queues", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!", names, &PyList_Type, &values, &PyList_Type, &queues))
        return -1;
    for (Py_ssize_t index = 0; index < PyList_Size(values); index++) {
        if (!PyBytes_CheckExact(PyList_GetItem(values, index))) {
            PyErr_SetString(PyExc_TypeError, "a value that is no bytes");
            return -1;
        }
    }
    PyObject *before = entries->values;
    entries->values = PyList_AsTuple(values);
    Py_XDECREF(before);
    if (!entries->values) return -1;
    entries->queues.size = 0;
    for (Py_ssize_t index = 0; index < PyList_Size(queues); index++) {
        unsigned int queue_id;
        unsigned long long first;
        if (!PyArg_ParseTuple(PyList_GetItem(queues, index), "IK", &queue_id, &first)) return -1;
        if (!buffer_reserve(&entries->queues, sizeof(struct entries_queue))) {
            PyErr_NoMemory();
            return -1;
        }
        ((struct entries_queue *)(entries->queues.bytes + entries->queues.size))[0] = (struct entries_queue){queue_id, first};
        entries->queues.size += sizeof(struct entries_queue);
    }
    return 0;
}

static void entries_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Entries *)self)->values);
    buffer_free(&((Entries *)self)->queues);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *entries_items(PyObject *self, PyObject *none) {
    (void)none;
    Entries *entries = (Entries *)self;
    Py_ssize_t count = PyTuple_Size(entries->values);
    PyObject *items = PyList_New(entries_length(self));
    const struct entries_queue *queue = (struct entries_queue *)entries->queues.bytes;
    for (Py_ssize_t at = 0; items && at < PyList_Size(items); at++) {
        PyObject *key = available_key(queue[at / count].queue_id, queue[at / count].first + (uint64_t)(at % count));
        PyObject *item = key ? PyTuple_Pack(2, key, PyTuple_GetItem(entries->values, at % count)) : NULL;
        Py_XDECREF(key);
        if (item) PyList_SetItem(items, at, item);
        else Py_CLEAR(items);
    }
    return items;
}

static PyMethodDef entries_methods[] = {
    {"items", entries_items, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot entries_slots[] = {
    {Py_tp_init, entries_init},     {Py_tp_dealloc, entries_dealloc}, {Py_tp_methods, entries_methods},
    {Py_sq_length, entries_length}, {0, NULL},
};
PyType_Spec entries_spec = {
    .name = "protocol._native.Entries",
    .basicsize = sizeof(Entries),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = entries_slots,
};
