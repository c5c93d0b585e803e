"""Batches that an engine sends: proton knows no message format, so the output is corrected."""

import pytest

from protocol.message.batches import batch_bytes, pack_batch, unpack_batch
from protocol.symbols import BATCH_FORMAT
from tests.protocol_engine.pair import MESSAGE, Pair, frames, performatives

TRANSFER = 0x14


def test_a_batch_arrives_as_one_and_the_next_message_as_none(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    ours.send(b"1", MESSAGE, b"", 0, False)
    ours.send_batch(b"2", pack_batch([MESSAGE, MESSAGE]), False)
    ours.send(b"3", MESSAGE, b"", 0, False)
    pair.run()
    assert [batch for _, _, batch, _ in pair.server.named("message")] == [False, True, False]
    assert unpack_batch(pair.server.named("message")[1][1]) == [MESSAGE, MESSAGE]
    ours.send(b"4", MESSAGE, b"", 0, False)
    pair.run()
    assert not pair.client.engine.output.batches
    assert pair.server.named("message")[-1][2] is False


@pytest.mark.parametrize("size", [480, 496, 1000, 1008, 1012, 1013, 1020, 1024, 5000, 500_000])
def test_all_transfers_of_a_large_batch_have_the_format_and_fit_the_peers_frames(size: int) -> None:
    pair = Pair(max_frame_size=1024)
    pair.server.max_message_bytes = 1_000_000
    ours, _ = pair.attach(sender=True)
    message = b"\x00\x53\x75\xb0" + size.to_bytes(4, "big") + bytes(size)
    ours.send_batch(b"t" * 32, pack_batch([message, MESSAGE]), True)
    pair.run()
    (_, payload, batch, settled) = pair.server.named("message")[0]
    assert (unpack_batch(payload), batch, settled) == ([message, MESSAGE], True, True)
    assert {fields[3] for fields in performatives(pair.received, TRANSFER)} == {BATCH_FORMAT}
    assert max(len(frame) for frame in frames(pair.received)) <= 1024


def test_a_batch_whose_link_ends_before_it_is_written_is_forgotten(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=True)
    ours.send_batch(b"1", pack_batch([MESSAGE]), False)
    theirs.detach("amqp:link:detach-forced", "no")
    pair.client.engine.push(pair.server.engine.pull())
    assert not pair.client.engine.output.batches
    pair.run()


@pytest.mark.parametrize("sizes", [[], [0], [1, 250, 251, 255, 256, 70_000]])
def test_a_batch_has_its_messages_and_at_most_the_bytes_that_were_foreseen(sizes: list[int]) -> None:
    messages = [bytes(size) for size in sizes]
    batch = pack_batch(messages)
    assert not sizes or unpack_batch(batch) == messages
    assert len(batch) <= sum(batch_bytes(size) for size in sizes)
