// Loops over digests of message ids, and over rows that begin with one: see `storage.seen_runs`.
#include "batches.h"

#include "bytes.h"

#include <stdbool.h>

enum { DIGEST_BYTES = 16, SEEN_BYTES = 32, FIRST_BYTES = 256 };

// Two bits of a byte, for the low five bits of a digest's first eight bytes: those of `_MASKS` of the Python module.
static uint8_t mask_of(uint64_t word) {
    static uint8_t masks[32];
    if (!masks[0]) {
        int count = 0;
        for (int low = 0; low < 8; low++)
            for (int high = low + 1; high < 8; high++) masks[count++] = (uint8_t)(1 << low | 1 << high);
        for (int again = 0; count < 32; count++, again++) masks[count] = masks[again];
    }
    return masks[word & 31];
}

// The bytes of an item of a list, of which there are `least` at least; NULL with an exception.
static const uint8_t *bytes_at(PyObject *list, Py_ssize_t index, Py_ssize_t least) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyList_GetItem(list, index), &bytes, &size) < 0) return NULL;
    if (size < least) {
        PyErr_SetString(PyExc_ValueError, "too few bytes");
        return NULL;
    }
    return (const uint8_t *)bytes;
}

// The place of a digest's byte in a filter; -1 with an exception.
static Py_ssize_t place_of(uint64_t word, int shift, const Py_buffer *filter) {
    uint64_t place = shift > 0 && shift < 64 ? word >> shift : UINT64_MAX;
    if (place < (uint64_t)filter->len) return (Py_ssize_t)place;
    PyErr_SetString(PyExc_ValueError, "a filter of another size");
    return -1;
}

// passing(digests, filter, shift) -> the digests that the filter does not exclude
PyObject *passing(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *digests;
    Py_buffer filter;
    int shift;
    if (!PyArg_ParseTuple(arguments, "O!y*i", &PyList_Type, &digests, &filter, &shift)) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t index = 0; found && index < PyList_Size(digests); index++) {
        const uint8_t *digest = bytes_at(digests, index, 8);
        uint64_t word = digest ? read_u64(digest) : 0;
        Py_ssize_t place = digest ? place_of(word, shift, &filter) : -1;
        uint8_t mask = mask_of(word);
        if (place < 0) Py_CLEAR(found);
        else if ((((uint8_t *)filter.buf)[place] & mask) == mask && PyList_Append(found, PyList_GetItem(digests, index)) < 0)
            Py_CLEAR(found);
    }
    PyBuffer_Release(&filter);
    return found;
}

// add_to_filter(filter, shift, rows)
PyObject *add_to_filter(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *rows;
    Py_buffer filter;
    int shift;
    if (!PyArg_ParseTuple(arguments, "w*iO!", &filter, &shift, &PyList_Type, &rows)) return NULL;
    bool failed = false;
    for (Py_ssize_t index = 0; !failed && index < PyList_Size(rows); index++) {
        const uint8_t *row = bytes_at(rows, index, 8);
        uint64_t word = row ? read_u64(row) : 0;
        Py_ssize_t place = row ? place_of(word, shift, &filter) : -1;
        if (place < 0) failed = true;
        else ((uint8_t *)filter.buf)[place] |= mask_of(word);
    }
    PyBuffer_Release(&filter);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

// seen_rows(digests, end_ms, first number) -> rows
PyObject *seen_rows(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *digests;
    long long end_ms;
    unsigned long long number;
    if (!PyArg_ParseTuple(arguments, "O!LK", &PyList_Type, &digests, &end_ms, &number)) return NULL;
    PyObject *rows = PyList_New(PyList_Size(digests));
    for (Py_ssize_t index = 0; rows && index < PyList_Size(rows); index++) {
        const uint8_t *digest = bytes_at(digests, index, DIGEST_BYTES);
        uint8_t row[SEEN_BYTES];
        if (digest) write_u64(write_u64(write_bytes(row, digest, DIGEST_BYTES), (uint64_t)end_ms), number++);
        PyObject *made = digest ? PyBytes_FromStringAndSize((char *)row, sizeof row) : NULL;
        if (made) PyList_SetItem(rows, index, made);
        else Py_CLEAR(rows);
    }
    return rows;
}

// by_first_byte(rows) -> for each first byte, the rows that begin with it
PyObject *by_first_byte(PyObject *module, PyObject *rows) {
    (void)module;
    if (!PyList_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "no list");
        return NULL;
    }
    PyObject *buckets = PyList_New(FIRST_BYTES);
    for (Py_ssize_t first = 0; buckets && first < FIRST_BYTES; first++) {
        PyObject *bucket = PyList_New(0);
        if (bucket) PyList_SetItem(buckets, first, bucket);
        else Py_CLEAR(buckets);
    }
    for (Py_ssize_t index = 0; buckets && index < PyList_Size(rows); index++) {
        const uint8_t *row = bytes_at(rows, index, 1);
        if (!row || PyList_Append(PyList_GetItem(buckets, row[0]), PyList_GetItem(rows, index)) < 0) Py_CLEAR(buckets);
    }
    return buckets;
}
