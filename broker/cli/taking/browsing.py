"""Looks at some messages of an entity, chosen by their state and their session."""

from collections.abc import AsyncIterator, Sequence

from broker.cli.messages import State, is_dead_letter, state_of
from protocol.client.browsing import PAGE, browse
from protocol.client.messages import Message
from protocol.client.requests import Management


async def browse_some(
    management: Management, address: str, count: int, start: int, states: Sequence[State], session_id: str | None
) -> AsyncIterator[Message]:
    """Yield at most `count` messages in these states, or in any; of one session, or of all."""
    asked = None if is_dead_letter(address) else session_id
    page = PAGE if states or asked != session_id else min(count, PAGE)
    async for message in browse(management, start, page=page, session_id=asked):
        if (not states or state_of(message) in states) and (session_id is None or message.group_id == session_id):
            yield message
            count -= 1
            if count == 0:
                return
