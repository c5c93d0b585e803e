"""Run a command for which the kernel refuses some system calls: `python without_calls.py CALL... -- COMMAND...`.

    direct  files cannot be opened with O_DIRECT (EINVAL), as on file systems without direct writes
    aio     there is no asynchronous I/O (ENOSYS), as in some containers

It is done by a filter of seccomp, which all processes below inherit.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path

OPENAT, IO_SETUP = {"x86_64": (257, 206), "aarch64": (56, 0)}.get(platform.machine(), (-1, -1))  # -1: not known here
_LOAD, _IF_EQUAL, _IF_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # operations of BPF
_NUMBER, _FLAGS = 0, 32  # where a filter finds the call's number, and the third argument
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def without(*calls: str) -> tuple[str, ...]:
    """The prefix of a command that is to run so."""
    return (sys.executable, str(Path(__file__).resolve()), *calls, "--")


def _filter(calls: list[str]) -> list[tuple[int, int, int, int]]:
    """Operations: code, how many to jump if true and if false, operand."""
    operations = [(_LOAD, 0, 0, _NUMBER)]
    if "aio" in calls:
        operations += [(_IF_EQUAL, 0, 1, IO_SETUP), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if "direct" in calls:
        operations += [
            (_IF_EQUAL, 0, 3, OPENAT),
            (_LOAD, 0, 0, _FLAGS),
            (_IF_BIT, 0, 1, os.O_DIRECT),
            (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        ]
    return [*operations, (_RETURN, 0, 0, _ALLOW)]


def _refuse(calls: list[str]) -> None:
    packed = b"".join(struct.pack("=HBBI", *operation) for operation in _filter(calls))
    operations = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(operations))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _MODE_FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def main() -> None:
    at = sys.argv.index("--")
    _refuse(sys.argv[1:at])
    command = sys.argv[at + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
