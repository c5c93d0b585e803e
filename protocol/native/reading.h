// Columns of Spark's of the journal's stored records; `protocol/_native.pyi` says what the function does.
#ifndef PEEKLOCK_READING_H
#define PEEKLOCK_READING_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

PyObject *record_columns(PyObject *module, PyObject *arguments);

#endif
