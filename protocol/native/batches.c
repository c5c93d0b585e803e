// Loops of a partition over many usual messages at once. Python's code has the same loops, decides what is usual, and
// keeps what these return.
#include "batches.h"

#include "entries.h"
#include "hashing.h"
#include "intake.h"
#include "module.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

enum { OVERLAY_BYTES = 2 + 2 + 255 }; // of a map with one number and a short text, at most
enum { TOKEN_BYTES = 16, RANGE_BYTES = TOKEN_BYTES + 4, ITEMS = 5 }; // of an entry in `broker.wire`
#define LARGE_RUN_BYTES (1 << 20)         // see `broker.wire`
#define NEVER INT64_C(0x7FFFFFFFFFFFFFFF) // `never` is the same as an object
#define LATEST_MS INT64_C(253402300799999) // see `protocol.bounds`

// The CRC-32 of zlib, of few bytes.
static uint32_t crc32_of(const uint8_t *bytes, size_t size) {
    static uint32_t table[256];
    if (!table[1]) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
            table[byte] = value;
        }
    }
    uint32_t crc = 0xFFFFFFFFu;
    for (; size; bytes++, size--) crc = table[(crc ^ *bytes) & 0xFF] ^ crc >> 8;
    return ~crc;
}

static bool is_whole(const uint8_t *record, size_t size) {
    if (size < RECORD_HEADER_BYTES) return false;
    return hash64(record + 8, size - 8) == read_u64(record);
}

static PyObject *bytes_of(const uint8_t *bytes, size_t size) {
    return PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)size);
}

static PyObject *message_key(uint64_t message_id) {
    uint8_t key[MESSAGE_KEY_BYTES];
    write_u64(key, message_id);
    return bytes_of(key, sizeof key);
}

static PyObject *due_key(uint32_t queue_id, uint8_t timer, uint64_t time_ms, uint64_t number) {
    uint8_t key[DUE_KEY_BYTES], *at = write_u32(key, queue_id);
    *at++ = timer;
    write_u64(write_u64(at, time_ms), number);
    return bytes_of(key, sizeof key);
}

// With an overlay, which is msgpack.
static PyObject *entry_of(uint64_t message_id, const uint8_t *overlay, size_t overlay_bytes) {
    uint8_t entry[ENTRY_BYTES + OVERLAY_BYTES];
    uint8_t *end = write_bytes(write_u32(write_u64(entry + 4, message_id), 0), overlay, overlay_bytes);
    write_u32(entry, crc32_of(entry + 4, (size_t)(end - entry) - 4));
    return bytes_of(entry, (size_t)(end - entry));
}

// The text of a field of a record's properties if it is a short string; NULL if it is not.
static const uint8_t *id_of(const uint8_t *record, size_t size, unsigned int field, size_t *id_bytes) {
    if (size < RECORD_HEADER_BYTES) return NULL;
    size_t at = RECORD_HEADER_BYTES + (size_t)read_u32(record + LAYOUT_AT + 4);
    size_t properties_bytes = read_u32(record + LAYOUT_AT + 8);
    if (at > size || properties_bytes > size - at) return NULL;
    return property_text(record + at, properties_bytes, field, id_bytes);
}

// A pair of new references, which it takes; NULL if one of them is.
static PyObject *pair_of(PyObject *first, PyObject *second) {
    PyObject *pair = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return pair;
}

// Append a new reference, which it takes: -1 with an exception, also if it is NULL.
static int append(PyObject *list, PyObject *item) {
    int result = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return result;
}

// The overlay {key: session id} of a record, as msgpack and as a new reference; NULL if it has no session id that is
// usual, or with an exception.
static PyObject *session_of(const uint8_t *record, size_t size, uint8_t key, uint8_t *packed, size_t *packed_bytes) {
    size_t id_bytes;
    const uint8_t *id = id_of(record, size, GROUP_ID, &id_bytes);
    if (!id) return NULL;
    uint8_t *at = packed;
    *at++ = 0x81;
    *at++ = key;
    if (id_bytes >= 32) *at++ = 0xD9;
    *at++ = (uint8_t)(id_bytes < 32 ? 0xA0 | id_bytes : id_bytes);
    *packed_bytes = (size_t)(write_bytes(at, id, id_bytes) - packed);
    PyObject *text = PyUnicode_FromStringAndSize((const char *)id, (Py_ssize_t)id_bytes), *number = PyLong_FromLong(key);
    PyObject *overlay = text && number ? PyDict_New() : NULL;
    if (overlay && PyDict_SetItem(overlay, number, text) < 0) Py_CLEAR(overlay);
    Py_XDECREF(text);
    Py_XDECREF(number);
    return overlay;
}

// When a message expires that has a time to live of its own, and otherwise would at `expires_ms`.
static int64_t end_of_life(int64_t enqueued_ms, uint64_t ttl_ms, int64_t expires_ms) {
    if (enqueued_ms > LATEST_MS || ttl_ms > (uint64_t)LATEST_MS - (uint64_t)enqueued_ms) return expires_ms;
    int64_t end_ms = enqueued_ms + (int64_t)ttl_ms;
    return end_ms < expires_ms ? end_ms : expires_ms;
}

// store_run(run, enqueued_ms, expires_ms, first number, first message id, key of sessions or None)
//   -> items of MESSAGES, values of entries, refs, and if some have a time to live of their own, when each expires, else
//   None; None if a message has no session
PyObject *store_run(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *given;
    long long enqueued_ms, expires_ms;
    unsigned long long number, message_id;
    PyObject *session;
    long key = 0;
    size_t size, at = 0;
    if (!PyArg_ParseTuple(arguments, "OLLKKO", &given, &enqueued_ms, &expires_ms, &number, &message_id, &session))
        return NULL;
    const uint8_t *run = run_bytes(given, &size);
    if (!run) return NULL;
    if (session != Py_None) {
        key = PyLong_AsLong(session);
        if (!PyErr_Occurred() && (key <= 0 || key > 127)) PyErr_SetString(PyExc_ValueError, "no such key");
        if (PyErr_Occurred()) return NULL;
    }
    PyObject *records = PyList_New(0), *entries = PyList_New(0), *refs = PyList_New(0), *result = NULL;
    PyObject *zero = PyLong_FromLong(0), *ends = NULL;
    if (!records || !entries || !refs || !zero) goto end;
    while (at < size) {
        size_t record_bytes = run_next(run, size, &at);
        if (record_bytes < RECORD_HEADER_BYTES) {
            PyErr_SetString(PyExc_ValueError, "no run of records");
            goto end;
        }
        PyObject *record = bytes_of(run + at, record_bytes);
        if (!record) goto end;
        uint8_t *made = (uint8_t *)PyBytes_AsString(record); // nobody else has it yet
        uint64_t ttl_ms = read_u64(made + EXPIRES_AT);        // which the gateway has put there, or 0
        int64_t end_ms = ttl_ms ? end_of_life(enqueued_ms, ttl_ms, expires_ms) : expires_ms;
        write_u64(write_u64(made + ENQUEUED_AT, (uint64_t)enqueued_ms), (uint64_t)end_ms);
        write_u64(made, hash64(made + 8, record_bytes - 8));
        at += record_bytes;
        if (append(records, pair_of(message_key(message_id), record)) < 0) goto end;
        uint8_t packed[OVERLAY_BYTES];
        size_t packed_bytes = 0;
        PyObject *overlay = key ? session_of(made, record_bytes, (uint8_t)key, packed, &packed_bytes) : Py_NewRef(Py_None);
        if (!overlay) {
            if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
            goto end;
        }
        int staged = append(entries, entry_of(message_id, packed, packed_bytes));
        if (append(refs, Py_BuildValue("KKON", number, message_id, zero, overlay)) < 0 || staged < 0) goto end;
        if (ttl_ms && !ends) { // those before it have none of their own
            Py_ssize_t before = PyList_Size(entries) - 1;
            ends = PyList_New(before);
            for (Py_ssize_t index = 0; ends && index < before; index++)
                PyList_SetItem(ends, index, PyLong_FromLongLong(expires_ms));
            if (!ends) goto end;
        }
        if (ends && append(ends, PyLong_FromLongLong(end_ms)) < 0) goto end;
        number++;
        message_id++;
    }
    result = PyTuple_Pack(4, records, entries, refs, ends ? ends : Py_None);
end:
    Py_XDECREF(ends);
    Py_XDECREF(records);
    Py_XDECREF(entries);
    Py_XDECREF(refs);
    Py_XDECREF(zero);
    return result;
}

// digests_of(run) -> [digest, ...]; None if a message has no message-id that is a short string
PyObject *digests_of(PyObject *module, PyObject *run) {
    (void)module;
    size_t size;
    const uint8_t *bytes = run_bytes(run, &size);
    if (!bytes) return NULL;
    PyObject *digests = PyList_New(0);
    for (size_t at = 0; digests && at < size;) {
        size_t id_bytes, record_bytes = run_next(bytes, size, &at);
        const uint8_t *id = id_of(bytes + at, record_bytes, MESSAGE_ID, &id_bytes);
        if (!id) {
            Py_DECREF(digests);
            Py_RETURN_NONE;
        }
        XXH128_canonical_t digest;
        XXH128_canonicalFromHash(&digest, XXH3_128bits(id, id_bytes));
        if (append(digests, bytes_of(digest.digest, sizeof digest.digest)) < 0) Py_CLEAR(digests);
        at += record_bytes;
    }
    return digests;
}

// refs_of(items of QUEUE) -> refs; None if an entry has an overlay or a wrong checksum
PyObject *refs_of(PyObject *module, PyObject *items) {
    (void)module;
    Py_ssize_t count = PyList_Size(items);
    if (count < 0) return NULL;
    PyObject *refs = PyList_New(count);
    for (Py_ssize_t index = 0; refs && index < count; index++) {
        PyObject *item = PyList_GetItem(items, index), *ref = NULL;
        char *key, *entry;
        Py_ssize_t key_bytes, entry_bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(item, 0), &key, &key_bytes) < 0 ||
            PyBytes_AsStringAndSize(PyTuple_GetItem(item, 1), &entry, &entry_bytes) < 0) {
            Py_CLEAR(refs);
            break;
        }
        const uint8_t *bytes = (const uint8_t *)entry;
        if (key_bytes != QUEUE_KEY_BYTES || entry_bytes != ENTRY_BYTES ||
            crc32_of(bytes + 4, ENTRY_BYTES - 4) != read_u32(bytes)) {
            Py_DECREF(refs);
            Py_RETURN_NONE;
        }
        ref = Py_BuildValue("KKIO", (unsigned long long)read_u64((const uint8_t *)key + QUEUE_KEY_BYTES - 8),
                            (unsigned long long)read_u64(bytes + 4), (unsigned int)read_u32(bytes + 12), Py_None);
        if (!ref) Py_CLEAR(refs);
        else PyList_SetItem(refs, index, ref);
    }
    return refs;
}

// run_of_refs(refs) -> first number, delivery count | None, if the refs are no consecutive numbers with the same count
PyObject *run_of_refs(PyObject *module, PyObject *refs) {
    (void)module;
    Py_ssize_t count = PyList_Size(refs);
    if (count < 0) return NULL;
    unsigned long long first = 0;
    long long first_count = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *ref = PyList_GetItem(refs, index);
        unsigned long long number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(ref, 0));
        if (PyErr_Occurred()) return NULL;
        long long delivery_count = PyLong_AsLongLong(PyTuple_GetItem(ref, 2));
        if (PyErr_Occurred()) return NULL;
        if (!index) first = number, first_count = delivery_count;
        else if (number - first != (unsigned long long)index || delivery_count != first_count) Py_RETURN_NONE;
    }
    if (!count) Py_RETURN_NONE;
    return Py_BuildValue("KL", first, first_count);
}

// split(refs) -> their sequence numbers, their delivery counts
PyObject *split(PyObject *module, PyObject *refs) {
    (void)module;
    Py_ssize_t count = PyList_Size(refs);
    if (count < 0) return NULL;
    PyObject *numbers = PyTuple_New(count), *counts = PyTuple_New(count);
    for (Py_ssize_t index = 0; numbers && counts && index < count; index++) {
        PyObject *ref = PyList_GetItem(refs, index);
        PyObject *number = PyTuple_GetItem(ref, 0), *delivery_count = PyTuple_GetItem(ref, 2);
        if (!number || !delivery_count) Py_CLEAR(counts);
        if (number) PyTuple_SetItem(numbers, index, Py_NewRef(number));
        if (number && delivery_count) PyTuple_SetItem(counts, index, Py_NewRef(delivery_count));
    }
    if (numbers && counts) return Py_BuildValue("NN", numbers, counts);
    Py_XDECREF(numbers);
    Py_XDECREF(counts);
    return NULL;
}

// are_whole(records) -> True if all are records whose checksum is right, or None
PyObject *are_whole(PyObject *module, PyObject *records) {
    (void)module;
    Py_ssize_t count = PyList_Size(records);
    if (count < 0) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *record = PyList_GetItem(records, index);
        if (record == Py_None) continue;
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(record, &bytes, &size) < 0) return NULL;
        if (!is_whole((uint8_t *)bytes, (size_t)size)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

// take_usual(refs, records, never, weight, limit, now_ms, expire) -> [(ref, record, time when it expires), ...], bytes used
// At least one, and up to the first whose bytes, with `weight` more for each, reach the limit. None if one of these has
// an overlay, is missing, or has expired. Without `expire`, none does.
PyObject *take_usual(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *refs, *records, *never;
    Py_ssize_t weight, limit, used = 0;
    long long now_ms;
    int expire;
    if (!PyArg_ParseTuple(arguments, "O!O!OnnLp", &PyList_Type, &refs, &PyList_Type, &records, &never, &weight, &limit,
                          &now_ms, &expire))
        return NULL;
    Py_ssize_t count = PyList_Size(refs);
    if (PyList_Size(records) != count) {
        PyErr_SetString(PyExc_ValueError, "as many records as refs");
        return NULL;
    }
    PyObject *taken = PyList_New(0);
    for (Py_ssize_t index = 0; taken && index < count && (index == 0 || used < limit); index++) {
        PyObject *ref = PyList_GetItem(refs, index), *record = PyList_GetItem(records, index);
        if (PyTuple_GetItem(ref, 3) != Py_None || record == Py_None) goto unusual;
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(record, &bytes, &size) < 0) goto failed;
        if (size < RECORD_HEADER_BYTES) goto unusual;
        int64_t due_ms = expire ? (int64_t)read_u64((uint8_t *)bytes + EXPIRES_AT) : NEVER;
        if (due_ms <= now_ms) goto unusual;
        used += size + weight;
        PyObject *due = due_ms == NEVER ? Py_NewRef(never) : PyLong_FromLongLong(due_ms);
        if (append(taken, due ? Py_BuildValue("OON", ref, record, due) : NULL) < 0) goto failed;
    }
    return taken ? Py_BuildValue("Nn", taken, used) : NULL;
unusual:
    Py_DECREF(taken);
    Py_RETURN_NONE;
failed:
    Py_DECREF(taken);
    return NULL;
}

// Let `items` have the entry items of a message: token, sequence number, delivery count, record, overlay. Takes the token.
static void put_entry(PyObject *items, Py_ssize_t index, PyObject *token, PyObject *ref, PyObject *record) {
    PyObject *entry[ITEMS] = {token, Py_XNewRef(PyTuple_GetItem(ref, 0)), Py_XNewRef(PyTuple_GetItem(ref, 2)),
                              Py_NewRef(record), Py_XNewRef(PyTuple_GetItem(ref, 3))};
    for (Py_ssize_t item = 0; item < ITEMS; item++) PyList_SetItem(items, index * ITEMS + item, entry[item]);
}

// lock(taken, prefix, first counter, until_ms, place, holder, held, tokens) -> entry items
// Adds to `held` and `tokens`: see `Locks` and `Holder` of the partition.
PyObject *lock(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *taken, *until_ms, *place, *holder, *held, *tokens;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    unsigned long long counter;
    if (!PyArg_ParseTuple(arguments, "O!y#KOOOO!O!", &PyList_Type, &taken, &prefix, &prefix_bytes, &counter, &until_ms,
                          &place, &holder, &PyDict_Type, &held, &PyDict_Type, &tokens))
        return NULL;
    if (prefix_bytes != TOKEN_BYTES - 8) {
        PyErr_SetString(PyExc_ValueError, "a prefix of another length");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(taken);
    PyObject *items = PyList_New(count * ITEMS);
    if (!items) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *one = PyList_GetItem(taken, index);
        PyObject *ref = PyTuple_GetItem(one, 0), *record = PyTuple_GetItem(one, 1), *due_ms = PyTuple_GetItem(one, 2);
        uint8_t bytes[TOKEN_BYTES];
        write_u64(write_bytes(bytes, prefix, TOKEN_BYTES - 8), counter++);
        PyObject *token = bytes_of(bytes, sizeof bytes), *size = PyLong_FromSsize_t(PyBytes_Size(record));
        PyObject *lock = token && size ? PyTuple_Pack(6, ref, size, due_ms, place, until_ms, holder) : NULL;
        Py_XDECREF(size);
        if (!lock || PyDict_SetItem(held, token, lock) < 0 || PyDict_SetItem(tokens, token, Py_None) < 0) {
            Py_XDECREF(token);
            Py_XDECREF(lock);
            Py_DECREF(items);
            return NULL;
        }
        Py_DECREF(lock);
        put_entry(items, index, token, ref, record);
    }
    return items;
}

// run_of_taken(taken, prefix, first counter, never) -> entry items, refs, bytes of records
// None if one of the messages expires.
PyObject *run_of_taken(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *taken, *never;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    unsigned long long counter;
    if (!PyArg_ParseTuple(arguments, "O!y#KO", &PyList_Type, &taken, &prefix, &prefix_bytes, &counter, &never)) return NULL;
    if (prefix_bytes != TOKEN_BYTES - 8) {
        PyErr_SetString(PyExc_ValueError, "a prefix of another length");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(taken);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *due_ms = PyTuple_GetItem(PyList_GetItem(taken, index), 2);
        int expires = !due_ms ? -1 : due_ms == never ? 0 : PyObject_RichCompareBool(due_ms, never, Py_NE);
        if (expires < 0) return NULL;
        if (expires) Py_RETURN_NONE;
    }
    PyObject *items = PyList_New(count * ITEMS), *refs = PyList_New(count), *sizes = PyList_New(count);
    for (Py_ssize_t index = 0; items && refs && sizes && index < count; index++) {
        PyObject *one = PyList_GetItem(taken, index), *ref = PyTuple_GetItem(one, 0), *record = PyTuple_GetItem(one, 1);
        uint8_t bytes[TOKEN_BYTES];
        write_u64(write_bytes(bytes, prefix, TOKEN_BYTES - 8), counter++);
        PyObject *token = bytes_of(bytes, sizeof bytes), *size = PyLong_FromSsize_t(PyBytes_Size(record));
        put_entry(items, index, token, ref, record);
        PyList_SetItem(refs, index, Py_NewRef(ref));
        PyList_SetItem(sizes, index, size);
        if (!token || !size || PyErr_Occurred()) Py_CLEAR(items);
    }
    if (items && refs && sizes) return Py_BuildValue("NNN", items, refs, sizes);
    Py_XDECREF(items);
    Py_XDECREF(refs);
    Py_XDECREF(sizes);
    return NULL;
}

// give(batch, records, weight, limit, prefix, first counter) -> [entry items of each, ...], refs, sizes, holders, bytes
// `batch` are (session, receiver, refs), `records` those of all refs. The first ones of the batch, until the bytes, with
// `weight` more for each message, reach the limit. None if one of their messages is missing, expires, or has more in its
// overlay than the session, which is left out of the items.
PyObject *give(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *batch, *records;
    const char *prefix;
    Py_ssize_t weight, limit, prefix_bytes, used = 0, at = 0;
    unsigned long long counter;
    if (!PyArg_ParseTuple(arguments, "O!O!nny#K", &PyList_Type, &batch, &PyList_Type, &records, &weight, &limit, &prefix,
                          &prefix_bytes, &counter))
        return NULL;
    if (prefix_bytes != TOKEN_BYTES - 8) {
        PyErr_SetString(PyExc_ValueError, "a prefix of another length");
        return NULL;
    }
    PyObject *given = PyList_New(0), *refs = PyList_New(0), *sizes = PyList_New(0), *holders = PyList_New(0);
    PyObject *result = NULL;
    if (!given || !refs || !sizes || !holders) goto end;
    for (Py_ssize_t index = 0; index < PyList_Size(batch) && (index == 0 || used < limit); index++) {
        PyObject *session = PyTuple_GetItem(PyList_GetItem(batch, index), 0);
        PyObject *its_refs = PyTuple_GetItem(PyList_GetItem(batch, index), 2);
        Py_ssize_t count = session && its_refs ? PyList_Size(its_refs) : -1;
        PyObject *items = count < 0 ? NULL : PyList_New(count * ITEMS);
        if (!items || append(given, items) < 0) goto end;
        for (Py_ssize_t entry = 0; entry < count; entry++, at++) {
            PyObject *ref = PyList_GetItem(its_refs, entry), *record = PyList_GetItem(records, at);
            PyObject *overlay = record ? PyTuple_GetItem(ref, 3) : NULL;
            char *bytes;
            Py_ssize_t size;
            if (!overlay) goto end;
            if (record == Py_None || !PyDict_Check(overlay) || PyDict_Size(overlay) != 1) goto unusual;
            if (PyBytes_AsStringAndSize(record, &bytes, &size) < 0) goto end;
            if (size < RECORD_HEADER_BYTES || read_u64((uint8_t *)bytes + EXPIRES_AT) != NEVER) goto unusual;
            used += size + weight;
            uint8_t token[TOKEN_BYTES];
            write_u64(write_bytes(token, prefix, TOKEN_BYTES - 8), counter++);
            PyObject *made = bytes_of(token, sizeof token);
            if (!made) goto end;
            put_entry(items, entry, made, ref, record);
            PyList_SetItem(items, entry * ITEMS + ITEMS - 1, Py_NewRef(Py_None));
            if (PyList_Append(refs, ref) < 0 || append(sizes, PyLong_FromSsize_t(size)) < 0 ||
                PyList_Append(holders, session) < 0)
                goto end;
        }
    }
    result = Py_BuildValue("OOOOn", given, refs, sizes, holders, used);
    goto end;
unusual:
    result = Py_NewRef(Py_None);
end:
    Py_XDECREF(given);
    Py_XDECREF(refs);
    Py_XDECREF(sizes);
    Py_XDECREF(holders);
    return result;
}

// held_of(refs, sizes, never, place, until_ms, holder of all | [holder of each, ...]) -> [held, ...]
PyObject *held_of(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *refs, *sizes, *never, *place, *until_ms, *holder;
    if (!PyArg_ParseTuple(arguments, "O!O!OOOO", &PyList_Type, &refs, &PyList_Type, &sizes, &never, &place, &until_ms,
                          &holder))
        return NULL;
    Py_ssize_t count = PyList_Size(refs);
    bool have_own = PyList_Check(holder);
    if (PyList_Size(sizes) != count || (have_own && PyList_Size(holder) != count)) {
        PyErr_SetString(PyExc_ValueError, "as many sizes and holders as refs");
        return NULL;
    }
    PyObject *held = PyList_New(count);
    for (Py_ssize_t index = 0; held && index < count; index++) {
        PyObject *ref = PyList_GetItem(refs, index), *size = PyList_GetItem(sizes, index);
        PyObject *one = PyTuple_Pack(6, ref, size, never, place, until_ms, have_own ? PyList_GetItem(holder, index) : holder);
        if (one) PyList_SetItem(held, index, one);
        else Py_CLEAR(held);
    }
    return held;
}

// unlock(held, tokens, now_ms, never, deferred, expiring) -> [held | None, ...]: as `Locks.remove_all` of the partition
PyObject *unlock(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *held, *tokens, *never, *deferred, *expiring;
    long long now_ms;
    if (!PyArg_ParseTuple(arguments, "O!O!LOO!O!", &PyDict_Type, &held, &PyList_Type, &tokens, &now_ms, &never,
                          &PySet_Type, &deferred, &PySet_Type, &expiring))
        return NULL;
    Py_ssize_t count = PyList_Size(tokens);
    PyObject *removed = PyList_New(0);
    PyObject *holder = NULL, *of_holder = NULL; // of the last lock; the lock's reference keeps the holder
    bool holder_has_ended = false;
    for (Py_ssize_t index = 0; removed && index < count; index++) {
        PyObject *token = PyList_GetItem(tokens, index), *lock = PyDict_GetItemWithError(held, token);
        if (!lock && PyErr_Occurred()) goto failed;
        if (lock && PyTuple_GetItem(lock, 5) != holder) {
            holder = PyTuple_GetItem(lock, 5);
            Py_XDECREF(of_holder);
            of_holder = PyObject_GetAttrString(holder, "tokens");
            PyObject *until = PyObject_GetAttrString(holder, "until_ms");
            holder_has_ended = until && PyLong_AsLongLong(until) <= now_ms;
            Py_XDECREF(until);
            if (!of_holder || PyErr_Occurred()) goto failed;
        }
        if (!lock || holder_has_ended || PyLong_AsLongLong(PyTuple_GetItem(lock, 4)) <= now_ms) {
            if (PyErr_Occurred() || PyList_Append(removed, Py_None) < 0) goto failed;
            continue;
        }
        long place = PyLong_AsLong(PyTuple_GetItem(lock, 3));
        if (PyErr_Occurred() || PyList_Append(removed, lock) < 0) goto failed; // which refers to the lock from now on
        PyObject *number = PyTuple_GetItem(PyTuple_GetItem(lock, 0), 0);
        if (place != PLACE_AVAILABLE) {
            if (PySet_Discard(deferred, number) < 0) goto failed;
        } else {
            int expires = PyObject_RichCompareBool(PyTuple_GetItem(lock, 2), never, Py_NE);
            if (expires < 0 || (expires && PySet_Discard(expiring, number) < 0)) goto failed;
        }
        if (PyDict_DelItem(held, token) < 0) goto failed;
        if (PyDict_DelItem(of_holder, token) < 0) { // the holder of an ended connection may have none
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) goto failed;
            PyErr_Clear();
        }
    }
    Py_XDECREF(of_holder);
    return removed;
failed:
    Py_XDECREF(of_holder);
    Py_DECREF(removed);
    return NULL;
}

// keys_of(messages, queue_id, never, timer) -> Keys of QUEUE, Keys of MESSAGES, keys of DUE, bytes
// None if one of the held messages is not available.
PyObject *keys_of(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *messages, *never;
    unsigned int queue_id;
    unsigned char timer;
    long long bytes = 0;
    if (!PyArg_ParseTuple(arguments, "O!IOb", &PyList_Type, &messages, &queue_id, &never, &timer)) return NULL;
    uint8_t prefix[QUEUE_KEY_BYTES];
    write_available_key(prefix, queue_id, 0);
    Keys *in_queue = keys_new(prefix, PREFIX_BYTES), *in_messages = keys_new(prefix, 0);
    PyObject *in_due = PyList_New(0), *result = NULL;
    if (!in_queue || !in_messages || !in_due) goto end;
    for (Py_ssize_t index = 0; index < PyList_Size(messages); index++) {
        PyObject *held = PyList_GetItem(messages, index), *ref = PyTuple_GetItem(held, 0);
        int expires = PyObject_RichCompareBool(PyTuple_GetItem(held, 2), never, Py_NE);
        long long due_ms = expires > 0 ? PyLong_AsLongLong(PyTuple_GetItem(held, 2)) : 0;
        if (due_ms < 0 || PyLong_AsLong(PyTuple_GetItem(held, 3)) > PLACE_AVAILABLE) {
            if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
            goto end;
        }
        unsigned long long number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(ref, 0));
        unsigned long long message_id = PyLong_AsUnsignedLongLong(PyTuple_GetItem(ref, 1));
        bytes += PyLong_AsLongLong(PyTuple_GetItem(held, 1));
        if (PyErr_Occurred()) goto end;
        if (!keys_add(in_queue, number) || !keys_add(in_messages, message_id)) {
            PyErr_NoMemory();
            goto end;
        }
        if (expires > 0 && append(in_due, due_key(queue_id, timer, (uint64_t)due_ms, number)) < 0) goto end;
    }
    result = Py_BuildValue("OOOL", in_queue, in_messages, in_due, bytes);
end:
    Py_XDECREF((PyObject *)in_queue);
    Py_XDECREF((PyObject *)in_messages);
    Py_XDECREF(in_due);
    return result;
}

// The records as a run. NULL with an exception, or without one if that has more than `most` bytes.
static PyObject *joined(PyObject *records, size_t most) {
    Py_ssize_t count = PyList_Size(records);
    size_t size = 0;
    if (count < 0) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_ssize_t bytes = PyBytes_Size(PyList_GetItem(records, index));
        if (bytes < 0) return NULL;
        size += RECORD_SIZE_BYTES + (size_t)bytes;
    }
    if (size > most) return NULL;
    PyObject *run = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (!run) return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(run);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *record = PyList_GetItem(records, index);
        size_t bytes = (size_t)PyBytes_Size(record);
        at = write_bytes(write_u32(at, (uint32_t)bytes), PyBytes_AsString(record), bytes);
    }
    return run;
}

// run_of(records) -> run
PyObject *run_of(PyObject *module, PyObject *records) {
    (void)module;
    return joined(records, SIZE_MAX);
}

// An entry item of `entries`; a borrowed reference.
static PyObject *item_at(PyObject *entries, Py_ssize_t entry, int item) { return PyList_GetItem(entries, entry * ITEMS + item); }

// True if the entry is of the same run as the one before. False, too, with an exception.
static bool is_continued(PyObject *entries, Py_ssize_t entry) {
    char *token, *before;
    Py_ssize_t token_bytes, before_bytes;
    if (item_at(entries, entry, 4) != Py_None || item_at(entries, entry - 1, 4) != Py_None) return false;
    if (PyBytes_AsStringAndSize(item_at(entries, entry, 0), &token, &token_bytes) < 0) return false;
    if (PyBytes_AsStringAndSize(item_at(entries, entry - 1, 0), &before, &before_bytes) < 0) return false;
    if (token_bytes != TOKEN_BYTES || before_bytes != TOKEN_BYTES || memcmp(token, before, 8)) return false;
    uint64_t counter = read_u64((uint8_t *)token + 8);
    if (counter == 0 || counter - 1 != read_u64((uint8_t *)before + 8)) return false;
    PyObject *count = item_at(entries, entry, 2), *count_before = item_at(entries, entry - 1, 2);
    return count == count_before || PyObject_RichCompareBool(count, count_before, Py_EQ) == 1;
}

// The sequence numbers of these entries, as in `broker.wire.DeliverRun`.
static PyObject *numbers_of(PyObject *entries, Py_ssize_t begin, Py_ssize_t end) {
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, (end - begin) * 8);
    if (!numbers) return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AsString(numbers);
    uint64_t first = 0;
    bool are_consecutive = true;
    for (Py_ssize_t entry = begin; entry < end; entry++) {
        uint64_t number = PyLong_AsUnsignedLongLong(item_at(entries, entry, 1));
        if (entry == begin) first = number;
        are_consecutive = are_consecutive && number == first + (uint64_t)(entry - begin);
        at = write_u64(at, number);
    }
    if (are_consecutive || PyErr_Occurred()) Py_CLEAR(numbers);
    return PyErr_Occurred() ? NULL : are_consecutive ? Py_NewRef(item_at(entries, begin, 1)) : numbers;
}

// NULL with an exception, or without one if it is a large run.
static PyObject *part_of(PyObject *entries, Py_ssize_t begin, Py_ssize_t end) {
    if (item_at(entries, begin, 4) != Py_None) return PyList_GetSlice(entries, begin * ITEMS, end * ITEMS);
    PyObject *records = PyList_New(end - begin), *run = NULL, *part = NULL;
    for (Py_ssize_t entry = begin; records && entry < end; entry++)
        PyList_SetItem(records, entry - begin, Py_NewRef(item_at(entries, entry, 3)));
    PyObject *numbers = records ? numbers_of(entries, begin, end) : NULL;
    if (numbers) run = joined(records, LARGE_RUN_BYTES);
    if (run)
        part = Py_BuildValue("OOOnO", item_at(entries, begin, 0), numbers, item_at(entries, begin, 2), end - begin, run);
    Py_XDECREF(records);
    Py_XDECREF(numbers);
    Py_XDECREF(run);
    return part;
}

// Bytes of the records of these entries, as a run has them; -1 with an exception.
static Py_ssize_t run_bytes_of(PyObject *entries, Py_ssize_t count) {
    Py_ssize_t bytes = 0;
    for (Py_ssize_t entry = 0; entry < count; entry++) bytes += RECORD_SIZE_BYTES + PyBytes_Size(item_at(entries, entry, 3));
    return PyErr_Occurred() ? -1 : bytes;
}

// together(deliveries, largest run) -> [(channel, locked until, part), ...]
// See `broker.runs`. None if one of the deliveries has no lock, is more than one run, or a larger one.
PyObject *together(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *deliveries;
    Py_ssize_t largest;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyList_Type, &deliveries, &largest)) return NULL;
    Py_ssize_t number = PyList_Size(deliveries);
    PyObject *found = PyList_New(number);
    for (Py_ssize_t index = 0; found && index < number; index++) {
        PyObject *delivery = PyList_GetItem(deliveries, index), *channel, *until_ms, *entries;
        if (!PyArg_ParseTuple(delivery, "(OO)OO!", &channel, &channel, &until_ms, &PyList_Type, &entries)) goto failed;
        Py_ssize_t count = PyList_Size(entries) / ITEMS;
        int is_locked = PyObject_IsTrue(until_ms);
        if (is_locked < 0) goto failed;
        bool is_run = is_locked && count && item_at(entries, 0, 4) == Py_None;
        for (Py_ssize_t entry = 1; is_run && entry < count; entry++) is_run = is_continued(entries, entry);
        if (PyErr_Occurred()) goto failed;
        Py_ssize_t bytes = is_run ? run_bytes_of(entries, count) : 0;
        if (bytes < 0) goto failed;
        if (!is_run || bytes > largest || bytes > LARGE_RUN_BYTES) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
        PyObject *part = part_of(entries, 0, count), *made = part ? PyTuple_Pack(3, channel, until_ms, part) : NULL;
        Py_XDECREF(part);
        if (!made) goto failed;
        PyList_SetItem(found, index, made);
    }
    return found;
failed:
    Py_DECREF(found);
    return NULL;
}

// parts_of(entries): see `broker.runs`; False if a run is large
PyObject *parts_of(PyObject *module, PyObject *entries) {
    (void)module;
    Py_ssize_t items = PyList_Size(entries), count = items / ITEMS, begin = 0, ends = 1;
    if (items < 0) return NULL;
    for (Py_ssize_t entry = 1; entry < count; entry++) ends += !is_continued(entries, entry);
    if (PyErr_Occurred()) return NULL;
    if (2 * ends > count + 1) Py_RETURN_NONE;
    PyObject *parts = PyList_New(0);
    for (Py_ssize_t entry = 1; parts && entry <= count; entry++) {
        if (entry < count && is_continued(entries, entry)) continue;
        PyObject *part = part_of(entries, begin, entry);
        if (!part && !PyErr_Occurred()) {
            Py_DECREF(parts);
            Py_RETURN_FALSE;
        }
        if (append(parts, part) < 0) Py_CLEAR(parts);
        begin = entry;
    }
    return parts;
}

// tokens_of(ranges) -> [token, ...]: see `broker.runs`
PyObject *tokens_of(PyObject *module, PyObject *ranges) {
    (void)module;
    Py_ssize_t count = PySequence_Size(ranges);
    if (count < 0) return NULL;
    PyObject *tokens = PyList_New(0);
    for (Py_ssize_t index = 0; tokens && index < count; index++) {
        PyObject *range = PySequence_GetItem(ranges, index);
        char *bytes;
        Py_ssize_t size;
        if (!range || PyBytes_AsStringAndSize(range, &bytes, &size) < 0) {
            Py_XDECREF(range);
            Py_CLEAR(tokens);
        } else if (size != RANGE_BYTES) {
            if (append(tokens, range) < 0) Py_CLEAR(tokens);
        } else {
            uint8_t token[TOKEN_BYTES];
            memcpy(token, bytes, TOKEN_BYTES);
            for (uint32_t left = read_u32((uint8_t *)bytes + TOKEN_BYTES); tokens && left; left--) {
                if (append(tokens, bytes_of(token, sizeof token)) < 0) Py_CLEAR(tokens);
                write_u64(token + 8, read_u64(token + 8) + 1);
            }
            Py_DECREF(range);
        }
    }
    return tokens;
}

// ranges_of(ranges) -> [range, ...]: see `broker.runs`
PyObject *ranges_of(PyObject *module, PyObject *ranges) {
    (void)module;
    Py_ssize_t count = PyList_Size(ranges), joined_here = 0; // in `first`; none before the first
    if (count < 0) return NULL;
    PyObject *joined = PyList_New(0), *one = NULL;
    uint8_t first[RANGE_BYTES] = {0};
    uint64_t length = 0;
    for (Py_ssize_t index = 0; joined && index <= count; index++) {
        char *bytes = NULL;
        Py_ssize_t size = 0;
        uint64_t here = 1;
        PyObject *range = index < count ? PyList_GetItem(ranges, index) : NULL;
        if (range && PyBytes_AsStringAndSize(range, &bytes, &size) < 0) goto failed;
        if (size == RANGE_BYTES) here = read_u32((uint8_t *)bytes + TOKEN_BYTES);
        bool is_range = size == TOKEN_BYTES || size == RANGE_BYTES;
        if (joined_here && is_range && length + here <= UINT32_MAX && !memcmp(first, bytes, 8) &&
            read_u64(first + 8) + length == read_u64((uint8_t *)bytes + 8) && read_u64((uint8_t *)bytes + 8) >= length) {
            length += here;
            joined_here++;
            continue;
        }
        if (joined_here == 1 && PyList_Append(joined, one) < 0) goto failed;
        if (joined_here > 1) {
            write_u32(first + TOKEN_BYTES, (uint32_t)length);
            if (append(joined, bytes_of(first, sizeof first)) < 0) goto failed;
        }
        joined_here = 0;
        if (range && !is_range && PyList_Append(joined, range) < 0) goto failed;
        if (!is_range) continue;
        memcpy(first, bytes, TOKEN_BYTES);
        one = range;
        length = here;
        joined_here = 1;
    }
    return joined;
failed:
    Py_XDECREF(joined);
    return NULL;
}

// delete_all(fresh, changed, keys, highest): those that are fresh are removed, the others are None in `changed`. Returns
// the highest of these, and of `highest`.
PyObject *delete_all(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *fresh, *changed, *keys, *highest;
    if (!PyArg_ParseTuple(arguments, "O!O!O!S", &PyDict_Type, &fresh, &PyDict_Type, &changed, &PyTuple_Type, &keys,
                          &highest))
        return NULL;
    char *most, *bytes;
    Py_ssize_t count = PyTuple_Size(keys), left = PyDict_Size(fresh), most_bytes, size;
    if (PyBytes_AsStringAndSize(highest, &most, &most_bytes) < 0) return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *key = PyTuple_GetItem(keys, index);
        bool is_fresh = left && PyDict_GetItemWithError(fresh, key);
        if (PyErr_Occurred() || PyBytes_AsStringAndSize(key, &bytes, &size) < 0) return NULL;
        left -= is_fresh;
        if ((is_fresh ? PyDict_DelItem(fresh, key) : PyDict_SetItem(changed, key, Py_None)) < 0) return NULL;
        if (is_fresh) continue;
        int order = memcmp(bytes, most, (size_t)(size < most_bytes ? size : most_bytes));
        if (order > 0 || (order == 0 && size > most_bytes)) {
            highest = key;
            most = bytes;
            most_bytes = size;
        }
    }
    return Py_NewRef(highest);
}
