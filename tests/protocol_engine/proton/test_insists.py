"""What proton insists on. See docs/design/proton.md."""

from protocol.codec import UInt
from tests.protocol_engine.proton.bare import DETACH, END, Bare, frame, transferred


def test_delivery_ids_must_follow_one_another(bare: Bare) -> None:
    bare.begin()
    bare.attach(sends=True)
    bare.push(transferred(7))
    assert bare.fault() == ("", "")  # the first may be any
    bare.push(transferred(9, tag=b"u"))
    assert bare.fault() == ("amqp:session:invalid-field", "sequencing error, expected delivery-id 8, got 9")


def test_a_detach_behind_the_end_of_its_session_is_a_fault(bare: Bare) -> None:
    bare.begin()
    bare.attach(sends=True)
    bare.push(frame(END))
    assert bare.fault() == ("", "")
    bare.push(frame(DETACH, UInt(0), True))
    assert bare.fault() == ("amqp:not-allowed", "no such channel: 0")
