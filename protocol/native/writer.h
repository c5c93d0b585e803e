// What proton writes on a connection: a pump takes it in each pull, and an Outgoing ahead of the next one.
#ifndef PEEKLOCK_WRITER_H
#define PEEKLOCK_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "memory.h"

struct writer {
    void *transport, *collector;
    struct buffer ahead; // what was taken since the last pull
    bool dispatching;    // an event is being handled, which is popped then
    bool finished;       // proton will write nothing any more
};

// Add all frames that proton has written to `frames`: false if there is no memory.
bool writer_take(struct writer *writer, struct buffer *frames);

// Take them ahead of the next pull: false if there is no memory.
bool writer_take_ahead(struct writer *writer);

// Forget events of links on which was written, which nobody needs.
void writer_forget_events(const struct writer *writer);

uint32_t writer_max_frame(const struct writer *writer); // of the peer; 0 is no limit

#endif
