"""Keeps a broker's processes running: starts them, restarts those that end, and in the end stops all in order.

This is a plain loop over signals and the children's lines of output (`broker.child`). It holds no data, so it has
nothing to lose. The states of a child: started, ready (it has said so), ended (it waits for its next start).
"""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from broker.child import DAMAGED_STORE, NO_ROOM, PERMANENT_FAULT, Instructions
from broker.logging import get_logger
from broker.settings.config import ConfigurationError
from broker.supervisor import interpreters
from storage.apart import CRASH_SIGNALS
from storage.liveness import LOOK_SECONDS, ON_DISK, Silence, is_stopped

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
STEADY_SECONDS = 30.0  # a process that ran this long was able to serve
STARTS_BEFORE_GIVING_UP = 3  # before the broker has served; after that it never gives up
ANSWER_MAX_BYTES = 64 << 10

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)

log = get_logger("supervisor")


class Backoff:
    """The time to wait before a process is restarted: longer each time, unless it had run for long."""

    def __init__(self) -> None:
        self._delay_seconds = FIRST_DELAY_SECONDS

    def after(self, lived_seconds: float) -> float:
        """The seconds to wait, now that the process has ended after `lived_seconds`."""
        if lived_seconds >= STEADY_SECONDS:
            self._delay_seconds = FIRST_DELAY_SECONDS
        delay = self._delay_seconds
        self._delay_seconds = min(LONGEST_DELAY_SECONDS, delay * 2)
        return delay


@dataclass(frozen=True, slots=True)
class Role:
    """One process to run: `python -m module`, with `instructions` for the given number of restarts.

    `stall_seconds`: the process gives signs of life (`broker.pulse`), and is replaced if it gave none for so long; None
    if it gives none. `reloads`: it reads files again at SIGHUP. `crashed` is called when data
    that the process read has killed it, with whether the broker was ready before. It returns True if it knows the cause
    and the process will soon start without it; then the crash does not count for giving up.
    """

    name: str
    module: str
    instructions: Callable[[int], Instructions]
    stall_seconds: float | None = None
    reloads: bool = False
    crashed: Callable[[bool], bool] | None = None


class _Child:
    def __init__(self, role: Role) -> None:
        self.role = role
        self.process: interpreters.Interpreter | None = None
        self.answer: dict[str, Any] | None = None
        self.start_at = 0.0  # monotonic seconds; used while there is no process
        self.started_at = 0.0
        self.starts = 0
        self.excused = 0  # ends of starts that a damaged store or a full disk was to blame for
        self.backoff = Backoff()
        self._output = b""
        self._unsent = b""  # of its instructions
        self.silence = None if role.stall_seconds is None else Silence(role.stall_seconds)
        self.told_of_disk = False  # that it has waited for it for long

    @property
    def ready(self) -> bool:
        return self.process is not None and self.answer is not None and self.answer["ready"]

    @property
    def descriptor(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def load(self) -> None:
        """Start the process, which loads its modules and waits for its instructions."""
        self.answer, self._output, self._unsent = None, b"", b""
        self.process = interpreters.take(self.role.module)
        os.set_blocking(self.descriptor, False)
        self.started_at = time.monotonic()

    def instruct(self, directory: Path) -> None:
        """Give it its instructions, which `send` goes on with. From now on it has to give signs of life."""
        instructions = replace(self.role.instructions(self.starts), directory=str(directory))
        self.starts += 1
        self._unsent = instructions.to_json().encode() + b"\n"
        os.set_blocking(self.instructions_descriptor, False)  # it may never read
        self._heard()

    @property
    def instructions_descriptor(self) -> int:
        assert self.process is not None
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def is_being_instructed(self) -> bool:
        return bool(self._unsent)

    def send(self) -> None:
        """Write what it takes of its instructions."""
        try:
            self._unsent = self._unsent[os.write(self.instructions_descriptor, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has ended; its exit status will come
            self._unsent = b""
        if not self._unsent:
            assert self.process is not None
            assert self.process.stdin is not None
            self.process.stdin.close()

    def _heard(self, line: bytes = b"") -> None:
        self.told_of_disk = False
        if self.silence is not None:
            self.silence.heard(time.monotonic(), waits_for_disk=line + b"\n" == ON_DISK)

    def read(self) -> bool:
        """Take what the child has written; False at the end of its output."""
        try:
            output = os.read(self.descriptor, ANSWER_MAX_BYTES)
        except BlockingIOError:
            return True
        *lines, self._output = (self._output + output).split(b"\n")
        for line in lines:
            self._heard(line)
            if line and line + b"\n" != ON_DISK:
                self._take_answer(line)
        return bool(output) and len(self._output) < ANSWER_MAX_BYTES

    def _take_answer(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and "ready" in answer:
            self.answer = answer
        else:
            log.warning("unexpected output", process=self.role.name, line=line[:200].decode(errors="replace"))

    def ended(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process, self._unsent = None, b""


class Processes:
    """The processes of `groups`, which are stopped group by group in this order.

    `stop_seconds` is the time that each group has to end after SIGTERM. At SIGHUP `reload` is called, before it goes on
    to the processes.
    """

    def __init__(
        self, groups: Sequence[Sequence[Role]], directory: Path, stop_seconds: float, reload: Callable[[], None]
    ) -> None:
        self._groups = [[_Child(role) for role in group] for group in groups]
        self._children = [child for group in self._groups for child in group]
        self._directory = directory
        self._stop_seconds = stop_seconds
        self._reload = reload
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()  # the interpreter writes each signal's number to the second
        self._waker.setblocking(False)
        self._stop_signals = 0
        self._terminal = next((each for each in (0, 1, 2) if os.isatty(each)), None)
        self._has_served = False

    def load(self) -> None:
        """Start the processes, so that they load their modules while the stores are prepared. Then call `run`."""
        for child in self._children:
            child.load()
        interpreters.discard_ahead()  # no role has their module

    def discard(self) -> None:
        """End the processes that `load` has started, if `run` will not be called."""
        self._kill(self._children)
        self._close()

    def _close(self) -> None:
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def run(self, on_ready: Callable[[dict[str, dict[str, Any]]], None]) -> int:
        """Run until a stop signal; then end all. Call it in the main thread.

        `on_ready` is called once, when every process has become ready, with their answers by name. Returns 0 if all
        ended in time, else 1. Raises ConfigurationError if a process cannot serve as things are, before they all did.
        """
        self._selector.register(self._wake, selectors.EVENT_READ, self._take_signals)
        previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        previous_waker = signal.set_wakeup_fd(self._waker.fileno())
        try:
            self._serve(on_ready)
            return 0 if self._stop() else 1
        finally:
            self._kill(self._children)
            signal.set_wakeup_fd(previous_waker)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._close()

    def _serve(self, on_ready: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        for child in self._children:
            self._start(child)
        while not self._stop_signals:
            waiting = [child.start_at for child in self._children if child.process is None]
            self._wait(min([*waiting, time.monotonic() + LOOK_SECONDS]))
            self._kill_stalled()
            for child, code in self._take_ended():
                self._plan_restart(child, code)
            if not self._has_served and all(child.ready for child in self._children):
                self._has_served = True
                on_ready({child.role.name: child.answer for child in self._children if child.answer})
            now = time.monotonic()
            for child in self._children:
                if child.process is None and child.start_at <= now:
                    self._start(child)

    def _kill_stalled(self) -> None:
        """Kill processes that are stopped, in an endless turn, or stuck in their start; they are restarted like others
        that end.
        """
        now = time.monotonic()
        for child in self._children:
            silence, process = child.silence, child.process
            if silence is None or process is None:
                continue
            if silence.is_too_long(now, partial(is_stopped, process.pid)):
                log.error("process stalled; killing it", process=child.role.name, seconds=round(silence.seconds))
                silence.heard(now)
                process.kill()
            elif silence.disk_is_slow and not child.told_of_disk:
                child.told_of_disk = True
                seconds = round(silence.disk_seconds)
                log.warning("process waits for the disk", process=child.role.name, seconds=seconds)

    def _start(self, child: _Child) -> None:
        if child.process is None:
            child.load()
        child.instruct(self._directory)
        self._selector.register(child.descriptor, selectors.EVENT_READ, lambda: self._read(child))
        child.send()
        if child.is_being_instructed:
            self._selector.register(child.instructions_descriptor, selectors.EVENT_WRITE, lambda: self._instruct(child))

    def _instruct(self, child: _Child) -> None:
        descriptor = child.instructions_descriptor
        child.send()
        if not child.is_being_instructed:
            self._selector.unregister(descriptor)

    def _read(self, child: _Child) -> None:
        was_ready = child.ready
        if not child.read():
            self._selector.unregister(child.descriptor)
        if child.ready and not was_ready and child.process is not None:
            seconds = round(time.monotonic() - child.started_at, 3)
            log.info("process ready", process=child.role.name, pid=child.process.pid, seconds=seconds)

    def _wait(self, until: float | None) -> None:
        """Wait for a signal, output of a child, or `until` on the monotonic clock."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _take_signals(self) -> None:
        numbers = self._wake.recv(4096)
        self._stop_signals += sum(number in STOP_SIGNALS for number in numbers)
        if signal.SIGHUP in numbers:
            self._hang_up()

    def _hang_up(self) -> None:
        """Files are to be read again, or the terminal that the broker was started at is gone, which ends it."""
        if self._terminal is not None and not os.isatty(self._terminal):
            self._stop_signals += 1
            return
        self._reload()
        for child in self._children:
            if child.role.reloads and child.ready:
                assert child.process is not None
                child.process.send_signal(signal.SIGHUP)

    def _take_ended(self) -> list[tuple[_Child, int]]:
        """Children that have ended, with their exit codes; negative for the signal that killed them."""
        ended = []
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                if child.descriptor in self._selector.get_map():
                    child.read()  # its last output
                    self._selector.unregister(child.descriptor)
                if child.is_being_instructed:
                    self._selector.unregister(child.instructions_descriptor)
                child.ended()
                ended.append((child, code))
        return ended

    def _plan_restart(self, child: _Child, code: int) -> None:
        lived = time.monotonic() - child.started_at
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        delay = child.backoff.after(lived)
        if child.role.crashed is not None and (-code in CRASH_SIGNALS or code == DAMAGED_STORE):
            child.excused += child.role.crashed(self._has_served)
        if code in (PERMANENT_FAULT, NO_ROOM):
            message = child.answer["message"] if child.answer and not child.answer["ready"] else how
            if code == PERMANENT_FAULT and not self._has_served:
                raise ConfigurationError(message)
            log.error("process cannot serve", process=child.role.name, reason=message)
            if code == NO_ROOM:
                child.excused += 1
            else:
                delay = LONGEST_DELAY_SECONDS
        elif not self._has_served and child.starts - child.excused >= STARTS_BEFORE_GIVING_UP:
            raise ConfigurationError(
                f"{child.role.name} ended {child.starts} times while it started ({how}): see the log above"
            )
        log.error("process ended", process=child.role.name, how=how, restart_in_seconds=delay, restarts=child.starts)
        child.start_at = time.monotonic() + delay

    def _stop(self) -> bool:
        """Stop all processes, group by group. False if some had to be killed."""
        log.info("stopping")
        in_time = True
        for group in self._groups:
            for child in group:
                if child.process is not None:
                    child.process.terminate()
            deadline = time.monotonic() + self._stop_seconds
            while any(child.process for child in group):
                if self._stop_signals > 1:
                    log.warning("killing all processes", reason="second signal")
                    return False
                if time.monotonic() >= deadline:
                    late = [child.role.name for child in group if child.process]
                    log.warning("killing processes", reason="not ended in time", processes=late)
                    in_time = False
                    self._kill(group)
                    break
                self._wait(deadline)
                self._take_ended()
        log.info("stopped")
        return in_time

    def _kill(self, children: Sequence[_Child]) -> None:
        for child in children:
            if child.process is not None:
                child.process.kill()
        for child in children:
            if child.process is not None:
                child.process.wait()
        self._take_ended()
