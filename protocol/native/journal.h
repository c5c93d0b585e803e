// What the journal makes of turns; `protocol/_native.pyi` says what the functions do.
#ifndef PEEKLOCK_JOURNAL_H
#define PEEKLOCK_JOURNAL_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "memory.h"

extern PyType_Spec columns_spec, bytes_spec;
extern PyObject *bytes_type; // set when the module is made

// An object with these bytes, which the buffer has no more; NULL with an exception.
PyObject *take_bytes(struct buffer *buffer);

PyObject *skim(PyObject *module, PyObject *payload);
PyObject *entries_of(PyObject *module, PyObject *arguments);
PyObject *numbers_of(PyObject *module, PyObject *arguments);

#endif
