#include "writer.h"

#include "proton.h"

enum { PEEK_BYTES = 1024 }; // taken from proton at once, at least

bool writer_take(struct writer *writer, struct buffer *frames) {
    for (;;) {
        if (!buffer_reserve(frames, PEEK_BYTES)) return false;
        ssize_t size = proton.transport_peek(writer->transport, (char *)frames->bytes + frames->size,
                                             frames->capacity - frames->size);
        writer->finished = size < 0;
        if (size <= 0) return true;
        proton.transport_pop(writer->transport, (size_t)size);
        frames->size += (size_t)size;
    }
}

bool writer_take_ahead(struct writer *writer) {
    size_t size = writer->ahead.size;
    if (!writer_take(writer, &writer->ahead)) return false;
    if (writer->ahead.size > size) writer_forget_events(writer);
    return true;
}

void writer_forget_events(const struct writer *writer) {
    while (!writer->dispatching && proton.collector_pop(writer->collector)) {}
}

uint32_t writer_max_frame(const struct writer *writer) {
    return proton.transport_get_remote_max_frame(writer->transport);
}
