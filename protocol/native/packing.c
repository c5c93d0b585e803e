// Writes values as msgpack, as `msgpack.Packer` does.
#include "batches.h"

#include "bytes.h"
#include "entries.h"
#include "records.h"

#include <stdbool.h>

enum { MOST_LEVELS = 32 };

struct output {
    uint8_t *at, *end;
};

// The place for `size` bytes, or NULL if there is no room.
static uint8_t *room(struct output *output, size_t size) {
    if ((size_t)(output->end - output->at) < size) return NULL;
    uint8_t *place = output->at;
    output->at += size;
    return place;
}

// A constructor with a length of 1, 2 or 4 bytes: `first` is that with one byte, and the others follow.
static bool put_length(struct output *output, uint8_t first, size_t length) {
    uint8_t *at = room(output, length < 0x100 ? 2 : length < 0x10000 ? 3 : 5);
    if (!at || length > UINT32_MAX) return false;
    if (length < 0x100) {
        at[0] = first;
        at[1] = (uint8_t)length;
    } else if (length < 0x10000) {
        at[0] = (uint8_t)(first + 1);
        write_u16(at + 1, (uint16_t)length);
    } else {
        at[0] = (uint8_t)(first + 2);
        write_u32(at + 1, (uint32_t)length);
    }
    return true;
}

static bool put_bytes(struct output *output, PyObject *value) {
    size_t size = (size_t)PyBytes_Size(value);
    if (!put_length(output, 0xC4, size)) return false;
    uint8_t *at = room(output, size);
    if (at) memcpy(at, PyBytes_AsString(value), size);
    return at;
}

static bool put_text(struct output *output, PyObject *value) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) {
        PyErr_Clear(); // msgpack's packer names the fault
        return false;
    }
    uint8_t *at;
    if (size < 32) {
        at = room(output, 1);
        if (at) *at = (uint8_t)(0xA0 | size);
    } else {
        at = put_length(output, 0xD9, (size_t)size) ? output->at : NULL;
    }
    if (!at || !(at = room(output, (size_t)size))) return false;
    memcpy(at, text, (size_t)size);
    return true;
}

// `width` bytes of the value behind a constructor.
static bool put_number(struct output *output, uint8_t constructor, uint64_t value, int width) {
    uint8_t *at = room(output, 1 + (size_t)width);
    if (!at) return false;
    *at++ = constructor;
    for (int shift = 8 * (width - 1); shift >= 0; shift -= 8) *at++ = (uint8_t)(value >> shift);
    return true;
}

static bool put_int(struct output *output, PyObject *value) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        if (overflow < 0) return false;
        uint64_t large = PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) {
            PyErr_Clear(); // msgpack's packer names the fault
            return false;
        }
        return put_number(output, 0xCF, large, 8);
    }
    if (number >= -32 && number < 128) {
        uint8_t *at = room(output, 1);
        if (at) *at = (uint8_t)number;
        return at;
    }
    if (number >= 0) {
        if (number < 0x100) return put_number(output, 0xCC, (uint64_t)number, 1);
        if (number < 0x10000) return put_number(output, 0xCD, (uint64_t)number, 2);
        if (number < INT64_C(0x100000000)) return put_number(output, 0xCE, (uint64_t)number, 4);
        return put_number(output, 0xCF, (uint64_t)number, 8);
    }
    if (number >= -0x80) return put_number(output, 0xD0, (uint64_t)number, 1);
    if (number >= -0x8000) return put_number(output, 0xD1, (uint64_t)number, 2);
    if (number >= -INT64_C(0x80000000)) return put_number(output, 0xD2, (uint64_t)number, 4);
    return put_number(output, 0xD3, (uint64_t)number, 8);
}

static bool put_count(struct output *output, uint8_t few, uint8_t more, size_t count) {
    uint8_t *at;
    if (count < 16) {
        at = room(output, 1);
        if (at) *at = (uint8_t)(few | count);
        return at;
    }
    if (count < 0x10000) return put_number(output, more, count, 2);
    return count <= UINT32_MAX && put_number(output, (uint8_t)(more + 1), count, 4);
}

static bool put(struct output *output, PyObject *value, int levels);

static bool put_items(struct output *output, PyObject *sequence, Py_ssize_t count,
                      PyObject *(*item_at)(PyObject *, Py_ssize_t), int levels) {
    if (!put_count(output, 0x90, 0xDC, (size_t)count)) return false;
    for (Py_ssize_t index = 0; index < count; index++)
        if (!put(output, item_at(sequence, index), levels)) return false;
    return true;
}

// As items of QUEUE.
static bool put_entries(struct output *output, PyObject *value) {
    const Entries *entries = (Entries *)value;
    const struct entries_queue *queue = (struct entries_queue *)entries->queues.bytes;
    Py_ssize_t count = PyTuple_Size(entries->values);
    if (!put_count(output, 0x90, 0xDC, (size_t)entries_length(value))) return false;
    for (size_t left = entries->queues.size / sizeof *queue; left; left--, queue++) {
        for (Py_ssize_t index = 0; index < count; index++) {
            uint8_t *at = room(output, 3 + QUEUE_KEY_BYTES);
            if (!at) return false;
            at[0] = 0x92; // a pair, whose first is so many bytes
            at[1] = 0xC4;
            at[2] = QUEUE_KEY_BYTES;
            write_available_key(at + 3, queue->queue_id, queue->first + (uint64_t)index);
            if (!put_bytes(output, PyTuple_GetItem(entries->values, index))) return false;
        }
    }
    return true;
}

// As a list of bytes.
static bool put_keys(struct output *output, PyObject *value) {
    const Keys *keys = (Keys *)value;
    const struct numbers *range = (struct numbers *)keys->ranges.bytes;
    size_t size = keys->prefix_bytes + 8;
    if (!put_count(output, 0x90, 0xDC, keys->count)) return false;
    for (size_t left = keys->ranges.size / sizeof *range; left; left--, range++) {
        for (uint64_t ahead = 0; ahead < range->count; ahead++) {
            uint8_t *at = room(output, 2 + size);
            if (!at) return false;
            at[0] = 0xC4; // so many bytes
            at[1] = (uint8_t)size;
            write_u64(write_bytes(at + 2, keys->prefix, keys->prefix_bytes), range->first + ahead);
        }
    }
    return true;
}

// False if there is no room, or the value is of a kind that is not known here.
static bool put(struct output *output, PyObject *value, int levels) {
    if (!levels) return false;
    if (PyBytes_CheckExact(value)) return put_bytes(output, value);
    if (PyTuple_Check(value)) return put_items(output, value, PyTuple_Size(value), PyTuple_GetItem, levels - 1);
    if (value == Py_None || value == Py_True || value == Py_False) {
        uint8_t *at = room(output, 1);
        if (at) *at = value == Py_None ? 0xC0 : value == Py_True ? 0xC3 : 0xC2;
        return at;
    }
    if (PyLong_Check(value)) return put_int(output, value);
    if (PyList_CheckExact(value)) return put_items(output, value, PyList_Size(value), PyList_GetItem, levels - 1);
    if (PyUnicode_CheckExact(value)) return put_text(output, value);
    if ((PyObject *)Py_TYPE(value) == entries_type) return put_entries(output, value);
    if ((PyObject *)Py_TYPE(value) == keys_type) return put_keys(output, value);
    if (PyDict_CheckExact(value)) {
        PyObject *key, *item;
        Py_ssize_t position = 0;
        if (!put_count(output, 0x80, 0xDE, (size_t)PyDict_Size(value))) return false;
        while (PyDict_Next(value, &position, &key, &item))
            if (!put(output, key, levels - 1) || !put(output, item, levels - 1)) return false;
        return true;
    }
    return false;
}

// pack_into(value, buffer, at) -> the offset behind it; None if there is no room, or a kind of value is not known
PyObject *pack_into(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *value;
    Py_buffer buffer;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(arguments, "Ow*n", &value, &buffer, &at)) return NULL;
    PyObject *end = NULL;
    if (at < 0 || at > buffer.len) {
        PyErr_SetString(PyExc_ValueError, "no such offset");
    } else {
        struct output output = {(uint8_t *)buffer.buf + at, (uint8_t *)buffer.buf + buffer.len};
        bool is_packed = put(&output, value, MOST_LEVELS);
        end = is_packed ? PyLong_FromSsize_t(output.at - (uint8_t *)buffer.buf) : Py_NewRef(Py_None);
    }
    PyBuffer_Release(&buffer);
    return end;
}
