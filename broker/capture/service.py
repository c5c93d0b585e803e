"""A capture as a service: it waits for a broker or a file system that is away, and says at any time how it fares."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from broker.logging import get_logger
from storage.capture.errors import CaptureError, SourceFailed, Superseded
from storage.capture.following import POLL_SECONDS, Counters, Follower
from storage.capture.place import Place
from storage.capture.source import RowSource
from storage.capture.writing import CaptureOptions, CaptureWriter

log = get_logger("capture")

FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 10.0  # with the time that the journal has for an answer, less than a claim is valid


def snapshot(counters: Counters, *, is_up: bool) -> dict[str, Any]:
    """What `broker.capture_exposition` shows, as plain values."""
    counted = {each.name: getattr(counters, each.name) for each in fields(Counters)}
    return {**counted, "damaged": len(counters.damaged), "up": is_up}


@dataclass(frozen=True, slots=True)
class Wishes:
    """`once`: capture what the journal has now, and end. `skips_lost`: go on behind rows that it has dropped
    or cannot read."""

    once: bool = False
    skips_lost: bool = False


class CaptureService:
    """`run` is for a thread of its own; all else may be called by others meanwhile."""

    def __init__(
        self,
        source: RowSource,
        place: Place,
        options: CaptureOptions,
        wishes: Wishes,
        *,
        poll_seconds: float = POLL_SECONDS,
        definitions: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        """`definitions`: as of `storage.capture.following.Follower`."""
        self._definitions = definitions
        self._source = source
        self._place = place
        self._options = options
        self._wishes = wishes
        self._poll_seconds = poll_seconds
        self._stopping = threading.Event()
        self._away: str | None = "the journal has not been read yet"
        self._retry_s = FIRST_RETRY_SECONDS
        self._told: set[str] = set()  # damaged files of which the log knows
        self.counters = Counters()

    def stop(self) -> None:
        """Let `run` write what waits, and end."""
        self._stopping.set()

    def unready(self) -> str | None:
        """Why nothing can be captured, or None."""
        return "it is stopping" if self._stopping.is_set() else self._away

    def snapshot(self) -> dict[str, Any]:
        """Return this capture's figures, as the function `snapshot` makes them."""
        return snapshot(self.counters, is_up=self._away is None)

    def run(self) -> None:
        """Capture until `stop`, or with `once` until all is captured that the journal had at the beginning.

        Raises CaptureError for what nobody can wait for; with `once` also SourceFailed and OSError.
        """
        while not self._stopping.is_set():
            try:
                found = self._source.extents()
                with CaptureWriter(
                    self._place,
                    found.namespace,
                    self._options,
                    namespace_id=found.namespace_id,
                    journal=found.positions,
                ) as writer:
                    self._follow(writer)
                    return
            except (SourceFailed, OSError) as error:
                self._wait_after(error)

    def _follow(self, writer: CaptureWriter) -> None:
        follower = Follower(
            self._source,
            writer,
            self.counters,
            skips_lost=self._wishes.skips_lost,
            should_stop=self._stopping.is_set,
            definitions=self._definitions,
            on_lost=lambda error: log.error("rows are lost", reason=str(error)),
        )
        self._reached()
        try:
            if self._wishes.once:
                follower.to_now()
            else:
                self._stand(follower)
        except Superseded:
            raise
        except CaptureError:
            follower.finish()  # what came before is captured all the same
            raise
        else:
            follower.finish()
        finally:
            self._tell_damaged()

    def _stand(self, follower: Follower) -> None:
        while not self._stopping.is_set():
            try:
                found = follower.step()
            except SourceFailed as error:
                self._wait_after(error)
                follower.keep()
                continue
            self._reached()
            self._tell_damaged()
            if not found:
                self._stopping.wait(self._poll_seconds)

    def _reached(self) -> None:
        if self._away is not None:
            log.info("capturing", url=self._place.url)
        self._away, self._retry_s = None, FIRST_RETRY_SECONDS

    def _wait_after(self, error: Exception) -> None:
        """Wait before the next attempt. Raises the error if nobody is to wait."""
        if self._wishes.once:
            raise error
        if str(error) != self._away:
            log.warning("cannot capture; waiting", reason=str(error))
        self._away = str(error)
        self._stopping.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_SECONDS)

    def _tell_damaged(self) -> None:
        for path, error in self.counters.damaged.items():
            if path not in self._told:
                log.error("damaged file; it is left as it is", reason=str(error))
                self._told.add(path)
