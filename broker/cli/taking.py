"""Takes messages out of a queue one by one: those that are wanted are handled, and all others are given back.

No message is lost: one that is not handled keeps its lock until the end, or until the command dies, and is then
available again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from broker.cli.progress import Advance
from protocol.client.errors import ClientError
from protocol.client.links import Received, Receiver
from protocol.client.messages import Message

# Messages received at once. They must be handled before their locks expire.
BATCH = 100

Wanted = Callable[[Message], bool]
Handle = Callable[[Received, Message], Awaitable[None]]


@dataclass
class Taken:
    """`handled` messages, of those looked at. `failure` is the first one; nothing was taken after it."""

    handled: int = 0
    looked_at: int = 0
    failure: ClientError | None = None


async def take(
    receiver: Receiver, wanted: Wanted | None, handle: Handle, *, most: int, look_at: int | None, advance: Advance
) -> Taken:
    """Handle at most `most` messages for which `wanted` is true, the oldest first; None wants all.

    At most `look_at` are looked at, or all that are there. `handle` settles the message, or raises ClientError and
    leaves that to us.
    """
    done = Taken()
    kept: list[Received] = []
    seen: set[int] = set()
    while done.handled < most and done.failure is None and (look_at is None or done.looked_at < look_at):
        size = BATCH if wanted is not None else min(BATCH, most - done.handled)
        taken = await receiver.fetch(size if look_at is None else min(size, look_at - done.looked_at))
        found = [(received, received.message()) for received in taken]
        new = [each for each in found if each[1].sequence_number not in seen]
        kept += [received for received, message in found if message.sequence_number in seen]  # its lock has expired
        if not new:
            break
        seen.update(message.sequence_number or 0 for _, message in new)
        done.looked_at += len(new)
        chosen: list[tuple[Received, Message]] = []
        for received, message in new:
            if len(chosen) < most - done.handled and (wanted is None or wanted(message)):
                chosen.append((received, message))
            else:
                kept.append(received)
        outcomes = await asyncio.gather(*(handle(*each) for each in chosen), return_exceptions=True)
        for (received, _), outcome in zip(chosen, outcomes, strict=True):
            if outcome is None:
                done.handled += 1
            elif isinstance(outcome, ClientError):
                done.failure = done.failure or outcome
                if not received.settled:
                    kept.append(received)
            else:
                raise outcome
        advance(sum(outcome is None for outcome in outcomes))
    with suppress(ClientError):
        await asyncio.gather(*map(receiver.release, kept), return_exceptions=True)
    return done
