"""Messages between the processes of a namespace: those of the version before are read, and later ones do no harm."""

from typing import Any, get_args

import msgpack
import pytest

from broker import wire
from broker.wire import Op

# One frame with each message, as processes of version 1 have sent them. It is never changed.
VERSION_1 = bytes.fromhex(
    "dc002095010107089194c4066c61796f7574c404626f6479cd03e88102a17395020107089194c4066c61796f7574c404626f6479c0c096"
    "03010708c292a173cd03e894040107649405010764930d0107930e010795060107c3c405746f6b656e970701080092070191c405746f6b"
    "656ec096080109a47065656b08930102039409010895c405746f6b656e0100c4067265636f7264c0970a01c40573746f72650208039301"
    "c4067265636f7264c0970b0208010590a0920c920102930f92010391059210049364019200029365070395660701aa5365727665724275"
    "7379a474657874946707a173cd03e8946807ae456e746974794e6f74466f756e64a47465787493690705927107926a920701956b0701a8"
    "4c6f636b4c6f7374a474657874946c07cd03e895c405746f6b656e0100c4067265636f7264c0936d0981a16101946e09ad496e7465726e"
    "616c4572726f72a474657874936f039181a9656e746974795f6964019372049193a370757481a9656e746974795f696401c09373049192"
    "05909370059101"
)
SINCE_VERSION_1 = {Op.UNUSED, Op.ANSWER, Op.ASK, Op.KEEP, Op.SEND_RUN, Op.TAKES_RUNS, Op.DELIVER_RUN, Op.DELIVER_RUNS}
SINCE_VERSION_1 |= {Op.STORES, Op.REPLACED, Op.MARK, Op.AWAIT, Op.BEAT, Op.OPEN_SELECTIVE}
OF_VERSION_1: list[Any] = [
    wire.send(1, 7, 8, [[b"layout", b"body", 1000, {2: "s"}]]),
    wire.send_batch(1, 7, 8, [[b"layout", b"body", None, None]]),
    wire.open_receiver(1, 7, 8, False, ["s", 1000]),
    wire.grant(1, 7, 100),
    wire.drain(1, 7, 100),
    wire.watch(1, 7),
    wire.passes(1, 7),
    wire.close_receiver(1, 7, True, b"token"),
    wire.settle(1, 8, 0, [7, 1], [b"token"], None),
    wire.request(1, 9, "peek", 8, [1, 2, 3]),
    wire.restore(1, 8, [b"token", 1, 0, b"record", None]),
    wire.forward(1, b"store", 2, 8, 3, [1, b"record", None]),
    wire.forwarded(2, 8, 1, 5, [], ""),
    wire.remove([1, 2]),
    wire.join([1, 3], [5]),
    wire.followed(4),
    wire.Hello(Op.HELLO, 1, [0, 2]),
    wire.sent(7, 3),
    wire.refused(7, 1, "ServerBusy", "text"),
    wire.opened(7, "s", 1000),
    wire.closed(7, "EntityNotFound", "text"),
    wire.drained(7, 5),
    wire.available(7),
    wire.settled([7, 1]),
    wire.unsettled(7, 1, "LockLost", "text"),
    wire.deliver(7, 1000, [b"token", 1, 0, b"record", None]),
    wire.reply(9, {"a": 1}),
    wire.failed(9, "InternalError", "text"),
    wire.catalog(3, [{"entity_id": 1}]),
    wire.changed(4, [["put", {"entity_id": 1}, None]]),
    wire.rules(4, [[5, []]]),
    wire.deleted(5, [1]),
]


# As above, of version 7.
VERSION_7 = bytes.fromhex(
    "dc003395010107089194c4066c61796f7574c404626f6479cd03e88102a17395020107089194c4066c61796f7574c404626f6479c0c096"
    "1301070802c40372756e9214c397150107c40673656e646572cf0000010000000000030291179603010708c294a173cd03e8c410000000"
    "00000000000000000000000000c39718010708c3c0a561203d203194040107cf80000000000000009405010764930d0107930e01079516"
    "010708cfffffffffffffffff95060107c3c405746f6b656e970701080492070191c405746f6b656e81a161c4016296080109a47065656b"
    "08930102039409010895c405746f6b656e0100c4067265636f7264c09509010895c405746f6b656e0100c4067265636f7264c0099c0901"
    "089009150100c40673656e646572050102970a01c40573746f72650208039301c4067265636f7264c0970b020801059193a84c6f636b4c"
    "6f7374a4746578749103a462757379920c920102930f92010391059219919201c410696969696969696969696969696969699278910192"
    "1004931101910294120102c39374010292750196640792000201c4086964656e74697479c4096e616d6573706163659664079001c400c4"
    "009365070395660701aa53657276657242757379a474657874946707a000946707a173cd03e8946807a0a0946807ae456e746974794e6f"
    "74466f756e64a47465787493690705927107926a920701956b0701a84c6f636b4c6f7374a474657874946c07cd03e895c405746f6b656e"
    "0100c4067265636f7264c0987607cd03e8c405746f6b656ec4086e756d62657273210102c40372756e9277919707cd03e8c405746f6b65"
    "6e010002c40372756e936d0981a16101946e09ad496e7465726e616c4572726f72a474657874936f039181a9656e746974795f69640193"
    "72049193a370757481a9656e746974795f696401c0937304919205909370059101"
)
OF_VERSION_7: list[Any] = [
    wire.send(1, 7, 8, [[b"layout", b"body", 1000, {2: "s"}]]),
    wire.send_batch(1, 7, 8, [[b"layout", b"body", None, None]]),
    wire.send_run(1, 7, 8, 2, b"run"),
    wire.takes_runs(),
    wire.mark(1, 7, b"sender", 2**40, 3, 2),
    wire.beat(),
    wire.open_receiver(1, 7, 8, False, ["s", 1000, bytes(16), True]),
    wire.open_selective(1, 7, 8, True, None, "a = 1"),
    wire.grant(1, 7, 2**63),
    wire.drain(1, 7, 100),
    wire.watch(1, 7),
    wire.passes(1, 7),
    wire.await_more(1, 7, 8, 2**64 - 1),
    wire.close_receiver(1, 7, True, b"token"),
    wire.settle(1, 8, 4, [7, 1], [b"token"], {"a": b"b"}),
    wire.request(1, 9, "peek", 8, [1, 2, 3]),
    wire.restore(1, 8, [b"token", 1, 0, b"record", None]),
    wire.restore_as_request(1, 8, [b"token", 1, 0, b"record", None], 9),
    wire.restore_as_request(1, 8, [], 9, wire.mark(1, 0, b"sender", 5, 1, 2)),
    wire.forward(1, b"store", 2, 8, 3, [1, b"record", None]),
    wire.forwarded(2, 8, 1, 5, [["LockLost", "text", [3]]], "busy"),
    wire.remove([1, 2]),
    wire.join([1, 3], [5]),
    wire.stores([[1, b"i" * 16]]),
    wire.replaced([1]),
    wire.followed(4),
    wire.unused(1, [2]),
    wire.answer(1, 2, True),
    wire.ask(1, 2),
    wire.keep(1),
    wire.hello(7, [0, 2], 1, b"identity", b"namespace"),
    wire.hello(7, []),
    wire.sent(7, 3),
    wire.refused(7, 1, "ServerBusy", "text"),
    wire.opened(7),
    wire.opened(7, "s", 1000),
    wire.closed(7),
    wire.closed(7, "EntityNotFound", "text"),
    wire.drained(7, 5),
    wire.available(7),
    wire.settled([7, 1]),
    wire.unsettled(7, 1, "LockLost", "text"),
    wire.deliver(7, 1000, [b"token", 1, 0, b"record", None]),
    wire.deliver_run(7, 1000, b"token", b"numbers!", 1, 2, b"run"),
    wire.deliver_runs([[7, 1000, b"token", 1, 0, 2, b"run"]]),
    wire.reply(9, {"a": 1}),
    wire.failed(9, "InternalError", "text"),
    wire.catalog(3, [{"entity_id": 1}]),
    wire.changed(4, [["put", {"entity_id": 1}, None]]),
    wire.rules(4, [[5, []]]),
    wire.deleted(5, [1]),
]


def test_each_message_of_version_7_keeps_its_bytes():
    assert msgpack.packb(OF_VERSION_7) == VERSION_7
    read = wire.unpack(VERSION_7)
    assert [type(each) for each in read] == [type(each) for each in OF_VERSION_7]
    assert msgpack.packb(read) == VERSION_7
    assert {each.op for each in OF_VERSION_7} == set(Op)
    assert {type(each) for each in OF_VERSION_7} == set(get_args(wire.Message))


def test_frames_of_the_version_before_are_read():
    *_, hello = [each for each in wire.unpack(VERSION_1) if each.op == Op.HELLO]
    assert isinstance(hello, wire.Hello)
    assert wire.greeting(hello) == wire.Hello(Op.HELLO, 1, [0, 2], 1, b"", b"")
    assert not wire.incompatible(wire.greeting(hello))
    expected = [tuple(each) if each.op != Op.HELLO else (Op.HELLO, 1, [0, 2]) for each in OF_VERSION_1]
    assert [tuple(each) for each in wire.unpack(VERSION_1)] == expected
    assert {each.op for each in OF_VERSION_1} == set(Op) - SINCE_VERSION_1


def test_what_a_later_version_has_more_is_left_out():
    frame = msgpack.packb([[Op.HELLO, 3, [0], 2, b"us", b"namespace", "more"], [250, "unknown"], [Op.SENT, 7, 1]])
    messages: list[Any] = wire.unpack(frame)
    hello, sent = messages
    assert wire.greeting(hello).oldest_version == 2
    assert sent == wire.sent(7, 1)


@pytest.mark.parametrize(
    ("oldest", "newest", "works"),
    [(1, 1, True), (1, 2, True), (wire.VERSION, 99, True), (wire.VERSION + 1, 99, False)],
)
def test_processes_talk_if_they_have_a_version_in_common(oldest, newest, works):
    hello = wire.hello(newest, [0], oldest)
    assert (wire.incompatible(hello) == "") == works
    if not works:
        assert f"{oldest} to {newest}" in wire.incompatible(hello)
