"""Looks at the messages of an entity without locking them: page by page, up to the last that was there."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Final

from protocol.client.messages import Message
from protocol.client.requests import Management

PAGE: Final = 250  # messages asked for at once; a server may give fewer
FRAGMENT_BITS: Final = 48  # a sequence number has the number of its partition above these, if there are several
_END: Final = 1 << 63


def fragment_of(number: int) -> int:
    """The fragment of the entity that the message is on; 0 if it has only one."""
    return number >> FRAGMENT_BITS


async def browse(
    management: Management,
    start: int = 0,
    *,
    page: int = PAGE,
    session_id: str | None = None,
    omit_body: bool = False,
    last: Mapping[int, int] | None = None,
) -> AsyncGenerator[Message, None]:
    """Messages in all states in the order of their numbers, from `start` on; they stay as they are.

    `last` are the last numbers to show, by fragment. `session_id` needs an entity that requires sessions.
    """
    while found := await management.peek(page, start, session_id=session_id, omit_body=omit_body):
        for each in found:
            message = Message.decode(each)
            number = message.sequence_number or 0
            if last is not None and number > last.get(fragment_of(number), -1):
                start = (fragment_of(number) + 1) << FRAGMENT_BITS
                break
            start = number + 1
            yield message
        if start >= _END:
            return


async def last_numbers(management: Management) -> dict[int, int]:
    """The number of the last message by fragment. Messages that come in, or back, later have higher ones."""

    async def first_from(number: int) -> int | None:
        found = await management.peek(1, number, omit_body=True)
        return Message.decode(found[0]).sequence_number if found else None

    return await highest(first_from)


async def highest(first_from: Callable[[int], Awaitable[int | None]]) -> dict[int, int]:
    """Find the last numbers, as `last_numbers` does; `first_from` gives the lowest number not below its argument.

    This is a search, in twice as many steps for each fragment as its numbers have bits.
    """
    found: dict[int, int] = {}
    number = await first_from(0)
    while number is not None:
        end = (fragment_of(number) + 1) << FRAGMENT_BITS
        low, high, step = number, end, 1  # there is a message with the number `low`, and none from `high` on
        while high - low > 1:
            probe = min(low + step, (low + high) // 2)
            following = await first_from(probe)
            if following is None or following >= end:
                high = probe
            else:
                low, step = following, 2 * step
        found[fragment_of(low)] = low
        number = await first_from(end) if end < _END else None
    return found
