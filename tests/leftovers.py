"""Finds what of an object's world lives on when it should have ended, without Python's search for cycles.

with Leftovers("broker", "protocol") as leftovers:
    make_and_end()                  # asyncio: await it
    leftovers.ended(weakref)        # optional: also these must be dead
# raises AssertionError if an object of the packages was made meanwhile and still lives
"""

import gc
import weakref
from collections import Counter
from types import TracebackType
from typing import Any, Self


class Leftovers:
    """Counts objects by class, of the classes whose module is in one of the packages.

    What there was before is frozen, and stays so: else the collector would look at all that pytest has, each time.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._ended: list[tuple[str, weakref.ref[Any]]] = []

    def ended(self, *objects: Any) -> None:
        """These must be dead at the end."""
        self._ended += ((type(each).__qualname__, weakref.ref(each)) for each in objects)

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        gc.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                alive = [name for name, reference in self._ended if reference() is not None]
                assert not alive, f"still alive: {alive}"
                left = self.living()
                assert not left, f"still alive: {dict(left)}"
        finally:
            gc.enable()

    def living(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in gc.get_objects():
            kind = type(each)
            module = kind.__module__
            if isinstance(module, str) and module.partition(".")[0] in self._packages:
                found[f"{module}.{kind.__qualname__}"] += 1
        return found
