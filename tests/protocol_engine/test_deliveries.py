"""Messages and their outcomes, from one engine to another."""

import pytest

from protocol import codec
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    describe_modified,
    describe_rejected,
    is_settled,
    modification,
    reject,
    rejection,
    settle,
)
from tests.protocol_engine.pair import MESSAGE, Pair, frames, performatives, raw_frame


def test_a_message_arrives_and_its_outcome_returns(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    delivery = ours.send(b"1", MESSAGE, b"", 0, False)
    pair.run()
    ((received, payload, batch, settled),) = pair.server.named("message")
    assert (payload, batch, settled) == (MESSAGE, False, False)
    settle(received, ACCEPTED)
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"1", ACCEPTED, True)]


def test_prefix_and_rest_of_the_body_are_one_message(pair: Pair) -> None:
    _, theirs = pair.attach(sender=False, credit=1)
    theirs.send(b"t" * 16, b"pre", b"xxbody", 2, False)
    pair.run()
    assert pair.client.named("message")[0][1] == b"prebody"


def test_a_rejection_has_condition_description_and_three_elements(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    delivery = ours.send(b"1", MESSAGE, b"", 0, False)
    pair.run()
    reject(pair.server.named("message")[0][0], "amqp:not-allowed", "no")
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"1", REJECTED, True)]
    assert rejection(delivery) == ("amqp:not-allowed", "no", {})
    (disposition,) = performatives(pair.sent, 0x15)
    assert len(disposition[4].value[0].value) == 3


def test_a_message_in_many_transfers_is_put_together(pair: Pair) -> None:
    pair.server.max_message_bytes = 10_000_000
    ours, _ = pair.attach(sender=True)
    body = bytes(range(256)) * 12_000  # more than one scratch buffer
    ours.send(b"1", MESSAGE, body, 0, False)
    pair.run()
    assert pair.server.named("message")[0][1] == MESSAGE + body


def test_a_message_over_the_limit_is_counted_and_not_kept(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    for size in (1001, 200_000):
        ours.send(b"%d" % size, b"x" * size, b"", 0, False)
        ours.send(b"ok%d" % size, MESSAGE, b"", 0, False)
    pair.run()
    assert [size for _, size in pair.server.named("oversized")] == [1001, 200_000]
    assert [payload for _, payload, _, _ in pair.server.named("message")] == [MESSAGE, MESSAGE]


def test_a_settled_send_is_told_as_settled(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    ours.send(b"1", MESSAGE, b"", 0, True)
    pair.run()
    assert pair.server.named("message")[0][3] is True


@pytest.mark.parametrize("state", [ACCEPTED, RELEASED, MODIFIED, REJECTED])
def test_a_receivers_outcome_is_told_and_confirmed_in_kind(pair: Pair, state: int) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    pair.client.engine.offer(ours, delivery, state)
    pair.run()
    assert pair.server.named("outcome") == [(sent, b"t" * 16, state, False)]
    assert not pair.client.named("outcome")
    settle(sent, state)
    pair.run()
    answer = performatives(pair.sent, 0x15)[-1]
    assert answer[4].descriptor == state
    assert answer[3] is True
    assert pair.client.named("outcome") == [(delivery, b"t" * 16, state, True)]
    assert is_settled(delivery)
    assert not pair.client.engine.offered


def test_a_refused_outcome_has_its_reason(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    pair.client.engine.offer(ours, delivery, ACCEPTED)
    pair.run()
    reject(sent, "com.microsoft:message-lock-lost", "too late")
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"t" * 16, REJECTED, True)]
    assert rejection(delivery) == ("com.microsoft:message-lock-lost", "too late", {})


def test_a_rejection_may_carry_info(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    info = {"DeadLetterReason": "unreadable", "attempts": codec.Long(3)}
    describe_rejected(delivery, "com.microsoft:dead-letter", "no", info)
    pair.client.engine.offer(ours, delivery, REJECTED)
    pair.run()
    assert rejection(sent) == ("com.microsoft:dead-letter", "no", info)


def test_a_modification_may_carry_annotations(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    describe_modified(delivery, True, True, {codec.Symbol("step"): "two"})
    pair.client.engine.offer(ours, delivery, MODIFIED)
    pair.run()
    assert modification(sent) == (True, {"step": "two"})
    (disposition,) = performatives(pair.received, 0x15)
    assert disposition[4].value[:2] == [True, True]


def test_offers_end_with_their_link(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    pair.client.engine.offer(ours, pair.client.named("message")[0][0], ACCEPTED)
    theirs.detach("amqp:link:detach-forced", "bye")
    pair.run()
    assert pair.client.named("detach") == [("link", True, "amqp:link:detach-forced", "bye")]
    assert not pair.client.engine.offered


def test_the_end_of_a_link_settles_nothing(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=3)
    for tag in (b"a", b"b"):
        theirs.send(tag * 16, MESSAGE, b"", 0, False)
    pair.run()
    pair.sent = b""
    ours.detach()
    pair.run()
    assert [frame[10] for frame in frames(pair.sent)] == [0x16]


def test_a_batch_is_told_by_its_message_format(pair: Pair) -> None:
    pair.attach(sender=True)
    for tag, message_format in ((b"a", 0x80013700), (b"b", 0)):
        fields = [codec.UInt(0), codec.UInt(tag[0] - 97), tag, codec.UInt(message_format), False, False]
        transfer = codec.encode(codec.Described(codec.ULong(0x14), fields))
        pair.server.engine.push(raw_frame(0, transfer + MESSAGE))
    assert [batch for _, _, batch, _ in pair.server.named("message")] == [True, False]
