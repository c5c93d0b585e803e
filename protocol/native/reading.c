#include "reading.h"

#include "journal.h"
#include "memory.h"
#include "stored.h"

#include <string.h>

enum { BODY = 1, REPLY_TO = 2, APPLICATION_PROPERTIES = 4 }; // what is wanted

// Rows as Arrow has them: a bit a row, and the 4-byte offsets of each row's bytes, or pairs, and of the end of all.
struct rows {
    struct buffer valid, offsets;
    size_t count, nulls;
};

struct texts {
    struct rows rows;
    struct buffer bytes;
};

struct columns {
    struct texts body, reply_to;
    struct rows properties;
    struct texts keys, values;
};

static void texts_free(struct texts *texts) {
    buffer_free(&texts->rows.valid);
    buffer_free(&texts->rows.offsets);
    buffer_free(&texts->bytes);
}

static void columns_free(struct columns *columns) {
    texts_free(&columns->body);
    texts_free(&columns->reply_to);
    texts_free(&columns->keys);
    texts_free(&columns->values);
    buffer_free(&columns->properties.valid);
    buffer_free(&columns->properties.offsets);
}

static bool put_offset(struct rows *rows, size_t offset) {
    if (offset > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a column of stored messages has more than 2 GiB");
        return false;
    }
    if (!buffer_reserve(&rows->offsets, 4)) {
        PyErr_NoMemory();
        return false;
    }
    int32_t value = (int32_t)offset;
    memcpy(rows->offsets.bytes + rows->offsets.size, &value, 4);
    rows->offsets.size += 4;
    return true;
}

// End a row whose content ends at this offset. False with an exception, as all here.
static bool put_row(struct rows *rows, bool is_valid, size_t end) {
    if (!rows->offsets.size && !put_offset(rows, 0)) return false;
    if (!(rows->count % 8)) {
        if (!buffer_reserve(&rows->valid, 1)) {
            PyErr_NoMemory();
            return false;
        }
        rows->valid.bytes[rows->valid.size++] = 0;
    }
    rows->valid.bytes[rows->count / 8] |= (uint8_t)(is_valid << rows->count % 8);
    rows->nulls += !is_valid;
    rows->count++;
    return put_offset(rows, end);
}

static bool put_text(struct texts *texts, struct span text) {
    if (text.bytes) {
        if (!buffer_reserve(&texts->bytes, text.bytes)) {
            PyErr_NoMemory();
            return false;
        }
        memcpy(texts->bytes.bytes + texts->bytes.size, text.at, text.bytes);
        texts->bytes.size += text.bytes;
    }
    return put_row(&texts->rows, text.at != NULL, texts->bytes.size);
}

// 1 if the pairs were added, 0 if Python must look at them: then some may be there, and belong to no row. -1 with an
// exception.
static int put_pairs(struct columns *columns, struct span section) {
    struct pairs pairs;
    if (!pairs_begin(section, &pairs)) return 0;
    while (pairs.left) {
        struct span key, value;
        if (!pairs_next(&pairs, &key, &value)) return 0;
        if (!put_text(&columns->keys, key) || !put_text(&columns->values, value)) return -1;
    }
    return 1;
}

static const struct span NOTHING = {NULL, 0};

static bool put_nulls(struct columns *columns, int wanted) {
    return (!(wanted & BODY) || put_text(&columns->body, NOTHING)) &&
           (!(wanted & REPLY_TO) || put_text(&columns->reply_to, NOTHING)) &&
           (!(wanted & APPLICATION_PROPERTIES) || put_row(&columns->properties, false, columns->keys.rows.count));
}

// Add a record: 1, or 0 if Python must look at it; -1 with an exception. With 0, nulls stand for it.
static int put_record(struct columns *columns, const uint8_t *record, size_t size, int wanted) {
    struct sections sections;
    struct span content = NOTHING, reply_to = NOTHING;
    bool is_usual = stored_sections(record, size, &sections);
    if (is_usual && wanted & BODY) is_usual = stored_content(sections.body, &content);
    if (is_usual && wanted & REPLY_TO) is_usual = stored_reply_to(sections.properties, &reply_to);
    if (is_usual && wanted & APPLICATION_PROPERTIES) {
        int done = put_pairs(columns, sections.application_properties);
        if (done < 0) return -1;
        is_usual = done;
    }
    if (!is_usual) return put_nulls(columns, wanted) ? 0 : -1;
    if (wanted & BODY && !put_text(&columns->body, content)) return -1;
    if (wanted & REPLY_TO && !put_text(&columns->reply_to, reply_to)) return -1;
    if (wanted & APPLICATION_PROPERTIES && !put_row(&columns->properties, true, columns->keys.rows.count)) return -1;
    return 1;
}

// The buffers of rows: their number of nulls, validity | None, offsets. With `bytes`, these as well.
static PyObject *taken(struct rows *rows, struct buffer *bytes) {
    if (!rows->offsets.size && !put_offset(rows, 0)) return NULL;
    PyObject *valid = rows->nulls ? take_bytes(&rows->valid) : Py_NewRef(Py_None);
    PyObject *offsets = take_bytes(&rows->offsets), *content = bytes ? take_bytes(bytes) : Py_NewRef(Py_None);
    if (valid && offsets && content) return Py_BuildValue("nNNN", (Py_ssize_t)rows->nulls, valid, offsets, content);
    Py_XDECREF(valid);
    Py_XDECREF(offsets);
    Py_XDECREF(content);
    return NULL;
}

// True if the bytes of each row are in the data.
static bool are_offsets(const int32_t *offsets, Py_ssize_t count, Py_ssize_t size) {
    if (offsets[0] < 0) return false;
    for (Py_ssize_t row = 0; row < count; row++)
        if (offsets[row] > offsets[row + 1]) return false;
    return offsets[count] <= size;
}

static PyObject *columns_of(const uint8_t *valid, const int32_t *offsets, const uint8_t *data, Py_ssize_t first,
                            Py_ssize_t count, int wanted) {
    struct columns columns = {0};
    PyObject *found = NULL, *declined = PyList_New(0);
    size_t bytes = (size_t)(offsets[count] - offsets[0]);
    if (!declined) return NULL;
    if (wanted & BODY && !buffer_reserve(&columns.body.bytes, bytes)) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t row = 0; row < count; row++) {
        if (valid && !(valid[(first + row) / 8] >> (first + row) % 8 & 1)) {
            if (!put_nulls(&columns, wanted)) goto end;
            continue;
        }
        int done = put_record(&columns, data + offsets[row], (size_t)(offsets[row + 1] - offsets[row]), wanted);
        if (done < 0) goto end;
        if (done) continue;
        PyObject *place = PyLong_FromSsize_t(row);
        int failed = !place || PyList_Append(declined, place) < 0;
        Py_XDECREF(place);
        if (failed) goto end;
    }
    Py_ssize_t pairs = (Py_ssize_t)columns.keys.rows.count;
    PyObject *parts[] = {taken(&columns.body.rows, &columns.body.bytes),
                         taken(&columns.reply_to.rows, &columns.reply_to.bytes), taken(&columns.properties, NULL),
                         taken(&columns.keys.rows, &columns.keys.bytes), taken(&columns.values.rows, &columns.values.bytes)};
    bool are_there = true;
    for (int part = 0; part < 5; part++) are_there = are_there && parts[part];
    if (are_there) {
        found = Py_BuildValue("ONNNnNN", declined, parts[0], parts[1], parts[2], pairs, parts[3], parts[4]);
    } else {
        for (int part = 0; part < 5; part++) Py_XDECREF(parts[part]);
    }
end:
    Py_DECREF(declined);
    columns_free(&columns);
    return found;
}

// record_columns(validity | None, offsets, data, first, count, wanted)
//   -> declined rows, body, reply-to, application properties, number of pairs, keys, values
PyObject *record_columns(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *valid_object, *found = NULL;
    Py_buffer valid = {0}, offsets, data;
    Py_ssize_t first, count;
    int wanted;
    if (!PyArg_ParseTuple(arguments, "Oy*y*nni", &valid_object, &offsets, &data, &first, &count, &wanted)) return NULL;
    if (valid_object != Py_None && PyObject_GetBuffer(valid_object, &valid, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t places = offsets.len / 4;
    bool is_whole = first >= 0 && count >= 0 && places > 0 && first < places && count < places - first;
    if (is_whole && valid.obj) is_whole = valid.len >= (first + count + 7) / 8;
    if (!is_whole || !are_offsets((const int32_t *)offsets.buf + first, count, data.len)) {
        PyErr_SetString(PyExc_ValueError, "these are not the buffers of so many rows");
        goto end;
    }
    found = columns_of(valid.obj ? valid.buf : NULL, (const int32_t *)offsets.buf + first, data.buf, first, count, wanted);
end:
    if (valid.obj) PyBuffer_Release(&valid);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    return found;
}
