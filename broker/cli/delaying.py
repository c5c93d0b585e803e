"""Gives received messages back with a delay, which is Peeklock's own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli.ending import fail
from broker.cli.quantities import duration_ms
from protocol.bounds import MAX_DELAY_MS

if TYPE_CHECKING:
    from protocol.client.links import Received, Receiver
    from protocol.client.requests import Management


def _milliseconds(text: str) -> int:
    try:
        delay_ms = duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}.") from None
    if delay_ms > MAX_DELAY_MS:
        raise typer.BadParameter(f"{text!r} is more than 7d.")
    return delay_ms


DelayOption = Annotated[
    int | None,
    typer.Option(
        "--delay",
        metavar="TIME",
        parser=_milliseconds,
        help="With --keep: they are available again so much later (30s, 5m), and count as failed deliveries. The "
        "broker needs delivery.abandon_delays.",
    ),
]


async def put_off(
    management: "Management", receiver: "Receiver", kept: Sequence["Received"], first_number: int, delay_ms: int
) -> None:
    """Abandon these messages; the first has this sequence number. Raises ClientError.

    A broker that takes no delays is found out with the first.
    """
    import asyncio

    from protocol.client.messages import Message
    from protocol.codec import Long
    from protocol.symbols import DELAY

    properties = {DELAY: Long(delay_ms)}
    for first in kept[:1]:
        await receiver.modify(first, properties=properties)
        found = await management.peek(1, first_number)
        if found and DELAY in Message.decode(found[0]).application_properties:
            await asyncio.gather(*map(receiver.release, kept[1:]))
            fail(f"the broker takes no delays, because delivery.abandon_delays is off: a message has '{DELAY}' now")
    await asyncio.gather(*(receiver.modify(each, properties=properties) for each in kept[1:]))
