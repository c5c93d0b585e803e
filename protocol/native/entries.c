#include "entries.h"

#include "bytes.h"
#include "records.h"

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

static PyObject *available_key(uint32_t queue_id, uint64_t number) {
    uint8_t key[QUEUE_KEY_BYTES];
    write_available_key(key, queue_id, number);
    return PyBytes_FromStringAndSize((const char *)key, sizeof key);
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

// part(begin, end): these of the only queue
static PyObject *entries_part(PyObject *self, PyObject *arguments) {
    const Entries *entries = (Entries *)self;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(arguments, "nn", &begin, &end)) return NULL;
    if (entries->queues.size != sizeof(struct entries_queue) || begin < 0 || end < begin || end > entries_length(self)) {
        PyErr_SetString(PyExc_ValueError, "no such part");
        return NULL;
    }
    PyTypeObject *type = (PyTypeObject *)entries_type;
    Entries *part = (Entries *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!part) return NULL;
    part->values = PyTuple_GetSlice(entries->values, begin, end);
    if (!part->values || !buffer_reserve(&part->queues, sizeof(struct entries_queue))) {
        if (part->values) PyErr_NoMemory();
        Py_DECREF((PyObject *)part);
        return NULL;
    }
    struct entries_queue *queue = (struct entries_queue *)part->queues.bytes;
    *queue = *(struct entries_queue *)entries->queues.bytes;
    queue->first += (uint64_t)begin;
    part->queues.size = sizeof *queue;
    return (PyObject *)part;
}

// The prefix of the keys of the only queue, and its first number; None if there are several.
static PyObject *entries_begin(PyObject *self, void *closure) {
    (void)closure;
    const Entries *entries = (Entries *)self;
    if (entries->queues.size != sizeof(struct entries_queue)) Py_RETURN_NONE;
    const struct entries_queue *queue = (struct entries_queue *)entries->queues.bytes;
    uint8_t key[PREFIX_BYTES + 8];
    write_available_key(key, queue->queue_id, queue->first);
    return Py_BuildValue("y#K", key, (Py_ssize_t)PREFIX_BYTES, (unsigned long long)queue->first);
}

static PyGetSetDef entries_attributes[] = {
    {"begin", entries_begin, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef entries_methods[] = {
    {"items", entries_items, METH_NOARGS, NULL},
    {"part", entries_part, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot entries_slots[] = {
    {Py_tp_init, entries_init},
    {Py_tp_dealloc, entries_dealloc},
    {Py_tp_methods, entries_methods},
    {Py_tp_getset, entries_attributes},
    {Py_sq_length, entries_length},
    {0, NULL},
};
PyType_Spec entries_spec = {
    .name = "protocol._native.Entries",
    .basicsize = sizeof(Entries),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = entries_slots,
};

// -- keys

PyObject *keys_type;

Keys *keys_new(const uint8_t *prefix, size_t prefix_bytes) {
    PyTypeObject *type = (PyTypeObject *)keys_type;
    Keys *keys = (Keys *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!keys) return NULL;
    memcpy(keys->prefix, prefix, prefix_bytes);
    keys->prefix_bytes = prefix_bytes;
    return keys;
}

static bool add_range(Keys *keys, uint64_t first, uint64_t count) {
    struct numbers *last = keys->ranges.size ? (struct numbers *)(keys->ranges.bytes + keys->ranges.size) - 1 : NULL;
    keys->count += count;
    if (last && first - last->first == last->count) {
        last->count += count;
        return true;
    }
    if (!buffer_reserve(&keys->ranges, sizeof *last)) return false;
    *(struct numbers *)(keys->ranges.bytes + keys->ranges.size) = (struct numbers){first, count};
    keys->ranges.size += sizeof *last;
    return true;
}

bool keys_add(Keys *keys, uint64_t number) { return add_range(keys, number, 1); }

// Keys(prefix, [(first number, count), ...])
static int keys_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Keys *keys = (Keys *)self;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    PyObject *ranges;
    static char *names[] = {"prefix", "ranges", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "y#O!", names, &prefix, &prefix_bytes, &PyList_Type, &ranges))
        return -1;
    if (prefix_bytes && prefix_bytes != PREFIX_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a prefix of another length");
        return -1;
    }
    memcpy(keys->prefix, prefix, (size_t)prefix_bytes);
    keys->prefix_bytes = (size_t)prefix_bytes;
    keys->ranges.size = keys->count = 0;
    for (Py_ssize_t index = 0; index < PyList_Size(ranges); index++) {
        unsigned long long first, count;
        if (!PyArg_ParseTuple(PyList_GetItem(ranges, index), "KK", &first, &count)) return -1;
        if (count > SIZE_MAX / 2 - keys->count) {
            PyErr_SetString(PyExc_ValueError, "too many keys");
            return -1;
        }
        if (count && !add_range(keys, first, count)) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

static void keys_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    buffer_free(&((Keys *)self)->ranges);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static Py_ssize_t keys_length(PyObject *self) { return (Py_ssize_t)((Keys *)self)->count; }

static PyObject *keys_keys(PyObject *self, PyObject *none) {
    (void)none;
    const Keys *keys = (Keys *)self;
    const struct numbers *range = (struct numbers *)keys->ranges.bytes;
    PyObject *list = PyList_New((Py_ssize_t)keys->count);
    uint64_t ahead = 0;
    for (Py_ssize_t at = 0; list && at < (Py_ssize_t)keys->count; at++) {
        uint8_t key[PREFIX_BYTES + 8];
        write_u64(write_bytes(key, keys->prefix, keys->prefix_bytes), range->first + ahead);
        PyObject *made = PyBytes_FromStringAndSize((char *)key, (Py_ssize_t)keys->prefix_bytes + 8);
        if (made) PyList_SetItem(list, at, made);
        else Py_CLEAR(list);
        if (++ahead == range->count) range++, ahead = 0;
    }
    return list;
}

static PyObject *keys_ranges(PyObject *self, void *closure) {
    (void)closure;
    const Keys *keys = (Keys *)self;
    size_t count = keys->ranges.size / sizeof(struct numbers);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t at = 0; list && at < count; at++) {
        const struct numbers *range = (struct numbers *)keys->ranges.bytes + at;
        PyObject *pair = Py_BuildValue("KK", (unsigned long long)range->first, (unsigned long long)range->count);
        if (pair) PyList_SetItem(list, (Py_ssize_t)at, pair);
        else Py_CLEAR(list);
    }
    return list;
}

static PyObject *keys_prefix(PyObject *self, void *closure) {
    (void)closure;
    const Keys *keys = (Keys *)self;
    return PyBytes_FromStringAndSize((const char *)keys->prefix, (Py_ssize_t)keys->prefix_bytes);
}

// The highest key; empty bytes if there is none.
static PyObject *keys_highest(PyObject *self, void *closure) {
    (void)closure;
    const Keys *keys = (Keys *)self;
    uint8_t key[PREFIX_BYTES + 8];
    uint64_t highest = 0;
    for (size_t at = 0; at < keys->ranges.size / sizeof(struct numbers); at++) {
        const struct numbers *range = (struct numbers *)keys->ranges.bytes + at;
        if (range->first + (range->count - 1) > highest) highest = range->first + (range->count - 1);
    }
    if (!keys->count) return PyBytes_FromStringAndSize(NULL, 0);
    write_u64(write_bytes(key, keys->prefix, keys->prefix_bytes), highest);
    return PyBytes_FromStringAndSize((char *)key, (Py_ssize_t)keys->prefix_bytes + 8);
}

// of(ranges): with the same prefix
static PyObject *keys_of_ranges(PyObject *self, PyObject *ranges) {
    const Keys *keys = (Keys *)self;
    return PyObject_CallFunction(keys_type, "y#O", keys->prefix, (Py_ssize_t)keys->prefix_bytes, ranges);
}

static PyGetSetDef keys_attributes[] = {
    {"prefix", keys_prefix, NULL, NULL, NULL},
    {"ranges", keys_ranges, NULL, NULL, NULL},
    {"highest", keys_highest, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef keys_methods[] = {
    {"keys", keys_keys, METH_NOARGS, NULL},
    {"of", keys_of_ranges, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot keys_slots[] = {
    {Py_tp_init, keys_init},
    {Py_tp_dealloc, keys_dealloc},
    {Py_tp_methods, keys_methods},
    {Py_tp_getset, keys_attributes},
    {Py_sq_length, keys_length},
    {0, NULL},
};
PyType_Spec keys_spec = {
    .name = "protocol._native.Keys",
    .basicsize = sizeof(Keys),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = keys_slots,
};
