/* Loaded by LD_PRELOAD: appends to a trace what a process changes in the files of one directory, and when it syncs.

   POWER_LOSS_DIRECTORY  the directory, as an absolute path without symbolic links
   POWER_LOSS_TRACE      the file that gets the records; several processes append to it
   POWER_LOSS_SYNC_US    a sync takes up to this much longer, at random, so that what does not wait for it comes before
   POWER_LOSS_FAIL       <number>:<text>: each time that a process has synced files whose paths have this text so many
                         times, the sync is not made and fails with EIO, as on a disk that could not write

   An operation has two records: BEGIN with its data before the system call, END with its result after that has
   returned. Each record is one write to a descriptor with O_APPEND, so the order of records is one order of all
   processes. The calls themselves are made unchanged. tests/power_loss/trace.py reads the records and says what the
   kinds mean; what changes a file in a way that the reader does not model gets a record of kind UNKNOWN. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef __LP64__
#error "the calls are made as 64-bit systems take them"
#endif

/* The C library's; ours is at the end, for those who make asynchronous I/O with it. */
static long (*the_syscall(void))(long, ...)
{
    static long (*found)(long, ...);
    if (!found)
        found = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return found;
}
#define syscall (*the_syscall())

enum kind { WRITE = 1, SYNC, CREATE, TRUNCATE, RENAME, UNLINK, MKDIR, RMDIR, MAPPED, UNKNOWN };
enum phase { BEGIN, END };
enum flag { DURABLE = 1, ZEROS = 2, EMPTIES = 4 };

struct record {
    uint32_t magic, bytes; /* of the whole record */
    uint64_t operation;    /* the same in BEGIN and END; no two operations have the same */
    uint64_t inode;
    int64_t offset, size; /* a write's; of a truncation the new size */
    int64_t result;       /* in END: what the call returned, or -errno */
    uint8_t kind, phase, flags, unused[5];
    uint32_t path_bytes, target_bytes; /* the path and a rename's target, relative to the directory; then the data */
};

#define MAGIC 0x53534f4c
#define DESCRIPTORS 65536
enum state { UNSEEN, OTHERS, OURS, OURS_DURABLE, OURS_APPENDING };

static char directory[PATH_MAX], trace[PATH_MAX];
static size_t directory_bytes;
static int trace_descriptor = -1;
static long sync_us, fail_every, fail_count;
static const char *fail_text;
static uint64_t operations;
static unsigned char states[DESCRIPTORS]; /* of each descriptor, looked up when it is first written to */
static uint64_t inodes[DESCRIPTORS];

/* Begin to trace `path`, in this process and in those that it forks. An empty path ends it. */
void power_loss_trace(const char *path, const char *file)
{
    if (trace_descriptor >= 0)
        syscall(SYS_close, trace_descriptor);
    trace_descriptor = -1;
    memset(states, UNSEEN, sizeof states);
    directory_bytes = strlen(path);
    if (!directory_bytes)
        return;
    snprintf(directory, sizeof directory, "%s", path);
    snprintf(trace, sizeof trace, "%s", file);
    long opened = syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (opened >= 0) { /* out of the way of those who count descriptors */
        trace_descriptor = fcntl((int)opened, F_DUPFD_CLOEXEC, 500);
        syscall(SYS_close, (int)opened);
    }
    if (trace_descriptor < 0) {
        fprintf(stderr, "power_loss: cannot write %s\n", trace);
        abort();
    }
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("POWER_LOSS_DIRECTORY"), *file = getenv("POWER_LOSS_TRACE");
    const char *longest = getenv("POWER_LOSS_SYNC_US");
    const char *fail = getenv("POWER_LOSS_FAIL");
    sync_us = longest ? atol(longest) : 0;
    fail_text = fail ? strchr(fail, ':') : NULL;
    if (fail_text)
        fail_every = atol(fail), fail_text++;
    if (path && file)
        power_loss_trace(path, file);
}

static void append(struct record *record, const char *path, const char *target, const struct iovec *data, int count)
{
    int saved = errno;
    struct iovec parts[3 + 1024] = {{record, sizeof *record}, {(void *)path, record->path_bytes}};
    parts[2] = (struct iovec){(void *)target, record->target_bytes};
    size_t bytes = sizeof *record + record->path_bytes + record->target_bytes;
    int used = 3;
    for (int i = 0; i < count; i++) {
        parts[used++] = data[i];
        bytes += data[i].iov_len;
    }
    record->magic = MAGIC;
    record->bytes = (uint32_t)bytes;
    if (count > 1021 || bytes > UINT32_MAX || syscall(SYS_writev, trace_descriptor, parts, used) != (long)bytes) {
        fprintf(stderr, "power_loss: the trace cannot be written\n");
        abort();
    }
    errno = saved;
}

static uint64_t next_operation(void)
{
    /* A fork inherits the count; the process id keeps the numbers apart. */
    return (uint64_t)getpid() << 40 | __atomic_add_fetch(&operations, 1, __ATOMIC_RELAXED);
}

/* -- which descriptors and paths are of the directory */

static int within(const char *path)
{
    return directory_bytes && !strncmp(path, directory, directory_bytes) &&
           (!path[directory_bytes] || path[directory_bytes] == '/');
}

static int state_of(int descriptor)
{
    if (!directory_bytes || descriptor < 0 || descriptor >= DESCRIPTORS || descriptor == trace_descriptor)
        return OTHERS;
    if (states[descriptor] != UNSEEN)
        return states[descriptor];
    int saved = errno;
    char link[64], path[PATH_MAX];
    struct stat found;
    int state = OTHERS;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (!fstat(descriptor, &found) && (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode))) {
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length > 0 ? length : 0] = 0;
        if (within(path)) {
            int flags = fcntl(descriptor, F_GETFL);
            state = flags & O_DSYNC ? OURS_DURABLE : flags & O_APPEND ? OURS_APPENDING : OURS;
            inodes[descriptor] = found.st_ino;
        }
    }
    errno = saved;
    states[descriptor] = (unsigned char)state;
    return state;
}

static void forget(long descriptor)
{
    if (descriptor >= 0 && descriptor < DESCRIPTORS)
        states[descriptor] = UNSEEN;
}

/* The path relative to the directory, or NULL if it is not in it. `found` has room for PATH_MAX bytes. */
static const char *relative(int at, const char *path, char *found)
{
    char whole[2 * PATH_MAX] = "";
    if (!directory_bytes || !path)
        return NULL;
    int saved = errno;
    if (path[0] != '/') {
        if (at == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX))
                whole[0] = 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, whole, PATH_MAX - 1);
            whole[length > 0 ? length : 0] = 0;
        }
        strcat(whole, "/");
    }
    errno = saved;
    strncat(whole, path, PATH_MAX - 1);
    char *end = found, *rest = NULL;
    for (char *part = strtok_r(whole, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, "..")) {
            while (end > found && *--end != '/')
                ;
        } else if (strcmp(part, ".") && end + strlen(part) + 2 < found + PATH_MAX)
            end += sprintf(end, "/%s", part);
    }
    *end = 0;
    if (!within(found))
        return NULL;
    return found + directory_bytes + (found[directory_bytes] == '/');
}

/* -- operations */

static uint64_t began(enum kind kind, uint64_t inode, const char *path, const char *target, int64_t size, int flags)
{
    struct record record = {.operation = next_operation(), .inode = inode, .size = size};
    record.kind = kind;
    record.phase = BEGIN;
    record.flags = (uint8_t)flags;
    record.path_bytes = path ? (uint32_t)strlen(path) : 0;
    record.target_bytes = target ? (uint32_t)strlen(target) : 0;
    append(&record, path, target, NULL, 0);
    return record.operation;
}

static long ended(enum kind kind, uint64_t operation, uint64_t inode, int64_t offset, int64_t size, long result)
{
    struct record record = {.operation = operation, .inode = inode, .offset = offset, .size = size};
    record.kind = kind;
    record.phase = END;
    record.result = result < 0 ? -errno : result;
    append(&record, NULL, NULL, NULL, 0);
    return result;
}

static void linger(void)
{
    static unsigned seed;
    if (!sync_us)
        return;
    int saved = errno;
    if (!seed)
        seed = (unsigned)getpid();
    long us = rand_r(&seed) % (sync_us + 1);
    nanosleep(&(struct timespec){0, us * 1000}, NULL);
    errno = saved;
}

static int all_zero(const struct iovec *data, int count)
{
    for (int i = 0; i < count; i++) {
        const char *bytes = data[i].iov_base;
        size_t length = data[i].iov_len;
        if (length && (bytes[0] || memcmp(bytes, bytes + 1, length - 1)))
            return 0;
    }
    return 1;
}

static long written(int descriptor, const struct iovec *data, int count, int64_t offset, int flags)
{
    /* `offset` is -1 for a write at the descriptor's position. */
    int state = state_of(descriptor);
    if (state == OTHERS) {
        if (offset < 0 && !flags)
            return syscall(SYS_writev, descriptor, data, count);
        return syscall(SYS_pwritev2, descriptor, data, count, offset, 0L, flags);
    }
    int64_t size = 0;
    for (int i = 0; i < count; i++)
        size += (int64_t)data[i].iov_len;
    int64_t at = offset;
    if (state == OURS_APPENDING || flags & RWF_APPEND) {
        struct stat found;
        fstat(descriptor, &found);
        at = found.st_size;
    } else if (offset < 0)
        at = lseek(descriptor, 0, SEEK_CUR);
    int durable = state == OURS_DURABLE || flags & (RWF_DSYNC | RWF_SYNC);
    if (fcntl(descriptor, F_GETFL) & O_DSYNC)
        durable = 1;
    int zeros = all_zero(data, count);
    struct record record = {.operation = next_operation(), .inode = inodes[descriptor], .offset = at, .size = size};
    record.kind = WRITE;
    record.phase = BEGIN;
    record.flags = (uint8_t)((durable ? DURABLE : 0) | (zeros ? ZEROS : 0));
    append(&record, NULL, NULL, data, zeros ? 0 : count);
    long result;
    if (offset < 0 && !flags)
        result = syscall(SYS_writev, descriptor, data, count);
    else
        result = syscall(SYS_pwritev2, descriptor, data, count, offset, 0L, flags);
    if (durable)
        linger();
    return ended(WRITE, record.operation, inodes[descriptor], at, size, result);
}

/* -- asynchronous writes: a write begins when it is submitted, and ends when its event is taken */

#define UNDER_WAY 64
static struct { uint64_t request, operation, inode; int64_t offset, size; int durable; } under_way[UNDER_WAY];

static long submitted(long context, long count, struct iocb **requests)
{
    if (count != 1 || requests[0]->aio_lio_opcode != IOCB_CMD_PWRITE || state_of((int)requests[0]->aio_fildes) == OTHERS) {
        for (long i = 0; i < count; i++)
            if (state_of((int)requests[i]->aio_fildes) != OTHERS)
                began(UNKNOWN, 0, "an asynchronous operation", NULL, 0, 0);
        return syscall(SYS_io_submit, context, count, requests);
    }
    const struct iocb *one = requests[0];
    int descriptor = (int)one->aio_fildes, place = 0;
    while (place < UNDER_WAY && under_way[place].operation)
        place++;
    if (place == UNDER_WAY) {
        fprintf(stderr, "power_loss: too many asynchronous writes\n");
        abort();
    }
    struct iovec data = {(void *)(uintptr_t)one->aio_buf, one->aio_nbytes};
    int zeros = all_zero(&data, 1);
    struct record record = {.operation = next_operation(), .inode = inodes[descriptor]};
    record.offset = one->aio_offset;
    record.size = (int64_t)one->aio_nbytes;
    record.kind = WRITE;
    record.phase = BEGIN;
    int durable = !!(fcntl(descriptor, F_GETFL) & O_DSYNC);
    record.flags = (uint8_t)((durable ? DURABLE : 0) | (zeros ? ZEROS : 0));
    append(&record, NULL, NULL, &data, zeros ? 0 : 1);
    under_way[place].request = (uint64_t)(uintptr_t)one;
    under_way[place].operation = record.operation;
    under_way[place].inode = record.inode;
    under_way[place].offset = record.offset;
    under_way[place].size = record.size;
    under_way[place].durable = durable;
    long result = syscall(SYS_io_submit, context, count, requests);
    if (result != 1) {
        ended(WRITE, record.operation, record.inode, record.offset, record.size, result);
        under_way[place].operation = 0;
    }
    return result;
}

static long events_taken(long context, long least, long most, struct io_event *events, struct timespec *timeout)
{
    long count = syscall(SYS_io_getevents, context, least, most, events, timeout);
    int saved = errno;
    for (long i = 0; i < count; i++)
        for (int place = 0; place < UNDER_WAY; place++)
            if (under_way[place].operation && under_way[place].request == events[i].obj) {
                if (under_way[place].durable)
                    linger();
                errno = events[i].res < 0 ? (int)-events[i].res : 0;
                ended(WRITE, under_way[place].operation, under_way[place].inode, under_way[place].offset,
                      under_way[place].size, (long)events[i].res);
                under_way[place].operation = 0;
                break;
            }
    errno = saved;
    return count;
}

static int fails(int descriptor)
{
    char link[64], path[PATH_MAX];
    if (!fail_every)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return strstr(path, fail_text) && ++fail_count % fail_every == 0;
}

static long synced(long call, int descriptor)
{
    if (state_of(descriptor) == OTHERS)
        return syscall(call, descriptor);
    uint64_t operation = began(SYNC, inodes[descriptor], NULL, NULL, 0, 0);
    long result;
    if (fails(descriptor)) {
        errno = EIO;
        result = -1;
    } else
        result = syscall(call, descriptor);
    linger();
    return ended(SYNC, operation, inodes[descriptor], 0, 0, result);
}

static int opened(int at, const char *path, int flags, mode_t mode)
{
    char found[PATH_MAX];
    const char *name = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE ? relative(at, path, found) : NULL;
    if (!name) {
        long descriptor = syscall(SYS_openat, at, path, flags, mode);
        forget(descriptor);
        return (int)descriptor;
    }
    uint64_t operation = began(CREATE, 0, name, NULL, 0, flags & O_TRUNC ? EMPTIES : 0);
    long descriptor = syscall(SYS_openat, at, path, flags, mode);
    forget(descriptor);
    struct stat file = {0};
    if (descriptor >= 0)
        fstat((int)descriptor, &file);
    return (int)ended(CREATE, operation, file.st_ino, 0, 0, descriptor);
}

static long sized(int descriptor, int64_t size, enum kind kind, long call, long mode, int64_t offset, int64_t length)
{
    int ours = state_of(descriptor) != OTHERS;
    uint64_t operation = ours ? began(kind, inodes[descriptor], NULL, NULL, size, 0) : 0;
    long result;
    if (call == SYS_ftruncate)
        result = syscall(call, descriptor, size);
    else
        result = syscall(call, descriptor, mode, offset, length);
    return ours ? ended(kind, operation, inodes[descriptor], 0, size, result) : result;
}

static long allocated(int descriptor, int mode, off_t offset, off_t length)
{
    struct stat found;
    if (state_of(descriptor) == OTHERS || fstat(descriptor, &found))
        return syscall(SYS_fallocate, descriptor, mode, offset, length);
    if (mode == FALLOC_FL_KEEP_SIZE) /* it reads as before */
        return syscall(SYS_fallocate, descriptor, mode, offset, length);
    int64_t size = offset + length > found.st_size ? offset + length : found.st_size;
    return sized(descriptor, size, mode ? UNKNOWN : TRUNCATE, SYS_fallocate, mode, offset, length);
}

static long named(enum kind kind, int at, const char *path, long call, long a, long b, long c, long d, long e)
{
    char found[PATH_MAX];
    const char *name = relative(at, path, found);
    if (!name)
        return syscall(call, a, b, c, d, e);
    uint64_t operation = began(kind, 0, name, NULL, 0, 0);
    long result = syscall(call, a, b, c, d, e);
    struct stat file = {0};
    if (!result && kind == MKDIR) {
        int saved = errno;
        fstatat(at, path, &file, AT_SYMLINK_NOFOLLOW);
        errno = saved;
    }
    return ended(kind, operation, file.st_ino, 0, 0, result);
}

static int renamed(int at, const char *from, int target_at, const char *to, unsigned flags)
{
    char old[PATH_MAX], new[PATH_MAX];
    const char *name = relative(at, from, old), *target = relative(target_at, to, new);
    if (!name && !target)
        return (int)syscall(SYS_renameat2, at, from, target_at, to, flags);
    uint64_t operation = began(name && target && !flags ? RENAME : UNKNOWN, 0, name, target, 0, 0);
    long result = syscall(SYS_renameat2, at, from, target_at, to, flags);
    return (int)ended(name && target && !flags ? RENAME : UNKNOWN, operation, 0, 0, 0, result);
}

/* What the reader does not model. `descriptor` or `path` says whether it is about the directory. */
static void unknown(int descriptor, int at, const char *path)
{
    char found[PATH_MAX];
    if (path ? relative(at, path, found) != NULL : state_of(descriptor) != OTHERS)
        began(UNKNOWN, 0, path ? found : "a descriptor", NULL, 0, 0);
}

/* -- the calls, in all the names that programs find them by */

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list rest; \
        va_start(rest, last); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int descriptor)
{
    forget(descriptor);
    return (int)syscall(SYS_close, descriptor);
}
int close_range(unsigned first, unsigned last, int flags)
{
    for (unsigned each = first; each <= last && each < DESCRIPTORS; each++)
        forget((long)each);
    return (int)syscall(SYS_close_range, first, last, flags);
}
int dup(int descriptor)
{
    long result = syscall(SYS_dup, descriptor);
    forget(result);
    return (int)result;
}
int dup3(int descriptor, int target, int flags)
{
    long result = syscall(SYS_dup3, descriptor, target, flags);
    forget(result);
    return (int)result;
}
int dup2(int descriptor, int target)
{
    if (descriptor == target)
        return fcntl(descriptor, F_GETFD) < 0 ? -1 : target;
    return dup3(descriptor, target, 0);
}

ssize_t write(int descriptor, const void *data, size_t size)
{
    struct iovec one = {(void *)data, size};
    return state_of(descriptor) == OTHERS ? syscall(SYS_write, descriptor, data, size)
                                          : written(descriptor, &one, 1, -1, 0);
}
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset)
{
    struct iovec one = {(void *)data, size};
    return state_of(descriptor) == OTHERS ? syscall(SYS_pwrite64, descriptor, data, size, offset)
                                          : written(descriptor, &one, 1, offset, 0);
}
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset)
{
    return pwrite(descriptor, data, size, offset);
}
ssize_t writev(int descriptor, const struct iovec *data, int count) { return written(descriptor, data, count, -1, 0); }
ssize_t pwritev(int descriptor, const struct iovec *data, int count, off_t offset)
{
    return written(descriptor, data, count, offset, 0);
}
ssize_t pwritev64(int descriptor, const struct iovec *data, int count, off64_t offset)
{
    return written(descriptor, data, count, offset, 0);
}
ssize_t pwritev2(int descriptor, const struct iovec *data, int count, off_t offset, int flags)
{
    return written(descriptor, data, count, offset, flags);
}
ssize_t pwritev64v2(int descriptor, const struct iovec *data, int count, off64_t offset, int flags)
{
    return written(descriptor, data, count, offset, flags);
}

int fsync(int descriptor) { return (int)synced(SYS_fsync, descriptor); }
int fdatasync(int descriptor) { return (int)synced(SYS_fdatasync, descriptor); }
/* sync_file_range and msync are not needed here: the first makes nothing durable, maps that are written to are noted. */

int ftruncate(int descriptor, off_t size)
{
    return (int)sized(descriptor, size, TRUNCATE, SYS_ftruncate, 0, 0, 0);
}
int ftruncate64(int descriptor, off64_t size) { return ftruncate(descriptor, size); }
int truncate(const char *path, off_t size)
{
    int descriptor = opened(AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
    if (descriptor < 0)
        return -1;
    int result = ftruncate(descriptor, size), saved = errno;
    close(descriptor);
    errno = saved;
    return result;
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }
int fallocate(int descriptor, int mode, off_t offset, off_t length)
{
    return (int)allocated(descriptor, mode, offset, length);
}
int fallocate64(int descriptor, int mode, off64_t offset, off64_t length)
{
    return (int)allocated(descriptor, mode, offset, length);
}
int posix_fallocate(int descriptor, off_t offset, off_t length)
{
    return allocated(descriptor, 0, offset, length) ? errno : 0;
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t length)
{
    return posix_fallocate(descriptor, offset, length);
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int target_at, const char *to) { return renamed(at, from, target_at, to, 0); }
int renameat2(int at, const char *from, int target_at, const char *to, unsigned flags)
{
    return renamed(at, from, target_at, to, flags);
}
int unlinkat(int at, const char *path, int flags)
{
    enum kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    return (int)named(kind, at, path, SYS_unlinkat, at, (long)path, flags, 0, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int at, const char *path, mode_t mode)
{
    return (int)named(MKDIR, at, path, SYS_mkdirat, at, (long)path, mode, 0, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t offset)
{
    if (descriptor >= 0 && protection & PROT_WRITE && (flags & MAP_TYPE) != MAP_PRIVATE && state_of(descriptor) != OTHERS)
        began(MAPPED, inodes[descriptor], NULL, NULL, (int64_t)size, 0);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, descriptor, offset);
}
void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t offset)
{
    return mmap64(address, size, protection, flags, descriptor, offset);
}

int linkat(int at, const char *from, int target_at, const char *to, int flags)
{
    unknown(-1, target_at, to);
    return (int)syscall(SYS_linkat, at, from, target_at, to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char *content, int at, const char *path)
{
    unknown(-1, at, path);
    return (int)syscall(SYS_symlinkat, content, at, path);
}
int symlink(const char *content, const char *path) { return symlinkat(content, AT_FDCWD, path); }
ssize_t sendfile(int target, int source, off_t *offset, size_t count)
{
    unknown(target, 0, NULL);
    return syscall(SYS_sendfile, target, source, offset, count);
}
ssize_t sendfile64(int target, int source, off64_t *offset, size_t count)
{
    return sendfile(target, source, offset, count);
}
ssize_t copy_file_range(int source, off64_t *from, int target, off64_t *to, size_t count, unsigned flags)
{
    unknown(target, 0, NULL);
    return syscall(SYS_copy_file_range, source, from, target, to, count, flags);
}

#undef syscall
long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_submit)
        return submitted(a[0], a[1], (struct iocb **)a[2]);
    if (number == SYS_io_getevents)
        return events_taken(a[0], a[1], a[2], (struct io_event *)a[3], (struct timespec *)a[4]);
    return (*the_syscall())(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
