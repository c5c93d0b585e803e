/* amqpwork - load for what needs more than a sender and a receiver: sessions and transactions.
 *
 * One connection, one thread. Prints one line of JSON. Build: make (needs libqpid-proton11-dev).
 *
 *   amqpwork fill     --sessions 100000 -n 1000000    send n messages, their sessions in turn
 *   amqpwork accept   --receivers 200 --per 10 -n 5000 --rate 500
 *                     receivers that accept the next session, complete `per` messages of it and close; with a rate,
 *                     so many sessions a second in all, and the accept is timed from the attach
 *   amqpwork stream   --sessions 1000 --seconds 5     send to the sessions in turn, and receive with one link each;
 *                     with --plain the same messages, and one receiver that knows no sessions
 *   amqpwork transact --receivers 16 --per 10 --seconds 5
 *                     as many transactions at once, each of `per` sends and `per` completions of what was sent
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <proton/codec.h>
#include <proton/condition.h>
#include <proton/connection.h>
#include <proton/connection_driver.h>
#include <proton/delivery.h>
#include <proton/disposition.h>
#include <proton/event.h>
#include <proton/link.h>
#include <proton/sasl.h>
#include <proton/session.h>
#include <proton/terminus.h>
#include <proton/transport.h>

enum { READ_CHUNK = 128 << 10, OUT_HIGH = 256 << 10, MAX_PER = 100, DECLARED = 0x33, TRANSACTIONAL = 0x34 };
enum { LINKS_PER_SESSION = 200, /* brokers allow 256 or so */ SESSION_CREDIT = 20 };

static struct {
    enum { FILL, ACCEPT, STREAM, TRANSACT } mode;
    const char *host, *port, *user, *pass, *address;
    uint64_t n;
    int receivers, per, sessions;
    uint32_t size, window;
    double seconds, rate, idle;
    bool plain;
} O = {.host = "127.0.0.1", .port = "5672", .receivers = 16, .per = 10, .sessions = 1, .size = 1024, .window = 1000, .idle = 10};

typedef struct { /* a receiver of a session, or one of the transactions at once */
    pn_session_t *in;
    pn_link_t *link;
    int got;
    uint64_t asked_ns, due_ns;
    bool closing;
    char id[32]; /* of the transaction */
    size_t id_len;
    pn_delivery_t *control; /* the declare or the discharge */
    bool discharging;
} worker_t;

static struct {
    pn_connection_driver_t d;
    pn_session_t *session; /* the one that has room for links */
    int links_in_session;
    pn_link_t *sender, *receiver, *coordinator;
    int fd;
    unsigned char out[OUT_HIGH + 4096];
    size_t out_len, out_off;
} C;
static worker_t *W;
static uint64_t sent, accepted, completed, done, began_ns, ended_ns, progress_ns, names;
static int attached_count;
static uint64_t *latencies;
static size_t nlat;
static bool stopping;
static char error[256];
static unsigned char *message;
static size_t message_len, session_at;
static pn_delivery_t *waiting[MAX_PER * 4096]; /* received, for the next transaction that wants them */
static size_t nwaiting;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "amqpwork: %s\n", what);
    exit(1);
}

static void fail(const char *what, pn_condition_t *c) {
    if (error[0]) return;
    snprintf(error, sizeof error, "%s: %s: %s", what, c && pn_condition_is_set(c) ? pn_condition_get_name(c) : "",
             c && pn_condition_get_description(c) ? pn_condition_get_description(c) : "");
    for (char *p = error; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < 32) *p = ' ';
    stopping = true;
}

/* durable header, properties with a session id of 8 digits if there are sessions, one data section */
static void build_message(void) {
    static const unsigned char header[] = {0x00, 0x53, 0x70, 0xc0, 0x02, 0x01, 0x41};
    static const unsigned char properties[] = {0x00, 0x53, 0x73, 0xc0, 21, 11, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                               0x40, 0x40, 0x40, 0x40, 0xa1, 8};
    message = malloc(O.size + 64);
    size_t k = 0;
    memcpy(message, header, k = sizeof header);
    if (O.mode == FILL || O.mode == STREAM) {
        memcpy(message + k, properties, sizeof properties);
        session_at = k += sizeof properties;
        k += 8;
    }
    static const unsigned char data[] = {0x00, 0x53, 0x75, 0xb0};
    memcpy(message + k, data, sizeof data);
    uint32_t size = htonl(O.size);
    memcpy(message + k + 4, &size, 4);
    k += 8;
    uint64_t x = 88172645463325252ull;
    for (uint32_t i = 0; i < O.size; i++) x ^= x << 13, x ^= x >> 7, x ^= x << 17, message[k + i] = (unsigned char)x;
    message_len = k + O.size;
}

static void session_name(char *to, uint64_t number) { snprintf(to, 9, "%08llu", (unsigned long long)number % 100000000u); }

/* ------------------------------------------------------------------ links */
static pn_session_t *session_with_room(void) {
    if (C.links_in_session++ == LINKS_PER_SESSION) {
        C.links_in_session = 1;
        C.session = pn_session(C.d.connection);
        pn_session_open(C.session);
    }
    return C.session;
}

static pn_link_t *open_sender(const char *name) {
    pn_link_t *l = pn_sender(C.session, name);
    pn_terminus_set_address(pn_link_target(l), O.address);
    pn_link_set_snd_settle_mode(l, PN_SND_UNSETTLED);
    pn_link_open(l);
    return l;
}

static pn_link_t *open_receiver(pn_session_t *in, const char *name, const char *session, bool sessions) {
    pn_link_t *l = pn_receiver(in, name);
    pn_terminus_set_address(pn_link_source(l), O.address);
    pn_link_set_snd_settle_mode(l, PN_SND_UNSETTLED);
    if (sessions) {
        pn_data_t *f = pn_terminus_filter(pn_link_source(l));
        pn_data_put_map(f);
        pn_data_enter(f);
        pn_data_put_symbol(f, pn_bytes(28, "com.microsoft:session-filter"));
        if (session)
            pn_data_put_string(f, pn_bytes(strlen(session), session));
        else
            pn_data_put_null(f);
        pn_data_exit(f);
    }
    pn_link_open(l);
    return l;
}

static void start_accept(worker_t *w) {
    char name[32];
    snprintf(name, sizeof name, "r%llu", (unsigned long long)names++);
    if (!w->in) w->in = session_with_room();
    w->link = open_receiver(w->in, name, NULL, true);
    pn_link_set_context(w->link, w);
    w->asked_ns = now_ns();
    w->got = 0, w->closing = false;
}

static void open_links(void) {
    if (O.mode == FILL || O.mode == STREAM || O.mode == TRANSACT) C.sender = open_sender("sender");
    W = calloc((size_t)O.receivers, sizeof *W);
    if (O.mode == STREAM && O.plain) {
        W[0].link = open_receiver(session_with_room(), "receiver", NULL, false);
        pn_link_set_context(W[0].link, &W[0]);
        pn_link_flow(W[0].link, (int)O.window);
    } else if (O.mode == STREAM) {
        free(W);
        W = calloc((size_t)O.sessions, sizeof *W);
        for (int i = 0; i < O.sessions; i++) {
            char name[32], id[9];
            snprintf(name, sizeof name, "r%d", i);
            session_name(id, (uint64_t)i);
            W[i].link = open_receiver(session_with_room(), name, id, true);
            pn_link_set_context(W[i].link, &W[i]);
            pn_link_flow(W[i].link, SESSION_CREDIT);
        }
    } else if (O.mode == ACCEPT) {
        uint64_t now = now_ns();
        for (int i = 0; i < O.receivers; i++) /* spread over one round */
            W[i].due_ns = now + (O.rate > 0 ? (uint64_t)(i * 1e9 / O.rate) : 0);
    } else if (O.mode == TRANSACT) {
        C.receiver = open_receiver(C.session, "receiver", NULL, false);
        pn_link_flow(C.receiver, 2 * O.receivers * O.per);
        C.coordinator = pn_sender(C.session, "coordinator");
        pn_terminus_set_type(pn_link_target(C.coordinator), PN_COORDINATOR);
        pn_data_t *caps = pn_terminus_capabilities(pn_link_target(C.coordinator));
        pn_data_put_symbol(caps, pn_bytes(23, "amqp:local-transactions"));
        pn_link_open(C.coordinator);
    }
}

/* ---------------------------------------------------------------- sending */
static void send_one(void *context, const worker_t *in) {
    static uint64_t tag;
    tag++;
    pn_delivery_t *d = pn_delivery(C.sender, pn_dtag((char *)&tag, sizeof tag));
    pn_delivery_set_context(d, context);
    if (session_at) {
        char id[9];
        session_name(id, sent % (uint64_t)O.sessions);
        memcpy(message + session_at, id, 8);
    }
    if (in) {
        pn_data_t *state = pn_disposition_data(pn_delivery_local(d));
        pn_data_put_list(state);
        pn_data_enter(state);
        pn_data_put_binary(state, pn_bytes(in->id_len, in->id));
        pn_data_exit(state);
        pn_delivery_update(d, TRANSACTIONAL);
    }
    pn_link_send(C.sender, (char *)message, message_len);
    pn_link_advance(C.sender);
    if (!began_ns) began_ns = now_ns();
    sent++;
}

static void pump(void) {
    int burst = 0;
    while (!stopping && burst++ < 512 && (!O.n || sent < O.n) && sent - accepted < O.window && pn_link_credit(C.sender) > 0 &&
           pn_session_outgoing_bytes(pn_link_session(C.sender)) < OUT_HIGH)
        send_one(NULL, NULL);
}

/* ----------------------------------------------------------- transactions */
static void control(worker_t *w, bool discharge) {
    static uint64_t tag = 1u << 31;
    tag++;
    w->control = pn_delivery(C.coordinator, pn_dtag((char *)&tag, sizeof tag));
    pn_delivery_set_context(w->control, w);
    w->discharging = discharge;
    unsigned char m[64];
    size_t k = 0;
    static const unsigned char value[] = {0x00, 0x53, 0x77, 0x00, 0x53};
    memcpy(m, value, k = sizeof value);
    if (!discharge) {
        m[k++] = 0x31, m[k++] = 0x45;
    } else {
        m[k++] = 0x32, m[k++] = 0xc0, m[k++] = (unsigned char)(w->id_len + 4), m[k++] = 2, m[k++] = 0xa0;
        m[k++] = (unsigned char)w->id_len;
        memcpy(m + k, w->id, w->id_len);
        k += w->id_len;
        m[k++] = 0x42;
    }
    pn_link_send(C.coordinator, (char *)m, k);
    pn_link_advance(C.coordinator);
}

static void complete_in(const worker_t *w, pn_delivery_t *d) {
    pn_data_t *state = pn_disposition_data(pn_delivery_local(d));
    pn_data_put_list(state);
    pn_data_enter(state);
    pn_data_put_binary(state, pn_bytes(w->id_len, w->id));
    pn_data_put_described(state);
    pn_data_enter(state);
    pn_data_put_ulong(state, 0x24);
    pn_data_put_list(state);
    pn_data_exit(state);
    pn_data_exit(state);
    pn_delivery_update(d, TRANSACTIONAL);
    pn_delivery_settle(d);
}

/* a transaction that was declared takes what it completes, does its work and is discharged in the same flight */
static void work(worker_t *w) {
    for (int i = 0; i < O.per; i++) complete_in(w, waiting[--nwaiting]);
    for (int i = 0; i < O.per; i++) send_one(w, w);
    pn_link_flow(C.receiver, O.per);
    control(w, true);
}

/* ----------------------------------------------------------------- events */
static void received(pn_delivery_t *d) {
    pn_link_t *l = pn_delivery_link(d);
    if (!pn_delivery_readable(d) || pn_delivery_partial(d)) return;
    static char scratch[1 << 20];
    while (pn_link_recv(l, scratch, sizeof scratch) > 0) {}
    pn_link_advance(l);
    worker_t *w = pn_link_get_context(l);
    if (stopping) return;
    if (O.mode == TRANSACT) {
        waiting[nwaiting++] = d;
        return;
    }
    pn_delivery_update(d, PN_ACCEPTED);
    pn_delivery_settle(d);
    completed++;
    w->got++;
    if (O.mode == STREAM) {
        int credit = O.plain ? (int)O.window : SESSION_CREDIT;
        if (pn_link_credit(l) <= credit / 2) pn_link_flow(l, credit - pn_link_credit(l));
    } else if (w->got == O.per) {
        w->closing = true;
        pn_link_close(l);
    }
}

static void answered(pn_delivery_t *d) {
    pn_link_t *l = pn_delivery_link(d);
    if (!pn_delivery_updated(d) || pn_link_is_receiver(l)) return;
    uint64_t state = pn_delivery_remote_state(d);
    if (!state && !pn_delivery_settled(d)) return;
    worker_t *w = pn_delivery_get_context(d);
    if (l == C.coordinator) {
        if (state == PN_REJECTED) fail("coordinator", pn_disposition_condition(pn_delivery_remote(d)));
        if (state == DECLARED) {
            pn_data_t *data = pn_disposition_data(pn_delivery_remote(d));
            pn_data_rewind(data);
            pn_data_next(data);
            pn_data_enter(data);
            pn_data_next(data);
            pn_bytes_t id = pn_data_get_binary(data);
            if (id.size == 0 || id.size > sizeof w->id) die("a transaction id of another size");
            memcpy(w->id, id.start, w->id_len = id.size);
        }
        pn_delivery_settle(d);
        w->control = NULL;
        if (w->discharging) {
            latencies = nlat & (nlat - 1) ? latencies : realloc(latencies, (nlat ? 2 * nlat : 1) * sizeof *latencies);
            latencies[nlat++] = now_ns() - w->asked_ns;
            done++;
            w->id_len = 0;
            w->discharging = false;
        }
        return;
    }
    if (state == PN_REJECTED) fail("rejected", pn_disposition_condition(pn_delivery_remote(d)));
    accepted++;
    pn_delivery_settle(d);
}

static void attached(pn_link_t *l) {
    worker_t *w = pn_link_get_context(l);
    attached_count++;
    if (!w || O.mode != ACCEPT) return;
    if (!pn_terminus_get_address(pn_link_remote_source(l))) return; /* refused: the detach says why */
    latencies = nlat & (nlat - 1) ? latencies : realloc(latencies, (nlat ? 2 * nlat : 1) * sizeof *latencies);
    latencies[nlat++] = now_ns() - w->asked_ns;
    pn_link_flow(l, O.per);
}

static void detached(pn_link_t *l) {
    worker_t *w = pn_link_get_context(l);
    if (!w || !w->closing) {
        if (!stopping) fail("link closed by peer", pn_link_remote_condition(l));
        return;
    }
    pn_link_free(l);
    w->link = NULL;
    done++;
    uint64_t now = now_ns();
    w->due_ns = O.rate > 0 ? w->due_ns + (uint64_t)(O.receivers * 1e9 / O.rate) : now;
}

static void handle_events(void) {
    pn_event_t *e;
    while ((e = pn_connection_driver_next_event(&C.d))) switch (pn_event_type(e)) {
        case PN_CONNECTION_INIT: {
            pn_connection_t *c = pn_event_connection(e);
            pn_connection_set_container(c, "amqpwork");
            pn_connection_set_hostname(c, O.host);
            pn_connection_open(c);
            C.session = pn_session(c);
            pn_session_open(C.session);
            open_links();
            break;
        }
        case PN_DELIVERY: {
            pn_delivery_t *d = pn_event_delivery(e);
            if (pn_link_is_receiver(pn_delivery_link(d)))
                received(d);
            else
                answered(d);
            break;
        }
        case PN_LINK_REMOTE_OPEN: attached(pn_event_link(e)); break;
        case PN_LINK_REMOTE_CLOSE:
        case PN_LINK_REMOTE_DETACH: detached(pn_event_link(e)); break;
        case PN_CONNECTION_REMOTE_CLOSE:
            if (!stopping) fail("connection closed by peer", pn_connection_remote_condition(C.d.connection));
            pn_connection_close(C.d.connection);
            break;
        case PN_TRANSPORT_ERROR:
            if (!stopping) fail("transport", pn_transport_condition(C.d.transport));
            break;
        default: break;
        }
}

/* -------------------------------------------------------------------- I/O */
static bool write_out(void) { /* true when something could not be written yet */
    for (;;) {
        if (C.out_off == C.out_len) {
            C.out_off = C.out_len = 0;
            for (;;) {
                pn_bytes_t b = pn_connection_driver_write_buffer(&C.d);
                if (!b.size || C.out_len >= OUT_HIGH) break;
                size_t take = b.size < sizeof C.out - C.out_len ? b.size : sizeof C.out - C.out_len;
                memcpy(C.out + C.out_len, b.start, take);
                C.out_len += take;
                pn_connection_driver_write_done(&C.d, take);
            }
            if (!C.out_len) return false;
        }
        ssize_t w = send(C.fd, C.out + C.out_off, C.out_len - C.out_off, MSG_NOSIGNAL);
        if (w < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (w < 0) die(strerror(errno));
        C.out_off += (size_t)w;
    }
}

static bool read_in(void) { /* false at the end of the connection */
    for (int i = 0; i < 4; i++) {
        pn_rwbytes_t b = pn_connection_driver_read_buffer_sized(&C.d, READ_CHUNK);
        if (!b.size) return true;
        ssize_t r = recv(C.fd, b.start, b.size, 0);
        if (r < 0) return errno == EAGAIN || errno == EINTR;
        if (r == 0) return false;
        pn_connection_driver_read_done(&C.d, (size_t)r);
        handle_events();
        if ((size_t)r < b.size) return true;
    }
    return true;
}

static void open_connection(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(O.port))};
    if (inet_pton(AF_INET, O.host, &at.sin_addr) != 1) die("--host takes an IPv4 address");
    C.fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(C.fd, (struct sockaddr *)&at, sizeof at)) die(strerror(errno));
    int one = 1;
    setsockopt(C.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(C.fd, F_SETFL, O_NONBLOCK);
    pn_connection_t *pc = pn_connection();
    if (O.user) {
        pn_connection_set_user(pc, O.user);
        pn_connection_set_password(pc, O.pass ? O.pass : "");
    }
    if (pn_connection_driver_init(&C.d, pc, NULL)) die("pn_connection_driver_init failed");
    pn_transport_set_channel_max(C.d.transport, 100);
    pn_sasl_t *s = pn_sasl(C.d.transport);
    pn_sasl_set_allow_insecure_mechs(s, true);
    pn_sasl_allowed_mechs(s, O.user ? "PLAIN" : "ANONYMOUS");
    handle_events();
}

/* ------------------------------------------------------------------- main */
static void usage(void) {
    fputs("usage: amqpwork fill|accept|stream|transact --address A [--host H --port P --user U --password W]\n"
          "  -n N  --seconds T   stop after N messages (accept: sessions; transact: transactions), or T seconds\n"
          "  --sessions S        fill, stream: number of sessions\n"
          "  --receivers R       accept: receivers at once; transact: transactions at once (default 16)\n"
          "  --per P             accept: messages of a session; transact: sends, and completions (default 10)\n"
          "  --plain             stream: one receiver of a queue that requires no sessions\n"
          "  --rate R            accept: sessions a second in all (default: as fast as it goes)\n"
          "  --size S --window W message bytes (default 1024), most sends without an outcome (default 1000)\n"
          "  --idle T            give up after T seconds without progress (default 10)\n",
          stderr);
    exit(1);
}

static void parse(int argc, char **argv) {
    enum { HOST = 256, PORT, USER, PASS, ADDRESS, RECEIVERS, PER, SESSIONS, SIZE, WINDOW, SECONDS, RATE, IDLE, PLAIN };
    static const struct option L[] = {
        {"host", 1, 0, HOST},         {"port", 1, 0, PORT},           {"user", 1, 0, USER},     {"password", 1, 0, PASS},
        {"address", 1, 0, ADDRESS},   {"addresses", 1, 0, ADDRESS},   {"receivers", 1, 0, RECEIVERS}, {"per", 1, 0, PER},
        {"sessions", 1, 0, SESSIONS}, {"size", 1, 0, SIZE},           {"window", 1, 0, WINDOW}, {"seconds", 1, 0, SECONDS},
        {"rate", 1, 0, RATE},         {"idle", 1, 0, IDLE},           {"plain", 0, 0, PLAIN},
        {0, 0, 0, 0}};
    if (argc < 2) usage();
    static const char *names[] = {"fill", "accept", "stream", "transact"};
    size_t m = 0;
    while (m < 4 && strcmp(argv[1], names[m])) m++;
    if (m == 4) usage();
    O.mode = (int)m;
    argv++, argc--;
    for (int o; (o = getopt_long(argc, argv, "n:", L, NULL)) != -1;) switch (o) {
        case 'n': O.n = strtoull(optarg, 0, 10); break;
        case HOST: O.host = optarg; break;
        case PORT: O.port = optarg; break;
        case USER: O.user = optarg; break;
        case PASS: O.pass = optarg; break;
        case ADDRESS: O.address = optarg; break;
        case RECEIVERS: O.receivers = atoi(optarg); break;
        case PER: O.per = atoi(optarg); break;
        case SESSIONS: O.sessions = atoi(optarg); break;
        case SIZE: O.size = (uint32_t)strtoul(optarg, 0, 10); break;
        case WINDOW: O.window = (uint32_t)strtoul(optarg, 0, 10); break;
        case SECONDS: O.seconds = atof(optarg); break;
        case RATE: O.rate = atof(optarg); break;
        case IDLE: O.idle = atof(optarg); break;
        case PLAIN: O.plain = true; break;
        default: usage();
        }
    if (!O.address || O.receivers < 1 || O.receivers > 2000 || O.per < 1 || O.per > MAX_PER || O.sessions < 1) usage();
    if (!O.n && O.seconds <= 0) usage();
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    parse(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    build_message();
    open_connection();
    uint64_t tick_ns = 0, seeded = 0, mark = 0;
    progress_ns = now_ns();
    while (!stopping) {
        uint64_t now = now_ns();
        int wait_ms = 20;
        if (O.mode == FILL || O.mode == STREAM) {
            if (O.mode == FILL || attached_count == (O.plain ? 1 : O.sessions) + 1) pump();
            if (pn_link_credit(C.sender) > 0 && sent - accepted < O.window && !C.out_len && (!O.n || sent < O.n)) wait_ms = 0;
        } else if (O.mode == ACCEPT) {
            if (!began_ns) began_ns = now;
            for (int i = 0; i < O.receivers; i++)
                if (!W[i].link && W[i].due_ns <= now && (!O.n || done < O.n)) start_accept(&W[i]);
            wait_ms = 1;
        } else if (pn_link_credit(C.sender) > 0 && pn_link_credit(C.coordinator) > 0) {
            uint64_t seeds = (uint64_t)O.receivers * (uint64_t)O.per; /* what the first transactions complete */
            while (seeded < seeds && pn_link_credit(C.sender) > 0) send_one(NULL, NULL), seeded++;
            if (seeded == seeds && accepted >= seeds)
                for (int i = 0; i < O.receivers; i++) {
                    worker_t *w = &W[i];
                    if (w->control) continue;
                    if (w->id_len) {
                        if (nwaiting >= (size_t)O.per && pn_link_credit(C.sender) >= O.per) work(w);
                    } else {
                        if (!done && !w->asked_ns) began_ns = now;
                        w->asked_ns = now;
                        control(w, false);
                    }
                }
        }
        bool blocked = write_out();
        struct pollfd p = {C.fd, (short)(POLLIN | (blocked ? POLLOUT : 0)), 0};
        poll(&p, 1, wait_ms);
        if (p.revents & (POLLIN | POLLHUP | POLLERR) && !read_in()) fail("connection closed", NULL);
        now = now_ns();
        if (now >= tick_ns) pn_transport_tick(C.d.transport, (int64_t)(now / 1000000)), tick_ns = now + 200000000;
        handle_events();
        uint64_t sum = sent + accepted + completed + done;
        if (sum != mark) mark = sum, progress_ns = now;
        if (now - progress_ns > (uint64_t)(O.idle * 1e9)) fail("idle timeout", NULL);
        uint64_t count = O.mode == FILL ? accepted : O.mode == STREAM ? completed : done;
        bool late = O.seconds > 0 && began_ns && now - began_ns > (uint64_t)(O.seconds * 1e9);
        if ((O.n && count >= O.n) || late) stopping = true;
    }
    ended_ns = now_ns();
    uint64_t count = O.mode == FILL ? accepted : O.mode == STREAM ? completed : done;
    pn_connection_close(C.d.connection);
    for (int i = 0; i < 200 && !pn_connection_driver_finished(&C.d); i++) {
        write_out();
        struct pollfd p = {C.fd, POLLIN, 0};
        if (poll(&p, 1, 10) > 0 && !read_in()) break;
        handle_events();
    }
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    double secs = (double)(ended_ns - began_ns) / 1e9;
    printf("{\"n\": %llu, \"seconds\": %.4f, \"msgs_per_s\": %.1f, ", (unsigned long long)count, secs, (double)count / secs);
    if (nlat) {
        qsort(latencies, nlat, sizeof *latencies, by_size);
        printf("\"ack_us\": {\"p50\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f}, ", (double)latencies[nlat / 2] / 1e3,
               (double)latencies[nlat * 99 / 100] / 1e3, (double)latencies[nlat * 999 / 1000] / 1e3,
               (double)latencies[nlat - 1] / 1e3);
    }
    printf("\"client_cpu_s\": %.3f, \"error\": \"%s\"}\n",
           (double)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) + (double)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec) / 1e6, error);
    return error[0] ? 2 : 0;
}
