"""Whatever ends a delivery, link, session or connection of an engine: its error has all of its fields."""

from collections.abc import Callable

import pytest

from protocol import codec
from protocol.engine import deliveries
from protocol.engine.proton.outgoing import refusal
from protocol.errors import ProtocolError
from tests.protocol_engine.pair import MESSAGE, Pair, frames, raw_frame
from tests.whole_frames import errors_in, require_whole

CONDITION = "amqp:not-found"


def in_a_rejection(pair: Pair, text: str) -> None:
    link, _ = pair.attach(sender=True)
    link.send(b"t", MESSAGE, b"", 0, False)
    pair.run()
    [(delivery, *_)] = pair.server.named("message")
    deliveries.reject(delivery, CONDITION, text)


def in_the_rejection_of_a_receiver(pair: Pair, text: str) -> None:
    ours, theirs = pair.attach(sender=False)
    ours.grant(1)
    pair.run()
    theirs.send(b"t", MESSAGE, b"", 0, False)
    pair.run()
    [(delivery, *_)] = pair.client.named("message")
    deliveries.describe_rejected(delivery, CONDITION, text, {})
    deliveries.settle(delivery, deliveries.REJECTED)


def in_a_refused_attach(pair: Pair, text: str) -> None:
    pair.server.refusal = CONDITION, text
    pair.attach(sender=True)


def in_a_detach(pair: Pair, text: str) -> None:
    pair.attach(sender=True)[1].detach(CONDITION, text)


def in_a_detach_of_the_client(pair: Pair, text: str) -> None:
    pair.attach(sender=False)[0].detach(CONDITION, text)


def in_an_end(pair: Pair, text: str) -> None:
    pair.session.end(CONDITION, text)


def in_a_close(pair: Pair, text: str) -> None:
    pair.server.engine.close(CONDITION, text)


def in_a_close_of_the_client(pair: Pair, text: str) -> None:
    pair.client.engine.close(CONDITION, text)


WRITERS = [
    in_a_rejection,
    in_the_rejection_of_a_receiver,
    in_a_refused_attach,
    in_a_detach,
    in_a_detach_of_the_client,
    in_an_end,
    in_a_close,
    in_a_close_of_the_client,
]


def errors(output: bytes) -> list[list[object]]:
    found: list[list[object]] = []
    for frame in frames(output):
        if len(frame) > 8:
            performative, _ = codec.decode(frame, 8)
            require_whole(performative.descriptor, performative.value)
            found += errors_in(performative.value)
    return found


@pytest.mark.parametrize("text", ["why", "", "warum? \u00fc", "x" * 5000])
@pytest.mark.parametrize("write", WRITERS, ids=lambda each: each.__name__)
def test_an_error_has_all_of_its_fields(write: Callable[[Pair, str], None], text: str) -> None:
    pair = Pair()
    write(pair, text)
    pair.run()
    [(condition, description, info)] = errors(pair.sent) + errors(pair.received)
    assert (condition, description or "", info) == (CONDITION, text, {})


def test_a_peer_that_sent_no_open_is_told_why_with_all_fields() -> None:
    for has_header in (False, True):
        assert errors(refusal("server", CONDITION, "why", has_header)) == [[CONDITION, "why", {}]]


ULONG, UINT = codec.ULong, codec.UInt
FAULTS = {
    "a channel in use": [codec.Described(ULONG(0x11), [None, UINT(0), UINT(0), UINT(0)])] * 2,
    "no link": [codec.Described(ULONG(0x14), [UINT(9), UINT(0), b"t"])],
    "a wrong type": [codec.Described(ULONG(0x13), ["x"])],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_the_engine_finds_is_told_with_all_fields(fault: str) -> None:
    pair = Pair()
    try:
        for each in FAULTS[fault]:
            pair.server.engine.push(raw_frame(0, codec.encode(each)))
    except ProtocolError as error:
        pair.server.engine.close("amqp:connection:framing-error", str(error))
    assert errors(pair.server.engine.pull())
