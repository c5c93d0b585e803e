"""A file system of its own for a broker: real, small, and free to be filled, frozen or broken.

It is ext4 in a file, or tmpfs, mounted where only the processes see it that run in its mount namespace. When the last
of them has ended, it is gone.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.brokers import REPOSITORY, Broker
from tests.caller import REQUIRE_DISKS

MIB = 1 << 20
DISK_BYTES = 128 * MIB
TOOLS = ("unshare", "nsenter", "mount", "umount", "fsfreeze", "mkfs.ext4")
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITH_ALL_WRITTEN, _AS_IT_IS = 0, 2  # its arguments, EXT4_GOING_FLAGS_...


class OwnDisk:
    """`prefix` runs a command in the namespace, where the file system is at `path`; `seen` is that, as tests see it."""

    def __init__(self, directory: Path, size_bytes: int = DISK_BYTES, *, in_memory: bool = False) -> None:
        """`in_memory`: it is a tmpfs, which takes no direct writes, and is empty when it is mounted again."""
        self.path = directory / "disk"
        self.path.mkdir(parents=True)
        self._image = directory / "disk.image"
        self._mount: tuple[str, ...] = ("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(self.path))
        if not in_memory:
            self._mount = ("mount", "-o", "loop", str(self._image), str(self.path))
            self._make(size_bytes)
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._keeper.stdout.readline()
        self.prefix: tuple[str, ...] = (
            "nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", "env", f"--chdir={REPOSITORY}",
        )  # fmt: skip
        self.seen = Path(f"/proc/{self._keeper.pid}/root{self.path}")
        try:
            self.mount()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, size_bytes: int) -> None:
        with self._image.open("wb") as image:
            image.truncate(size_bytes)
        # Without reserved blocks, as tests run as root, and without tables that the kernel would write later.
        options = ("-q", "-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
        subprocess.run(["mkfs.ext4", *options, str(self._image)], check=True, capture_output=True)

    def run(self, *command: str) -> None:
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)

    def mount(self) -> None:
        self.run(*self._mount)

    def mount_again(self) -> None:
        """As an operator does after a fault; no broker runs."""
        self.run("umount", str(self.path))
        self.mount()

    def make_read_only(self) -> None:
        """What the kernel does when it finds an error. A remount with `ro` is refused while files are open."""
        self.run("mount", "-o", "remount,abort", str(self.path))

    def fail(self) -> None:
        """From now on all reads and writes fail with EIO, and what was not synced is lost."""
        directory = os.open(self.seen, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, _AS_IT_IS.to_bytes(4, "little"))
        finally:
            os.close(directory)

    def hang(self) -> None:
        """Until `go_on` all writes wait, and not even SIGKILL ends processes that do."""
        self.run("fsfreeze", "--freeze", str(self.path))

    def go_on(self) -> None:
        self.run("fsfreeze", "--unfreeze", str(self.path))

    def free_bytes(self) -> int:
        found = os.statvfs(self.seen)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave nothing free, or about so much, by a file of somebody else."""
        if leave_bytes:
            with (self.seen / "somebody-else").open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self.free_bytes() - leave_bytes)
            return
        # ext4 reserves more than it needs, and gives that back when it has written: until a round finds nothing free.
        while self._take_what_is_free():
            pass

    @contextmanager
    def kept_full(self) -> Iterator[None]:
        """Fill it, and again whenever something is freed."""
        self.fill()
        ends = threading.Event()

        def fill() -> None:
            while not ends.wait(0.02):
                self._take_what_is_free()

        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _take_what_is_free(self) -> int:
        """The bytes that were free."""
        with (self.seen / "somebody-else").open("ab", buffering=0) as file:
            before = file.tell()
            for size in (MIB, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass
            os.fsync(file.fileno())
            return file.tell() - before

    def empty(self) -> None:
        (self.seen / "somebody-else").unlink()

    def close(self) -> None:
        subprocess.run([*self.prefix, "fsfreeze", "--unfreeze", str(self.path)], capture_output=True, check=False)
        subprocess.run([*self.prefix, "umount", str(self.path)], capture_output=True, check=False)
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        self._keeper.wait()


def broker_on(disk: OwnDisk, directory: Path, config: str, workers: int) -> Broker:
    broker = Broker(directory, config, prefix=disk.prefix, workers=workers)
    broker.data_dir = disk.path / "data"
    return broker


@cache
def why_not() -> str | None:
    """Why no such disk can be made here."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "mounting an image needs root"
    try:
        with tempfile.TemporaryDirectory() as directory, OwnDisk(Path(directory), 8 * MIB):
            return None
    except (AssertionError, OSError, subprocess.CalledProcessError) as error:
        return f"an image cannot be mounted: {error}"


def own_disk_or_skip(directory: Path, size_bytes: int = DISK_BYTES, *, in_memory: bool = False) -> OwnDisk:
    reason = why_not()
    if reason is not None:
        assert not REQUIRE_DISKS, reason
        pytest.skip(reason)
    return OwnDisk(directory, size_bytes, in_memory=in_memory)
