"""Which messages of an entity a command means, found without locking any."""

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.cli.messages import State, is_dead_letter, state_of
from protocol.client.browsing import browse, fragment_of
from protocol.client.messages import Message
from protocol.client.requests import Management

ROUND: Final = 1000  # messages chosen at once where only some are wanted


@dataclass(frozen=True, slots=True)
class Wish:
    """It asks for active messages that there are now and that meet the condition: all, or the `count` oldest.

    With `numbers` instead the messages with these numbers, which may be deferred.
    """

    count: int | None = None
    condition: Callable[[Message], bool] | None = None
    session: str | None = None
    numbers: Sequence[int] = ()

    @property
    def is_for_all(self) -> bool:
        return self.condition is None and self.session is None and not self.numbers

    def means(self, message: Message) -> bool:
        """Return whether a message that was browsed is meant."""
        return (
            is_active(message)
            and (self.session is None or message.group_id == self.session)
            and (self.condition is None or self.condition(message))
        )


class Everything:
    """All messages up to the last numbers, by fragment."""

    def __init__(self, last: Mapping[int, int]) -> None:
        self.last = last

    def __contains__(self, number: int) -> bool:
        return number <= self.last.get(fragment_of(number), -1)


class Chosen:
    """Messages by number, which are added in their order: 8 bytes each. `last` are the last ones, by fragment."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self.last: dict[int, int] = {}

    def add(self, number: int) -> None:
        self._numbers.append(number)
        self.last[fragment_of(number)] = number

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: int) -> bool:
        place = bisect_left(self._numbers, number)
        return place < len(self._numbers) and self._numbers[place] == number


@dataclass(slots=True)
class Choice:
    """Messages that are meant, of one session or of an entity without sessions."""

    active: Chosen = field(default_factory=Chosen)
    deferred: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.active) + len(self.deferred)


def is_active(message: Message) -> bool:
    """Return whether a message that was browsed is active; locked messages are active, too."""
    return state_of(message) in (None, State.ACTIVE)


async def matching(
    management: Management, address: str, wish: Wish, last: Mapping[int, int], *, omit_body: bool = True
) -> AsyncGenerator[Message, None]:
    """Yield the messages that are meant, up to the last numbers and in their order, however many are wanted."""
    session_id = None if is_dead_letter(address) else wish.session
    async for message in browse(management, session_id=session_id, omit_body=omit_body, last=last):
        if wish.means(message):
            yield message


async def numbered(
    management: Management, address: str, numbers: Sequence[int], absent: list[str]
) -> AsyncGenerator[Message, None]:
    """Yield the messages with these numbers in their order. `absent` gets a text about each that cannot be taken."""
    for number in sorted(set(numbers)):
        found = [Message.decode(each) for each in await management.peek(1, number, omit_body=True)]
        if not found or found[0].sequence_number != number:
            absent.append(f"{address} has no message with the number {number}")
        elif state_of(found[0]) == State.SCHEDULED:
            absent.append(f"message {number} of {address} is scheduled: it cannot be taken before its time")
        else:
            yield found[0]


async def choose(found: AsyncIterator[Message], most: int | None, by_session: bool) -> dict[str | None, Choice]:
    """Return the next of the messages that are found, `most` of them at most, by session; else all under None."""
    choices: dict[str | None, Choice] = {}
    count = 0
    while count != most and (message := await anext(found, None)) is not None:
        count += 1
        choice = choices.setdefault((message.group_id or "") if by_session else None, Choice())
        number = message.sequence_number or 0
        if is_active(message):
            choice.active.add(number)
        else:
            choice.deferred.append(number)
    return choices
