#include "runs.h"

const uint8_t *run_bytes(PyObject *run, size_t *size) {
    if (PyBytes_Check(run)) {
        *size = (size_t)PyBytes_Size(run);
        return (const uint8_t *)PyBytes_AsString(run);
    }
    if (!PyMemoryView_Check(run)) {
        PyErr_SetString(PyExc_TypeError, "a run is bytes or a memoryview");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(run, &view, PyBUF_SIMPLE) < 0) return NULL;
    const uint8_t *bytes = view.buf;
    *size = (size_t)view.len;
    PyBuffer_Release(&view); // the memory is there as long as `run` is
    return bytes;
}
