"""What a receiver may set on a message while it settles it."""

from broker.gateway.links.properties import dead_letter_properties, encode_properties
from protocol.codec import Int, Symbol, encode
from protocol.engine.rejections import MAX_REASON_CHARACTERS


def test_values_keep_their_amqp_type() -> None:
    assert encode_properties({Symbol("n"): Int(5), "s": "x"}) == {"n": encode(Int(5)), "s": encode("x")}


def test_values_that_cannot_be_application_properties_are_left_out() -> None:
    assert encode_properties({"list": [1], "map": {}, 5: "number as key"}) is None


def test_reason_and_description_are_text_within_their_limit() -> None:
    info = {Symbol("DeadLetterReason"): "r" * 5000, "DeadLetterErrorDescription": "why", "n": Int(1)}
    assert dead_letter_properties(info) == {
        "DeadLetterReason": "r" * MAX_REASON_CHARACTERS,
        "DeadLetterErrorDescription": "why",
        "n": encode(Int(1)),
    }


def test_a_rejection_without_info_keeps_the_errors_description() -> None:
    assert dead_letter_properties({}, "bad order") == {"DeadLetterErrorDescription": "bad order"}
    assert dead_letter_properties({}) is None
