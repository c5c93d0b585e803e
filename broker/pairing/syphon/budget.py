"""How many messages of a backlog queue a syphon lets come, so that what it has locked stays bounded.

Credit counts messages, but memory counts bytes, and nobody knows how large the next messages are. So credit is given
for one message, and then for messages as large as the largest of late. If larger ones come all the same, the credit
is taken back.
"""

from dataclasses import dataclass
from typing import Final

FORGETTING: Final = 0.998  # of what a large message adds to the guess, for each message after it


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for one queue. `credit` is the most that may be on its way to us at once."""

    messages: int = 1500
    bytes: int = 16 << 20
    credit: int = 1000


class Budget:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._guess_bytes: float | None = None

    def came(self, size_bytes: int) -> None:
        """A message came that has so many bytes."""
        self._guess_bytes = max(size_bytes, (self._guess_bytes or 0) * FORGETTING)

    def credit_to_grant(self, held: int, held_bytes: int, credit: int) -> int:
        """Credit to give besides what the peer has. 0 until half of it is missing, so that flow frames stay few."""
        limits = self._limits
        guess_bytes = self._guess_bytes or limits.bytes
        room = min(limits.messages - held, int((limits.bytes - held_bytes) / guess_bytes), limits.credit)
        wanted = max(room, 0 if held else 1)  # the largest message of all must find room, too
        missing = wanted - credit
        return missing if 2 * missing >= wanted else 0

    def is_exceeded(self, held_bytes: int, credit: int) -> bool:
        """The credit must be taken back: what comes for it is too much."""
        return credit > 0 and held_bytes + credit * (self._guess_bytes or 0) > 2 * self._limits.bytes
