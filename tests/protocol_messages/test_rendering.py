import struct
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import Message, symbol

from protocol.codec import Described, Float, Int, Long, Short, Symbol, Timestamp, UByte, UInt, decode, encode
from protocol.message.intake import take_apart
from protocol.message.rendering import MAX_EXPIRY_MS, Additions, render, render_embedded
from tests.examples import examples

HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION, DATA = range(0x70, 0x76)
START = 40
ENQUEUED_MS = 1_700_000_000_000


def section(code: int, value: Any) -> bytes:
    return encode(Described(code, value))


BODY = section(DATA, b"body")


TOKEN = UUID("00112233-4455-6677-8899-aabbccddeeff")


def rendered(message: bytes, sequence_number: int = 1, delivery_count: int = 0, **more: Any) -> bytes:
    """What a receiver gets of `message`, the prefix followed by the rest of the record."""
    if more.get("locked_until_ms") is not None:
        more["lock_token"] = TOKEN.bytes
    layout, stored, _, _ = take_apart(message)
    record = b"r" * START + stored
    prefix, offset = render(layout, record, START, sequence_number, delivery_count, ENQUEUED_MS, **more)
    whole = prefix + record[offset:]
    assert render_embedded(layout, record, START, sequence_number, delivery_count, ENQUEUED_MS, **more) == whole
    return whole


def sections_of(message: bytes) -> dict[int, Any]:
    """Section values by code, in order; each section's descriptor must have the form that every client reads."""
    values, at = {}, 0
    while at < len(message):
        assert message[at : at + 2] == b"\x00\x53"
        described, at = decode(message, at)
        assert described.descriptor not in values
        values[int(described.descriptor)] = described.value
    assert [*values] == sorted(values)
    return values


def test_a_delivery_has_a_fresh_header_and_the_brokers_annotations():
    message = rendered(BODY, sequence_number=2**40, delivery_count=3, locked_until_ms=ENQUEUED_MS + 30_000)
    values = sections_of(message)
    assert values == {
        HEADER: [False, None, None, None, 3],
        DELIVERY: {"x-opt-lock-token": TOKEN},
        ANNOTATIONS: {
            "x-opt-sequence-number": 2**40,
            "x-opt-enqueued-time": ENQUEUED_MS,
            "x-opt-locked-until": ENQUEUED_MS + 30_000,
        },
        PROPERTIES: [],
        DATA: b"body",
    }
    assert [(type(key), type(value)) for key, value in values[ANNOTATIONS].items()] == [
        (Symbol, Long),
        (Symbol, Timestamp),
        (Symbol, Timestamp),
    ]
    assert type(values[HEADER][4]) is UInt


def test_a_message_that_is_not_locked_says_nothing_of_a_lock():
    values = sections_of(rendered(BODY))
    assert DELIVERY not in values
    assert [*values[ANNOTATIONS]] == ["x-opt-sequence-number", "x-opt-enqueued-time"]


@pytest.mark.parametrize("additions", [None, Additions(properties={"k": "w"})])
@pytest.mark.parametrize("ttl_ms", [None, 5])
@pytest.mark.parametrize("annotations", [b"", section(ANNOTATIONS, {Symbol("x-opt-partition-key"): "k"})])
def test_the_senders_delivery_annotations_are_shown_beside_the_lock_token(additions, ttl_ms, annotations):
    sent = {Symbol("a"): [1, {"b": None}], Symbol("x-opt-lock-token"): UUID(int=1), Symbol("c"): "d" * 300}
    message = annotations + section(PROPERTIES, ["id"]) + section(APPLICATION, {"k": "v"}) + BODY
    whole = message + section(DELIVERY, sent)
    shown = {key: value for key, value in sent.items() if key != "x-opt-lock-token"}
    for locked_until_ms, ours in ((5, {"x-opt-lock-token": TOKEN}), (None, {})):
        more = {"additions": additions, "ttl_ms": ttl_ms, "locked_until_ms": locked_until_ms}
        values = sections_of(rendered(whole, **more))
        assert values.pop(DELIVERY) == {**ours, **shown}
        without = sections_of(rendered(message, **more))
        without.pop(DELIVERY, None)
        assert values == without


def test_the_stored_bytes_follow_the_prefix_untouched_when_the_message_has_properties():
    layout, stored, _, _ = take_apart(section(ANNOTATIONS, {Symbol("a"): 1}) + section(PROPERTIES, ["id"]) + BODY)
    prefix, offset = render(
        layout, b"r" * START + stored, START, 1, 0, ENQUEUED_MS, ENQUEUED_MS, lock_token=TOKEN.bytes
    )
    assert offset == START
    assert stored not in prefix


def test_the_senders_annotations_follow_the_brokers():
    annotations = section(ANNOTATIONS, {Symbol("x-opt-partition-key"): "k", Symbol("mine"): [1, Float(0.5)]})
    for properties in (b"", section(PROPERTIES, ["id"])):
        values = sections_of(rendered(annotations + properties + BODY))
        assert [*values[ANNOTATIONS].items()][2:] == [("x-opt-partition-key", "k"), ("mine", [1, 0.5])]
        assert values[PROPERTIES] == (["id"] if properties else [])


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ([True], [True, None, None, None, 0]),
        ([False, UByte(0)], [False, 0, None, None, 0]),
        ([True, UByte(255), None, True, UInt(9)], [True, 255, None, True, 0]),
        ([None, None, None, False], [False, None, None, False, 0]),
    ],
)
def test_durable_priority_and_first_acquirer_are_shown_as_sent(sent, shown):
    assert sections_of(rendered(section(HEADER, sent) + BODY))[HEADER] == shown
    assert sections_of(rendered(section(HEADER, sent) + BODY, additions=Additions()))[HEADER] == shown
    shown = [*shown[:2], 7, *shown[3:]]
    assert sections_of(rendered(section(HEADER, sent) + BODY, ttl_ms=7))[HEADER] == shown


@pytest.mark.parametrize("locked_until_ms", [None, 5])
@pytest.mark.parametrize("sent", [{}, {Symbol("mine"): 1}])
def test_first_acquirer_is_no_delivery_annotation_of_the_client(sent, locked_until_ms):
    delivery = section(DELIVERY, sent) if sent else b""
    message = rendered(section(HEADER, [True, None, None, False]) + delivery + BODY, locked_until_ms=locked_until_ms)
    shown = ({Symbol("x-opt-lock-token"): TOKEN} if locked_until_ms else {}) | sent
    assert sections_of(message).get(DELIVERY, {}) == shown
    assert (DELIVERY in sections_of(message)) == bool(shown)
    assert ANNOTATIONS in sections_of(message)


def test_changes_replace_properties_whose_names_are_symbols():
    sent = section(APPLICATION, {Symbol("a"): 1, Symbol("b"): 2, "c": 3}) + BODY
    additions = Additions(properties={"a": "new", "b": None, "c": "too"})
    assert sections_of(rendered(sent, additions=additions))[APPLICATION] == {"a": "new", "c": "too"}


def test_a_partitioned_entitys_annotations_are_added():
    additions = Additions(partition_id=3, partition_key="k")
    annotations = sections_of(rendered(BODY, additions=additions))[ANNOTATIONS]
    assert annotations["x-opt-partition-id"] == 3
    assert type(annotations["x-opt-partition-id"]) is Short
    assert annotations["x-opt-partition-key"] == "k"


def test_a_time_to_live_is_shown_in_header_and_properties():
    for properties in ([], ["id"], [None] * 10 + ["s"], ["id", *[None] * 7, Timestamp(1), Timestamp(2), "s", UInt(3)]):
        values = sections_of(rendered(section(PROPERTIES, properties) + BODY, ttl_ms=60_000))
        assert values[HEADER] == [False, None, 60_000, None, 0]
        expected = [*properties, *[None] * (10 - len(properties))]
        expected[8:10] = [ENQUEUED_MS + 60_000, ENQUEUED_MS]
        assert values[PROPERTIES] == expected
        assert [type(time) for time in values[PROPERTIES][8:10]] == [Timestamp, Timestamp]
        assert values[DATA] == b"body"
    assert sections_of(rendered(BODY, ttl_ms=5))[PROPERTIES] == [None] * 8 + [ENQUEUED_MS + 5, ENQUEUED_MS]


def test_a_time_to_live_beyond_a_header_is_in_the_properties_times_as_far_as_dates_go():
    ninety_days = 90 * 24 * 3600 * 1000
    values = sections_of(rendered(BODY, ttl_ms=ninety_days))
    assert values[HEADER][2] == 2**32 - 1
    assert values[PROPERTIES][8] - values[PROPERTIES][9] == ninety_days
    assert sections_of(rendered(BODY, ttl_ms=MAX_EXPIRY_MS))[PROPERTIES][8] == MAX_EXPIRY_MS


def test_without_time_to_live_the_senders_times_stay_as_they_are():
    properties = section(PROPERTIES, [None] * 8 + [Timestamp(1), Timestamp(2)])
    assert properties in rendered(properties + BODY)


def test_properties_set_since_are_merged_into_the_application_properties():
    application = section(APPLICATION, {"keep": Int(1), "change": "old", "DeadLetterReason": True})
    changes: dict[str, str | bytes | None] = {"change": "new", "DeadLetterReason": "why", "added": encode(UUID(int=3))}
    values = sections_of(rendered(application + BODY, additions=Additions(properties=changes)))
    assert values[APPLICATION] == {"keep": 1, "change": "new", "DeadLetterReason": "why", "added": UUID(int=3)}
    assert type(values[APPLICATION]["keep"]) is Int
    assert values[DATA] == b"body"
    assert sections_of(rendered(BODY, additions=Additions(properties=changes)))[APPLICATION] == {
        "change": "new",
        "DeadLetterReason": "why",
        "added": UUID(int=3),
    }


def test_properties_removed_since_are_not_shown():
    application = section(APPLICATION, {"keep": 1, "gone": "old"})
    changes = {"gone": None, "never there": None, "added": "x"}
    values = sections_of(rendered(application + BODY, additions=Additions(properties=changes)))
    assert values[APPLICATION] == {"keep": 1, "added": "x"}
    assert sections_of(rendered(BODY, additions=Additions(properties={"gone": None})))[APPLICATION] == {}


@pytest.mark.parametrize(
    ("sent", "changes", "shown"),
    [
        (None, {3: encode("label")}, [None, None, None, "label"]),
        ([], {0: encode("id")}, ["id"]),
        (["id", None, "to", "label"], {3: encode("new"), 2: None}, ["id", None, None, "new"]),
        (["id"], {10: encode("session"), 0: None}, [None] * 10 + ["session"]),
        (["id", b"u" * 300], {6: encode(Symbol("text/plain"))}, ["id", b"u" * 300, *[None] * 4, "text/plain"]),
    ],
)
def test_fields_of_the_properties_set_since_stand_in_their_places(sent, changes, shown):
    message = (b"" if sent is None else section(PROPERTIES, sent)) + BODY
    additions = Additions(system=changes)
    assert sections_of(rendered(message, additions=additions))[PROPERTIES] == shown
    values = sections_of(rendered(message, additions=additions, ttl_ms=5))
    expected = [*shown, *[None] * (10 - len(shown))]
    expected[8:10] = [ENQUEUED_MS + 5, ENQUEUED_MS]
    assert values[PROPERTIES] == expected
    assert values[DATA] == b"body"


def test_a_property_is_found_by_name_whatever_the_size_form_of_its_key():
    key = b"\xb1" + (6).to_bytes(4, "big") + b"change"
    pairs = key + encode("old")
    application = b"\x00\x53\x74\xc1" + bytes((len(pairs) + 1, 2)) + pairs
    values = sections_of(rendered(application + BODY, additions=Additions(properties={"change": "new"})))
    assert values[APPLICATION] == {"change": "new"}


def test_what_only_few_messages_show():
    additions = Additions(enqueue_sequence_number=7, dead_letter_source="q", message_state=1)
    values = sections_of(rendered(section(PROPERTIES, ["id"]) + BODY, locked_until_ms=5, additions=additions))
    assert values[DELIVERY] == {"x-opt-lock-token": TOKEN}
    assert values[ANNOTATIONS] == {
        "x-opt-sequence-number": 1,
        "x-opt-enqueued-time": ENQUEUED_MS,
        "x-opt-locked-until": 5,
        "x-opt-enqueue-sequence-number": 7,
        "x-opt-message-state": 1,
        "x-opt-deadletter-source": "q",
    }
    types = {key: type(value) for key, value in values[ANNOTATIONS].items()}
    assert (types["x-opt-enqueue-sequence-number"], types["x-opt-message-state"]) == (Long, Int)


def test_a_body_can_be_left_out_of_an_answer():
    message = section(PROPERTIES, ["id"]) + section(APPLICATION, {"k": "v"}) + BODY + section(0x78, {})
    layout, stored, _, _ = take_apart(message)
    for additions in (None, Additions(properties={"k": "w"})):
        values = sections_of(render_embedded(layout, stored, 0, 1, 0, ENQUEUED_MS, additions=additions, omit_body=True))
        assert [*values] == [HEADER, ANNOTATIONS, PROPERTIES, APPLICATION]
    no_sections, stored, _, _ = take_apart(BODY)
    assert [*sections_of(render_embedded(no_sections, stored, 0, 1, 0, ENQUEUED_MS, omit_body=True))] == [
        HEADER,
        ANNOTATIONS,
        PROPERTIES,
    ]


def test_proton_reads_what_is_rendered():
    sent = Message(id="id", priority=3, subject="s", body=b"b" * 2000, inferred=True, properties={"a": 1})
    sent.annotations = {symbol("x-opt-partition-key"): "k"}
    for more in ({}, {"ttl_ms": 5000}, {"additions": Additions(properties={"DeadLetterReason": "r"}, message_state=2)}):
        received = Message()
        received.decode(rendered(bytes(sent.encode()), sequence_number=9, delivery_count=1, locked_until_ms=77, **more))
        assert (received.id, received.subject, received.body, received.priority) == ("id", "s", b"b" * 2000, 3)
        assert received.delivery_count == 1
        assert received.annotations[symbol("x-opt-sequence-number")] == 9
        assert received.annotations[symbol("x-opt-locked-until")] == 77
        assert received.annotations[symbol("x-opt-partition-key")] == "k"
        assert received.properties["a"] == 1
    assert received.properties["DeadLetterReason"] == "r"


parts = st.tuples(
    st.sampled_from([b"", section(HEADER, [True]), section(HEADER, [None, UByte(9)])]),
    st.dictionaries(
        st.text(st.characters(max_codepoint=127), max_size=90).map(lambda name: Symbol("mine-" + name)),
        st.text(max_size=90),
    ).map(lambda pairs: section(ANNOTATIONS, pairs) if pairs else b""),
    st.none() | st.integers(0, 11).map(lambda count: ["id", *[None] * 9, "s"][:count]),
    st.none() | st.dictionaries(st.text(max_size=90), st.text(max_size=90)),
)
int64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=examples(150))
@given(parts, int64, st.integers(0, 2**32 - 1), st.none() | int64, st.none() | st.integers(0, 2**40))
def test_the_common_way_and_that_of_additions_show_the_same(
    generated, sequence_number, delivery_count, locked_until_ms, ttl_ms
):
    header, annotations, fields, pairs = generated
    message = header + annotations
    message += b"" if fields is None else section(PROPERTIES, fields)
    message += b"" if pairs is None else section(APPLICATION, pairs)
    more = {"locked_until_ms": locked_until_ms, "ttl_ms": ttl_ms}
    common = sections_of(rendered(message + BODY, sequence_number, delivery_count, **more))
    other = sections_of(rendered(message + BODY, sequence_number, delivery_count, **more, additions=Additions()))
    assert common == other
    assert common[HEADER][4] == delivery_count
    assert common[ANNOTATIONS]["x-opt-sequence-number"] == sequence_number
    assert common.get(APPLICATION) == pairs
    sent = decode(annotations)[0].value if annotations else {}
    assert common[ANNOTATIONS].items() >= sent.items()


def test_a_rendered_message_is_taken_apart_to_what_was_sent():
    sent = section(ANNOTATIONS, {Symbol("a"): 1}) + section(PROPERTIES, ["id"]) + BODY
    again = rendered(sent, locked_until_ms=5, additions=Additions(message_state=1, dead_letter_source="q"))
    assert take_apart(again) == take_apart(sent)


def test_numbers_beyond_their_type_are_our_mistake():
    with pytest.raises(struct.error):
        rendered(BODY, sequence_number=2**63)
