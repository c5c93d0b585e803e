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

#endif
