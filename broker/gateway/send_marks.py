"""Numbers of deliveries that another partition may get if this one dies, so that it can be asked which it has stored.

See `wire.Mark`.
"""


class SendMarks:
    """The marks of one gateway for one partition. A mark is the number of the first delivery of one command."""

    def __init__(self, sender: bytes) -> None:
        self.sender = sender
        self._next = 0
        self._waiting: dict[int, int] = {}  # by mark: its deliveries without an outcome; in the order of marks

    def begin(self, count: int) -> int:
        """The mark of a command of so many deliveries."""
        mark = self._next
        self._next += count
        self._waiting[mark] = count
        return mark

    @property
    def below(self) -> int:
        """Nobody asks for a lower number any more."""
        return next(iter(self._waiting), self._next)

    def end(self, mark: int, count: int) -> None:
        """Note that so many more deliveries of the command have an outcome, or that nobody waits for it."""
        left = self._waiting[mark] - count
        if left:
            self._waiting[mark] = left
        else:
            del self._waiting[mark]
