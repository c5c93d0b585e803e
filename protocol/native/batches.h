// Functions of the module for a partition; `protocol/_native.pyi` says what they do.
#ifndef PEEKLOCK_BATCHES_H
#define PEEKLOCK_BATCHES_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdint.h>

PyObject *store_run(PyObject *module, PyObject *arguments);
PyObject *digests_of(PyObject *module, PyObject *run);
PyObject *refs_of(PyObject *module, PyObject *items);
PyObject *run_of_refs(PyObject *module, PyObject *refs);
PyObject *split(PyObject *module, PyObject *refs);
PyObject *are_whole(PyObject *module, PyObject *records);
PyObject *take_usual(PyObject *module, PyObject *arguments);
PyObject *run_of_taken(PyObject *module, PyObject *arguments);
PyObject *give(PyObject *module, PyObject *arguments);
PyObject *together(PyObject *module, PyObject *arguments);
PyObject *ranges_of(PyObject *module, PyObject *ranges);
PyObject *held_of(PyObject *module, PyObject *arguments);
PyObject *lock(PyObject *module, PyObject *arguments);
PyObject *unlock(PyObject *module, PyObject *arguments);
PyObject *keys_of(PyObject *module, PyObject *arguments);
PyObject *run_of(PyObject *module, PyObject *records);
PyObject *parts_of(PyObject *module, PyObject *entries);
PyObject *tokens_of(PyObject *module, PyObject *ranges);
PyObject *pack_into(PyObject *module, PyObject *arguments);
PyObject *delete_all(PyObject *module, PyObject *arguments);
PyObject *passing(PyObject *module, PyObject *arguments);
PyObject *add_to_filter(PyObject *module, PyObject *arguments);
PyObject *seen_rows(PyObject *module, PyObject *arguments);
PyObject *by_first_byte(PyObject *module, PyObject *rows);

#endif
