// Runs of messages as Python has them.
#ifndef PEEKLOCK_RUNS_H
#define PEEKLOCK_RUNS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

// The bytes of a run, as long as there is the object: bytes, or a view of memory that does not change. NULL with an
// exception.
const uint8_t *run_bytes(PyObject *run, size_t *size);

#endif
