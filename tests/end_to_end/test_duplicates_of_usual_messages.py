"""Duplicates are found among messages of any form, whoever takes them: the extension, or Python."""

import pytest

from protocol.codec import Described, ULong, encode
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, outcome

CONFIG = '[[queues]]\nname = "witness"\n[[queues]]\nname = "ids"\nrequires_duplicate_detection = true\n'


def message(message_id: object, body: bytes) -> bytes:
    return encode(Described(ULong(0x73), [message_id])) + encode(Described(ULong(0x75), body))


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_of_messages_with_the_same_id_the_first_counts(start_broker, at_once):
    sent = [
        message(name, b"%d" % number) for number, name in enumerate(["a", "b", None, "a", "b", "c", None, "c", "a"])
    ]
    with start_broker(CONFIG) as broker, RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender("ids")
        for begin in range(0, len(sent), at_once):
            for payload in sent[begin : begin + at_once]:
                peer.transfer(payload, handle)
            waiting = len(sent[begin : begin + at_once])
            while waiting:
                first, last, _, state = peer.expect(DISPOSITION).fields[1:5]
                assert state == outcome(ACCEPTED)
                waiting -= (first if last is None else last) - first + 1
        peer.attach_receiver("ids", credit=len(sent))
        assert [body_of(peer.expect(TRANSFER).payload) for _ in range(5)] == [b"0", b"1", b"2", b"5", b"6"]
        peer.nothing_more(TRANSFER)
