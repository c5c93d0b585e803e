// Functions of the proton that python-qpid-proton has in it. Nothing is linked: `protocol.engine.proton.native` finds
// their addresses and checks their signatures, which must be those below.
#ifndef PEEKLOCK_PROTON_H
#define PEEKLOCK_PROTON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct pn_bytes {
    size_t size;
    const char *start;
};

#define PROTON_FUNCTIONS(F)                                     \
    F(ssize_t, transport_push, (void *, const char *, size_t))  \
    F(ssize_t, transport_peek, (void *, char *, size_t))        \
    F(void, transport_pop, (void *, size_t))                    \
    F(uint32_t, transport_get_remote_max_frame, (void *))       \
    F(void *, collector_peek, (void *))                         \
    F(bool, collector_pop, (void *))                            \
    F(int, event_type, (void *))                                \
    F(void *, event_delivery, (void *))                         \
    F(void *, delivery_link, (void *))                          \
    F(bool, delivery_settled, (void *))                         \
    F(uint64_t, delivery_remote_state, (void *))                \
    F(bool, delivery_readable, (void *))                        \
    F(bool, delivery_partial, (void *))                         \
    F(void *, link_current, (void *))                           \
    F(bool, link_advance, (void *))                             \
    F(void *, link_session, (void *))                           \
    F(ssize_t, link_send, (void *, const char *, size_t))       \
    F(uint32_t, session_remote_incoming_window, (void *))       \
    F(void *, delivery, (void *, struct pn_bytes))              \
    F(struct pn_bytes, delivery_tag, (void *))                  \
    F(void *, delivery_local, (void *))                         \
    F(void *, delivery_remote, (void *))                        \
    F(void *, disposition_data, (void *))                       \
    F(void, data_clear, (void *))                               \
    F(ssize_t, data_decode, (void *, const char *, size_t))     \
    F(ssize_t, data_encode, (void *, char *, size_t))           \
    F(void, delivery_update, (void *, uint64_t))                \
    F(void, delivery_settle, (void *))

struct proton {
#define MEMBER(result, name, arguments) result(*name) arguments;
    PROTON_FUNCTIONS(MEMBER)
#undef MEMBER
};
extern struct proton proton;

// Codes of outcomes (AMQP 1.0, 3.4).
enum { ACCEPTED = 0x24, REJECTED = 0x25, RELEASED = 0x26, MODIFIED = 0x27 };
enum { TRANSACTIONAL = 0x34 }; // 4.5.8

// Events; `protocol.engine.proton.native` checks the number.
enum { DELIVERY_EVENT = 28 };

#endif
