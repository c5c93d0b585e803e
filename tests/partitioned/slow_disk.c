/* Loaded by LD_PRELOAD: syncs, and writes that are synced, take longer in some processes, as on a slow disk.

   SLOW_DISK  a file that says how long and where: microseconds, then ids of processes, or 0 for all; no file, no
              delay

   A log is written with pwrite and fdatasync, or with io_submit (storage/log/segments.py, aio.py), and the tables of a
   partition by LMDB with pwrite, pwritev and fdatasync. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void *the(const char *name) { return dlsym(RTLD_NEXT, name); }

static void take_time(void)
{
    const char *path = getenv("SLOW_DISK");
    FILE *file = path ? fopen(path, "re") : NULL;
    long delay_us, process;
    if (!file)
        return;
    if (fscanf(file, "%ld", &delay_us) == 1)
        while (fscanf(file, "%ld", &process) == 1)
            if (!process || process == getpid())
                usleep((useconds_t)delay_us);
    fclose(file);
}

static void take_time_if_synced(int descriptor)
{
    if (fcntl(descriptor, F_GETFL) & O_DSYNC)
        take_time();
}

int fsync(int descriptor)
{
    take_time();
    return ((int (*)(int))the("fsync"))(descriptor);
}
int fdatasync(int descriptor)
{
    take_time();
    return ((int (*)(int))the("fdatasync"))(descriptor);
}
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t at)
{
    take_time_if_synced(descriptor);
    return ((ssize_t (*)(int, const void *, size_t, off64_t))the("pwrite64"))(descriptor, data, size, at);
}
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t at)
{
    return pwrite64(descriptor, data, size, at);
}
ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t at)
{
    take_time_if_synced(descriptor);
    return ((ssize_t (*)(int, const struct iovec *, int, off_t))the("pwritev"))(descriptor, parts, count, at);
}

/* The C library has no function for asynchronous I/O, so the number of the call is an argument. */
long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_submit)
        take_time();
    return ((long (*)(long, ...))the("syscall"))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
