"""One write on its way to the disk while this process goes on: Linux's asynchronous I/O (io_submit(2)).

It needs a file that is open with O_DIRECT, and blocks that were written before; on others the call waits. A thread
would be simpler, but it competes with its process for the interpreter and makes each turn wait for milliseconds. No
library is needed for four system calls, and those that exist use threads or their own loop.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# io_setup, io_destroy, io_submit, io_getevents
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_PWRITE, _RESULT_TO_DESCRIPTOR = 1, 1
# struct iocb and struct io_event of linux/aio_abi.h, on machines whose lowest byte comes first
_pack_request = struct.Struct("<QIIHhIQQqQII").pack_into
_unpack_event = struct.Struct("<QQqq").unpack
_AT_ONCE = (ctypes.c_long * 2)(0, 0)  # struct timespec


class OneWrite:
    """A buffer of `size_bytes` that a disk can read, and at most one write that is under way.

    `spare` is another one, for small writes and for those that are waited for; it takes memory only when it is used.

    `descriptor` is an eventfd that is signalled when the write is done. Nobody needs to read it: with EPOLLET, each
    signal is an event. It is None if the machine has no asynchronous I/O for us, and then `begin` must not be called.
    """

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))
        self.spare = memoryview(mmap.mmap(-1, size_bytes))
        self.descriptor: int | None = None
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            return
        setup, self._destroy, submit, get_events = map(ctypes.c_long, numbers)
        self._context = ctypes.c_ulong(0)
        if _syscall(setup, ctypes.c_long(1), ctypes.byref(self._context)) < 0:
            return  # the kernel has none, a sandbox forbids it, or all of fs.aio-max-nr is used
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._request = ctypes.create_string_buffer(64)
        self._event = ctypes.create_string_buffer(32)
        one = ctypes.c_long(1)
        requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._submission = submit, self._context, one, requests
        self._look = get_events, self._context, one, one, self._event, ctypes.byref(_AT_ONCE)
        self._wait = get_events, self._context, one, one, self._event, None

    def begin(self, descriptor: int, data: memoryview, at: int) -> None:
        """Begin to write `data`, a part of a buffer, which must not change until `result`. Raises OSError."""
        address, size_bytes, done = ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), self.descriptor
        _pack_request(
            self._request, 0, 0, 0, 0, _PWRITE, 0, descriptor, address, size_bytes, at, 0, _RESULT_TO_DESCRIPTOR, done
        )
        if _syscall(*self._submission) != 1:
            raise _os_error()

    def result(self, wait: bool) -> int | None:
        """The bytes that were written, or None while the write is under way. Raises OSError."""
        while (count := _syscall(*(self._wait if wait else self._look))) != 1:
            if count == 0:
                return None
            if ctypes.get_errno() != errno.EINTR:
                raise _os_error()
        _, _, result, _ = _unpack_event(self._event)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        written: int = result
        return written

    def close(self) -> None:
        """Ends the write, if one is under way."""
        if self.descriptor is not None:
            _syscall(self._destroy, self._context)
            os.close(self.descriptor)
            self.descriptor = None


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
