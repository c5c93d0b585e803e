// The journal's rows of usual messages: from the bytes of a turn to the buffers of columns, as Arrow has them.
#include "journal.h"

#include "bytes.h"
#include "memory.h"
#include "packed.h"
#include "records.h"
#include "turns.h"

#include <stdlib.h>
#include <string.h>

#define NEVER INT64_MAX
#define FIRST_MS (-INT64_C(62135596800000)) // the calendar, as `storage.journal.rows` has it
#define LAST_MS INT64_C(253402300799999)

// -- columns

enum width { NARROW = 4, WIDE = 8, BYTES = 0 };

// A column has as many rows as it needs for its last value: what is missing behind that is null.
struct column {
    enum width width;
    size_t rows, nulls;
    struct buffer valid;  // a bit a row
    struct buffer values; // numbers, or the 4-byte offsets of each row's bytes and of the end of all
    struct buffer bytes;
};

// Those of the texts of a record come first.
enum { ENQUEUED = TEXTS, SCHEDULED, EXPIRES, SIZE, ORIGIN_NUMBER, COPIES, RECORD, OVERLAY, NUMBER, COUNT, COLUMNS };
static const enum width WIDTHS[COLUMNS] = {
    BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, WIDE, WIDE, WIDE, WIDE, WIDE, NARROW, BYTES, BYTES, WIDE, NARROW,
};

typedef struct {
    PyObject_HEAD
    size_t rows;     // that are whole
    size_t messages; // rows of which it has the message
    struct column columns[COLUMNS];
} Columns;

static size_t value_bytes(const struct column *column) { return column->width ? column->width : 4; }

static bool too_many(void) {
    PyErr_SetString(PyExc_OverflowError, "the rows of a batch have more than 2 GiB");
    return false;
}

// Make room for a value in the row, and nulls before it. False with an exception.
static bool begin_value(struct column *column, size_t row) {
    size_t gap = row - column->rows, bytes = value_bytes(column), bitmap = row / 8 + 1;
    if (!buffer_reserve(&column->valid, bitmap - column->valid.size) ||
        !buffer_reserve(&column->values, (gap + 2) * bytes)) {
        PyErr_NoMemory();
        return false;
    }
    if (!column->width && !column->values.size) {
        memset(column->values.bytes, 0, bytes);
        column->values.size = bytes;
    }
    memset(column->valid.bytes + column->valid.size, 0, bitmap - column->valid.size);
    column->valid.size = bitmap;
    uint8_t *value = column->values.bytes + column->values.size;
    uint32_t offset = (uint32_t)column->bytes.size;
    for (size_t index = 0; index < gap; index++) {
        if (column->width) memset(value + index * bytes, 0, bytes);
        else memcpy(value + index * bytes, &offset, bytes);
    }
    column->values.size += gap * bytes;
    column->nulls += gap;
    column->rows = row;
    return true;
}

static void end_value(struct column *column, const void *value) {
    memcpy(column->values.bytes + column->values.size, value, value_bytes(column));
    column->values.size += value_bytes(column);
    column->valid.bytes[column->rows / 8] |= (uint8_t)(1 << column->rows % 8);
    column->rows++;
}

static bool put_number(struct column *column, size_t row, int64_t value) {
    if (!begin_value(column, row)) return false;
    int32_t narrow = (int32_t)value;
    end_value(column, column->width == WIDE ? (const void *)&value : &narrow);
    return true;
}

static bool put_bytes(struct column *column, size_t row, const uint8_t *bytes, size_t size) {
    if (size > INT32_MAX - column->bytes.size) return too_many();
    if (!begin_value(column, row)) return false;
    if (!buffer_reserve(&column->bytes, size)) {
        PyErr_NoMemory();
        return false;
    }
    if (size) memcpy(column->bytes.bytes + column->bytes.size, bytes, size);
    column->bytes.size += size;
    uint32_t offset = (uint32_t)column->bytes.size;
    end_value(column, &offset);
    return true;
}

// A value of Python: None, a number, bytes or a text. False with an exception.
static bool put_object(struct column *column, size_t row, PyObject *object) {
    if (object == Py_None) return true;
    if (column->width) {
        long long value = PyLong_AsLongLong(object);
        if (value == -1 && PyErr_Occurred()) return false;
        if (column->width == NARROW && (value < INT32_MIN || value > INT32_MAX)) {
            PyErr_SetString(PyExc_OverflowError, "a number of a row has more than 32 bits");
            return false;
        }
        return put_number(column, row, value);
    }
    Py_ssize_t size;
    char *bytes;
    const char *text;
    if (PyUnicode_Check(object)) {
        if (!(text = PyUnicode_AsUTF8AndSize(object, &size))) return false;
        return put_bytes(column, row, (const uint8_t *)text, (size_t)size);
    }
    return PyBytes_AsStringAndSize(object, &bytes, &size) == 0 && put_bytes(column, row, (const uint8_t *)bytes, (size_t)size);
}

// As `storage.journal.columns.Properties`.
static bool put_texts(Columns *columns, PyObject *texts) {
    if (!PyTuple_Check(texts) || PyTuple_Size(texts) != TEXTS) {
        PyErr_SetString(PyExc_ValueError, "no properties of a message");
        return false;
    }
    for (int text = 0; text < TEXTS; text++)
        if (!put_object(&columns->columns[text], columns->messages, PyTuple_GetItem(texts, text))) return false;
    return true;
}

static void columns_dealloc(PyObject *self) {
    Columns *columns = (Columns *)self;
    for (size_t index = 0; index < COLUMNS; index++) {
        buffer_free(&columns->columns[index].valid);
        buffer_free(&columns->columns[index].values);
        buffer_free(&columns->columns[index].bytes);
    }
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int columns_init(PyObject *self, PyObject *arguments, PyObject *names) {
    (void)arguments, (void)names;
    for (size_t index = 0; index < COLUMNS; index++) ((Columns *)self)->columns[index].width = WIDTHS[index];
    return 0;
}

static Py_ssize_t columns_length(PyObject *self) { return (Py_ssize_t)((Columns *)self)->rows; }

// append(properties, times, size, number at the origin, copies, record, overlay)
static PyObject *columns_append(PyObject *self, PyObject *arguments) {
    Columns *columns = (Columns *)self;
    Py_ssize_t count = PyTuple_Size(arguments);
    if (count != 1 + NUMBER - TEXTS) {
        PyErr_SetString(PyExc_TypeError, "a message has another number of fields");
        return NULL;
    }
    if (!put_texts(columns, PyTuple_GetItem(arguments, 0))) return NULL;
    for (Py_ssize_t index = 1; index < count; index++) {
        struct column *column = &columns->columns[TEXTS + index - 1];
        if (!put_object(column, columns->messages, PyTuple_GetItem(arguments, index))) return NULL;
    }
    columns->messages++;
    Py_RETURN_NONE;
}

static bool put_items(struct column *column, size_t row, PyObject *items, Py_ssize_t count) {
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *item = PyTuple_Check(items) ? PyTuple_GetItem(items, index) : PyList_GetItem(items, index);
        if (!item || !put_object(column, row + (size_t)index, item)) return false;
    }
    return true;
}

static bool is_row(PyObject *items) {
    if (PyTuple_Check(items) || PyList_Check(items)) return true;
    PyErr_SetString(PyExc_TypeError, "a list or tuple is wanted");
    return false;
}

// end_rows(numbers, counts): lists or tuples of the same length; counts may be None
static PyObject *columns_end_rows(PyObject *self, PyObject *arguments) {
    Columns *columns = (Columns *)self;
    PyObject *numbers, *counts;
    if (!PyArg_ParseTuple(arguments, "OO", &numbers, &counts)) return NULL;
    if (!is_row(numbers) || (counts != Py_None && !is_row(counts))) return NULL;
    Py_ssize_t rows = PyObject_Size(numbers);
    if (counts != Py_None && PyObject_Size(counts) != rows) {
        PyErr_SetString(PyExc_ValueError, "as many counts as numbers are wanted");
        return NULL;
    }
    if (!put_items(&columns->columns[NUMBER], columns->rows, numbers, rows)) return NULL;
    if (counts != Py_None && !put_items(&columns->columns[COUNT], columns->rows, counts, rows)) return NULL;
    columns->rows += (size_t)rows;
    columns->messages = columns->rows;
    Py_RETURN_NONE;
}

// end_run(first number, rows, delivery count of each): as end_rows of consecutive numbers
static PyObject *columns_end_run(PyObject *self, PyObject *arguments) {
    Columns *columns = (Columns *)self;
    long long first, rows, count;
    if (!PyArg_ParseTuple(arguments, "LLL", &first, &rows, &count)) return NULL;
    if (rows < 0 || first > INT64_MAX - rows || count < INT32_MIN || count > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a run's sequence numbers have more than 64 bits, or its delivery count more than 32");
        return NULL;
    }
    for (long long row = 0; row < rows; row++, columns->rows++)
        if (!put_number(&columns->columns[NUMBER], columns->rows, first + row) ||
            !put_number(&columns->columns[COUNT], columns->rows, count))
            return NULL;
    columns->messages = columns->rows;
    Py_RETURN_NONE;
}

// -- the buffers of a column, which Arrow reads where they are

typedef struct {
    PyObject_HEAD
    struct buffer bytes;
} Bytes;

PyObject *bytes_type;

static void bytes_dealloc(PyObject *self) {
    buffer_free(&((Bytes *)self)->bytes);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int bytes_get(PyObject *self, Py_buffer *view, int flags) {
    struct buffer *bytes = &((Bytes *)self)->bytes;
    return PyBuffer_FillInfo(view, self, bytes->bytes ? (char *)bytes->bytes : "", (Py_ssize_t)bytes->size, 1, flags);
}

static PyType_Slot bytes_slots[] = {
    {Py_tp_dealloc, bytes_dealloc},
    {Py_bf_getbuffer, bytes_get},
    {0, NULL},
};
PyType_Spec bytes_spec = {
    .name = "protocol._native.Bytes",
    .basicsize = sizeof(Bytes),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = bytes_slots,
};

PyObject *take_bytes(struct buffer *buffer) {
    PyObject *object = PyType_GenericAlloc((PyTypeObject *)bytes_type, 0);
    if (!object) return NULL;
    ((Bytes *)object)->bytes = *buffer;
    *buffer = (struct buffer){0};
    return object;
}

// take_column(index) -> nulls, validity, values, bytes | None; None if all rows are null. The column is empty then.
static PyObject *columns_take_column(PyObject *self, PyObject *argument) {
    Columns *columns = (Columns *)self;
    size_t index = PyLong_AsSize_t(argument);
    if (PyErr_Occurred()) return NULL;
    if (index >= COLUMNS) {
        PyErr_SetString(PyExc_IndexError, "no such column");
        return NULL;
    }
    struct column *column = &columns->columns[index];
    if (!column->rows) Py_RETURN_NONE;
    if (column->rows < columns->rows) { // as far as the last row, which is given a value and loses it
        if (!begin_value(column, columns->rows - 1)) return NULL;
        uint8_t last[8] = {0};
        if (!column->width) memcpy(last, &(uint32_t){(uint32_t)column->bytes.size}, 4);
        end_value(column, last);
        column->valid.bytes[(column->rows - 1) / 8] &= (uint8_t) ~(1 << (column->rows - 1) % 8);
        column->nulls++;
    }
    size_t nulls = column->nulls;
    PyObject *valid = nulls ? take_bytes(&column->valid) : Py_NewRef(Py_None);
    PyObject *values = take_bytes(&column->values);
    PyObject *bytes = column->width ? Py_NewRef(Py_None) : take_bytes(&column->bytes);
    column->rows = column->nulls = 0;
    if (valid && values && bytes) return Py_BuildValue("nNNN", (Py_ssize_t)nulls, valid, values, bytes);
    Py_XDECREF(valid);
    Py_XDECREF(values);
    Py_XDECREF(bytes);
    return NULL;
}

// -- the bytes of a turn

// The items at these places, which are a list of (start, end); NULL with an exception.
static struct items *items_at(const Py_buffer *payload, PyObject *list) {
    Py_ssize_t count = PyList_Size(list);
    struct items *items = count < 0 ? NULL : malloc(sizeof *items + (size_t)count * sizeof(struct place));
    if (!items) return count < 0 ? NULL : (struct items *)PyErr_NoMemory();
    struct place *places = (struct place *)(items + 1);
    *items = (struct items){payload->buf, (size_t)payload->len, places, (size_t)count, {0}, 0, false};
    for (Py_ssize_t index = 0; index < count; index++) {
        unsigned long long start, end;
        if (!PyArg_ParseTuple(PyList_GetItem(list, index), "KK", &start, &end)) {
            free(items);
            return NULL;
        }
        places[index] = (struct place){start, end};
    }
    return items;
}

// Append the new value to the list. False with an exception.
static bool append(PyObject *list, PyObject *value) {
    bool done = value && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return done;
}

// entries_of(payload, places) -> [(queue id, number of entries, lowest sequence number)] | None
PyObject *entries_of(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer payload;
    PyObject *places, *found = NULL;
    if (!PyArg_ParseTuple(arguments, "y*O!", &payload, &PyList_Type, &places)) return NULL;
    struct items *items = items_at(&payload, places);
    if (!items || !(found = PyList_New(0))) goto end;
    struct queue_key key;
    unsigned long queue_id = 0;
    unsigned long long lowest = 0;
    Py_ssize_t count = 0;
    size_t fields;
    bool is_there, is_read;
    do {
        is_there = items_next(items);
        is_read = is_there && packed_array(&items->packed, &fields) && fields == 2 &&
                  queue_key_read(&items->packed, &key) && packed_skip(&items->packed);
        if (is_there != is_read || items->bad) {
            Py_DECREF(found);
            found = Py_NewRef(Py_None);
            goto end;
        }
        if (count && (!is_there || key.queue_id != queue_id)) {
            if (!append(found, Py_BuildValue("knK", queue_id, count, lowest))) {
                Py_CLEAR(found);
                goto end;
            }
            count = 0;
        }
        if (is_there) {
            lowest = count && lowest < key.number ? lowest : key.number;
            queue_id = key.queue_id;
            count++;
        }
    } while (is_there);
end:
    free(items);
    PyBuffer_Release(&payload);
    return found;
}

// numbers_of(payload, places) -> [(queue id, first sequence number, numbers from it on)] | None
PyObject *numbers_of(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer payload;
    PyObject *places, *found = NULL;
    if (!PyArg_ParseTuple(arguments, "y*O!", &payload, &PyList_Type, &places)) return NULL;
    struct items *items = items_at(&payload, places);
    if (!items || !(found = PyList_New(0))) goto end;
    struct queue_key key;
    unsigned long queue_id = 0;
    unsigned long long first = 0;
    Py_ssize_t count = 0;
    bool is_there;
    do {
        is_there = items_next(items);
        if ((is_there && !queue_key_read(&items->packed, &key)) || items->bad) {
            Py_DECREF(found);
            found = Py_NewRef(Py_None);
            goto end;
        }
        if (count && (!is_there || key.queue_id != queue_id || key.number - first != (unsigned long long)count)) {
            if (!append(found, Py_BuildValue("kKn", queue_id, first, count))) {
                Py_CLEAR(found);
                goto end;
            }
            count = 0;
        }
        if (is_there && !count++) queue_id = key.queue_id, first = key.number;
    } while (is_there);
end:
    free(items);
    PyBuffer_Release(&payload);
    return found;
}

// An operation as skim gives it, at `packed`: NULL without an exception if it is malformed.
static PyObject *operation_of(struct packed *packed, const uint8_t *payload) {
    size_t fields;
    uint64_t kind, table;
    if (!packed_array(packed, &fields) || fields != 3 || !packed_number(packed, &kind) || !packed_number(packed, &table))
        return NULL;
    const uint8_t *start = packed->at;
    if (!packed_skip(packed)) return NULL;
    return Py_BuildValue("KK(nn)", (unsigned long long)kind, (unsigned long long)table, (Py_ssize_t)(start - payload),
                         (Py_ssize_t)(packed->at - payload));
}

static PyObject *operations_of(struct packed *packed, const uint8_t *payload) {
    size_t count;
    if (!packed_array(packed, &count)) return NULL;
    PyObject *operations = PyList_New(0);
    for (size_t index = 0; operations && index < count; index++) {
        PyObject *operation = operation_of(packed, payload);
        if (!operation || PyList_Append(operations, operation) < 0) Py_CLEAR(operations);
        Py_XDECREF(operation);
    }
    return operations;
}

// skim(payload) -> time in ms, [(partition, [(kind, table, (start, end))])], (start, end) of the hints; None
PyObject *skim(PyObject *module, PyObject *argument) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    const uint8_t *payload = buffer.buf;
    struct packed packed = {payload, payload + buffer.len};
    size_t fields, partitions;
    uint64_t time_ms, partition;
    PyObject *changes = NULL, *found = NULL;
    if (!packed_array(&packed, &fields) || fields != 3 || !packed_number(&packed, &time_ms)) goto end;
    if (!packed_array(&packed, &partitions) || !(changes = PyList_New(0))) goto end;
    for (size_t index = 0; index < partitions; index++) {
        if (!packed_array(&packed, &fields) || fields != 2 || !packed_number(&packed, &partition)) goto end;
        PyObject *operations = operations_of(&packed, payload);
        if (!operations) goto end;
        PyObject *pair = Py_BuildValue("KN", (unsigned long long)partition, operations);
        int failed = !pair || PyList_Append(changes, pair) < 0;
        Py_XDECREF(pair);
        if (failed) goto end;
    }
    const uint8_t *start = packed.at;
    if (!packed_skip(&packed) || packed.at != packed.end) goto end;
    found = Py_BuildValue("KO(nn)", (unsigned long long)time_ms, changes, (Py_ssize_t)(start - payload),
                          (Py_ssize_t)(packed.at - payload));
end:
    Py_XDECREF(changes);
    PyBuffer_Release(&buffer);
    if (found || PyErr_Occurred()) return found;
    Py_RETURN_NONE;
}

// -- messages that enter a queue

static bool put_time(struct column *column, size_t row, int64_t time_ms) {
    if (time_ms < FIRST_MS || time_ms > LAST_MS) return true; // beyond the calendar
    return put_number(column, row, time_ms * 1000);
}

// Append the row of a message that enters. False with an exception.
static bool put_entered(Columns *columns, const struct entered *one, bool with_record, PyObject *properties_of) {
    size_t row = columns->messages;
    struct column *column = columns->columns;
    const uint8_t *texts[TEXTS];
    if (record_texts(one->record, one->record_bytes, texts)) {
        for (int text = 0; text < TEXTS; text++)
            if (texts[text] && !put_bytes(&column[text], row, texts[text] + 1, *texts[text])) return false;
    } else {
        PyObject *properties =
            PyObject_CallFunction(properties_of, "y#", (const char *)one->record, (Py_ssize_t)one->record_bytes);
        bool done = properties && put_texts(columns, properties);
        Py_XDECREF(properties);
        if (!done) return false;
    }
    int64_t enqueued_ms = (int64_t)read_u64(one->record + ENQUEUED_AT);
    int64_t expires_ms = (int64_t)read_u64(one->record + EXPIRES_AT);
    columns->rows++;
    columns->messages++;
    return put_time(&column[ENQUEUED], row, enqueued_ms) &&
           (expires_ms == NEVER || put_time(&column[EXPIRES], row, expires_ms)) &&
           put_number(&column[SIZE], row, (int64_t)one->record_bytes) &&
           (!with_record || put_bytes(&column[RECORD], row, one->record, one->record_bytes)) &&
           put_number(&column[NUMBER], row, (int64_t)one->number) && put_number(&column[COUNT], row, one->count);
}

// enter(payload, entries, records, shown, properties_of) -> bool
static PyObject *columns_enter(PyObject *self, PyObject *arguments) {
    Columns *columns = (Columns *)self;
    Py_buffer payload;
    PyObject *entry_places, *record_places, *shown, *properties_of, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "y*O!O!O!O", &payload, &PyList_Type, &entry_places, &PyList_Type, &record_places,
                          &PyList_Type, &shown, &properties_of))
        return NULL;
    struct items *entries = items_at(&payload, entry_places), *records = entries ? items_at(&payload, record_places) : NULL;
    struct buffer found = {0};
    if (!records) goto end;
    if (!entered_find(entries, records, &found)) {
        result = Py_NewRef(Py_False);
        goto end;
    }
    size_t at = 0;
    for (Py_ssize_t run = 0; run < PyList_Size(shown); run++) {
        Py_ssize_t count;
        int as_rows, with_records;
        if (!PyArg_ParseTuple(PyList_GetItem(shown, run), "npp", &count, &as_rows, &with_records)) goto end;
        if (count < 0 || (size_t)count > (found.size - at) / sizeof(struct entered)) {
            PyErr_SetString(PyExc_ValueError, "more entries than there are");
            goto end;
        }
        for (; count; count--, at += sizeof(struct entered)) {
            struct entered one;
            memcpy(&one, found.bytes + at, sizeof one);
            if (as_rows && !put_entered(columns, &one, with_records, properties_of)) goto end;
        }
    }
    result = Py_NewRef(Py_True);
end:
    free(entries);
    free(records);
    buffer_free(&found);
    PyBuffer_Release(&payload);
    return result;
}

static PyMethodDef columns_methods[] = {
    {"append", columns_append, METH_VARARGS, NULL},
    {"end_rows", columns_end_rows, METH_VARARGS, NULL},
    {"end_run", columns_end_run, METH_VARARGS, NULL},
    {"enter", columns_enter, METH_VARARGS, NULL},
    {"take_column", columns_take_column, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot columns_slots[] = {
    {Py_tp_init, columns_init},
    {Py_tp_dealloc, columns_dealloc},
    {Py_tp_methods, columns_methods},
    {Py_sq_length, columns_length},
    {0, NULL},
};
PyType_Spec columns_spec = {
    .name = "protocol._native.Columns",
    .basicsize = sizeof(Columns),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = columns_slots,
};
