"""What differs in one copy of a message reaches its receiver."""

from typing import Any

import pytest

from broker.gateway.links.delivery import embed, render_delivery
from broker.namespace.fragments import Keys
from protocol.codec import Described, Symbol, Timestamp, decode, encode
from protocol.message.intake import take_apart
from storage.records import NEVER, Field, Place, encode_message

ANNOTATIONS, PROPERTIES, APPLICATION = 0x72, 0x73, 0x74
SCHEDULED = Symbol("x-opt-scheduled-enqueue-time")


def sections_of(message: bytes) -> dict[int, Any]:
    values, at = {}, 0
    while at < len(message):
        described, at = decode(message, at)
        values[int(described.descriptor)] = described.value
    return values


def test_a_subscriptions_message_says_where_it_was_enqueued_also_if_it_has_changed() -> None:
    layout, body, _, _ = take_apart(encode(Described(0x75, b"body")))
    record = encode_message(1_000, NEVER, layout, body)
    changed: dict[int, Any] = {Field.PROPERTIES: {"a": "b"}}
    moved: dict[int, Any] = {Field.ENQUEUE_SEQUENCE_NUMBER: 3, **changed}
    of_copies, of_others = ((None, 7), (changed, 7), (moved, 3)), ((None, None), (changed, None), (moved, 3))
    for overlay, number, is_copy in [(*each, True) for each in of_copies] + [(*each, False) for each in of_others]:
        prefix, offset = render_delivery(record, 7, 0, None, overlay, None, is_copy=is_copy)
        peeked = embed(record, 7, 0, None, overlay, place=Place.AVAILABLE, keys=Keys.NONE, is_copy=is_copy)
        for shown in (prefix + record[offset:], peeked):
            assert sections_of(shown)[0x72].get("x-opt-enqueue-sequence-number") == number


def test_changes_of_a_rules_action_are_shown_by_link_and_by_request() -> None:
    sections = (["id", None, "to"], {"old": 1, "gone": 2}, b"body")
    message = b"".join(encode(Described(0x73 + at, value)) for at, value in enumerate(sections))
    layout, body, _, _ = take_apart(message)
    record = encode_message(1_000, NEVER, layout, body)
    overlay: dict[int, Any] = {
        Field.PROPERTIES: {"old": encode("new"), "gone": None, "RuleName": "r"},
        Field.SYSTEM: {2: None, 3: encode("label")},
    }
    prefix, offset = render_delivery(record, 1, 0, None, overlay, None)
    for shown in (prefix + record[offset:], embed(record, 1, 0, None, overlay, place=Place.AVAILABLE, keys=Keys.NONE)):
        values = sections_of(shown)
        assert values[PROPERTIES] == ["id", None, None, "label"]
        assert values[APPLICATION] == {"old": "new", "RuleName": "r"}
        assert values[0x75] == b"body"


@pytest.mark.parametrize(
    "of_sender",
    [{}, {SCHEDULED: Timestamp(5_000)}, {Symbol("a"): 1, SCHEDULED: Timestamp(5_000), Symbol("b"): [2]}],
    ids=["none", "only", "among others"],
)
@pytest.mark.parametrize("header", [[], [None, None, None, True]])
def test_the_time_until_which_an_action_delays_replaces_the_senders(of_sender: Any, header: list[Any]) -> None:
    sections = ((0x70, header), (ANNOTATIONS, of_sender), (PROPERTIES, ["id"]), (0x75, b"body"))
    layout, body, _, _ = take_apart(b"".join(encode(Described(code, value)) for code, value in sections))
    record = encode_message(1_000, NEVER, layout, body)
    overlay: dict[int, Any] = {Field.ENQUEUED_MS: 9_001, Field.SCHEDULED_MS: 9_000}
    prefix, offset = render_delivery(record, 1, 0, None, overlay, None)
    for shown in (prefix + record[offset:], embed(record, 1, 0, None, overlay, place=None, keys=Keys.NONE)):
        values = sections_of(shown)
        annotations = values[ANNOTATIONS]
        assert (annotations[SCHEDULED], annotations["x-opt-enqueued-time"]) == (9_000, 9_001)
        assert annotations["x-opt-message-state"] == 2
        assert {key: annotations[key] for key in of_sender if key != SCHEDULED} == {
            key: value for key, value in of_sender.items() if key != SCHEDULED
        }
        assert values[0x75] == b"body"
