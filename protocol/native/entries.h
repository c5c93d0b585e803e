// Entries that are made available in queues: the same values in each, such as a topic's subscriptions get.
#ifndef PEEKLOCK_ENTRIES_H
#define PEEKLOCK_ENTRIES_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "memory.h"

// Queues whose entries have consecutive numbers from `first` on.
struct entries_queue {
    uint32_t queue_id;
    uint64_t first;
};

typedef struct {
    PyObject_HEAD
    PyObject *values;     // a tuple of bytes: the entries' values in each queue
    struct buffer queues; // struct entries_queue
} Entries;

extern PyObject *entries_type;
extern PyType_Spec entries_spec;

// The number of entries.
Py_ssize_t entries_length(PyObject *entries);

enum { PREFIX_BYTES = 5 }; // of a queue's keys; those of MESSAGES have none

// Keys that end with a number, most of which are consecutive.
struct numbers {
    uint64_t first, count;
};

typedef struct {
    PyObject_HEAD
    uint8_t prefix[PREFIX_BYTES];
    size_t prefix_bytes;
    struct buffer ranges; // struct numbers
    size_t count;         // of all keys
} Keys;

extern PyObject *keys_type;
extern PyType_Spec keys_spec;

// Keys without a number yet; NULL with an exception.
Keys *keys_new(const uint8_t *prefix, size_t prefix_bytes);
// Add a number at the end: false if there is no memory.
bool keys_add(Keys *keys, uint64_t number);

#endif
