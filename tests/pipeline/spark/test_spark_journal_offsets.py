"""Positions in the journal: limits, targets, losses. Pure, with hostile values."""

import json
import re

import pytest

pytest.importorskip("pyarrow")

from hypothesis import given
from hypothesis import strategies as st

from protocol.bounds import MAX_NUMBER
from pyspark_peeklock.errors import (
    AnotherEpoch,
    BehindEnd,
    InvalidOption,
    JournalRefused,
    JournalTooShort,
    OutOfRetention,
)
from pyspark_peeklock.journal_offsets import (
    PartitionState,
    check_written,
    given_offsets,
    latest,
    places,
    position,
    ranges,
    shared,
    states_of,
)
from pyspark_peeklock.parts import OffsetRange, Part, Source, cut, parts, split

NUMBERS = st.one_of(st.integers(0, 50), st.integers(0, MAX_NUMBER), st.just(MAX_NUMBER))
EPOCHS = st.sampled_from(["a1", "b2"])


@st.composite
def states(draw):
    found = {}
    for number in sorted(draw(st.sets(st.integers(0, 12), max_size=5))):
        low, stable = sorted((draw(NUMBERS), draw(NUMBERS)))
        found[number] = PartitionState(number, draw(EPOCHS), low, stable, draw(NUMBERS))
    return found


POSITIONS = st.dictionaries(st.integers(0, 12), st.tuples(EPOCHS, NUMBERS), max_size=5).map(
    lambda found: position((number, *place) for number, place in found.items())
)


@given(POSITIONS, states(), st.none() | st.integers(1, 100), st.none() | st.integers(1, 1000))
def test_a_micro_batch_never_goes_back_and_ends_within_its_limits(start, found, max_rows, max_bytes):
    end = latest(start, found, max_rows=max_rows, max_bytes=max_bytes)
    assert list(end) == sorted(end, key=int)
    begun, ended = places(start), places(end)
    assert ended.keys() == begun.keys() | found.keys()
    rows = 0
    for number, (epoch, offset) in ended.items():
        if number not in found or (epoch, offset) == begun.get(number):
            continue
        assert epoch == found[number].epoch
        assert offset <= found[number].stable
        old_epoch, old = begun.get(number, (epoch, 0))
        first = max(found[number].low, old) if old_epoch == epoch else found[number].low
        assert offset >= first
        rows += offset - first
    assert max_rows is None or rows <= max_rows


@given(states(), st.integers(1, 30))
def test_a_stream_reaches_its_target_and_no_more(found, max_rows):
    """As with AvailableNow: micro-batches until the position stays, however much comes meanwhile."""
    small = {
        number: PartitionState(number, each.epoch, each.low % 100, each.low % 100 + each.stable % 60, 0)
        for number, each in found.items()
    }
    target = {number: (each.epoch, each.stable) for number, each in small.items()}
    grown = {
        number: PartitionState(number, each.epoch, each.low, each.stable + 1000, 0) for number, each in small.items()
    }
    at = given_offsets("startingOffsets", "earliest", small)
    for _ in range(400):
        following = latest(at, grown, max_rows=max_rows, target=target)
        if following == at:
            break
        at = following
    assert places(at) == target


def test_nothing_new_is_the_same_text():
    found = {0: PartitionState(0, "a", 0, 10, 0), 11: PartitionState(11, "a", 0, 10, 0)}
    at = latest(position([]), found)
    assert json.dumps(latest(json.loads(json.dumps(at)), found)) == json.dumps(at)
    assert json.dumps(at) == '{"0": {"epoch": "a", "offset": 10}, "11": {"epoch": "a", "offset": 10}}'


@given(st.dictionaries(st.integers(0, 9), st.integers(0, MAX_NUMBER)), st.integers(0, 1000))
def test_shares_are_bounded_and_complete(left, most):
    shares = shared(left, most)
    assert sum(shares.values()) == min(most, sum(left.values()))
    assert all(0 <= shares[key] <= left[key] for key in left)
    if most >= len(left):
        assert all(shares[key] for key in left if left[key])


@given(POSITIONS, POSITIONS, states())
def test_what_is_planned_can_be_read_and_the_rest_is_lost(start, end, found):
    wanted, losses = ranges(start, end, found)
    for each in (part.offsets for part in wanted):
        state = found[each.partition]
        assert each.epoch == state.epoch
        assert state.low <= each.first < each.end
        assert each.end == places(end)[each.partition][1]
    assert all(loss.rows >= 0 or start for loss in losses)
    assert ranges(end, end, found) == ([], [])


def test_losses_have_their_reasons():
    found = {0: PartitionState(0, "b", 10, 20, 0)}

    def lost(start, end):
        wanted, losses = ranges(start, end, found)
        return [(each.offsets.first, each.offsets.end) for each in wanted], [
            (loss.rows, type(loss.error)) for loss in losses
        ]

    assert lost(position([(0, "b", 12)]), position([(0, "b", 15)])) == ([(12, 15)], [])
    assert lost(position([]), position([(0, "b", 15)])) == ([(10, 15)], [])
    assert lost(position([(0, "b", 4)]), position([(0, "b", 15)])) == ([(10, 15)], [(6, OutOfRetention)])
    assert lost(position([(0, "b", 4)]), position([(0, "b", 7)])) == ([], [(3, OutOfRetention)])
    assert lost(position([(0, "a", 99)]), position([(0, "b", 15)])) == ([(10, 15)], [(0, AnotherEpoch)])
    assert lost(position([(0, "a", 3)]), position([(0, "a", 9)])) == ([], [(6, AnotherEpoch)])
    assert lost(position([(1, "a", 3)]), position([(1, "a", 9)])) == ([], [(6, JournalRefused)])


@given(states(), st.integers(1, 40))
def test_split_ranges_are_the_same_offsets(found, least):
    wanted = [
        Part(Source.JOURNAL, OffsetRange(each.partition, each.epoch, each.low, each.stable))
        for each in found.values()
        if each.stable > each.low
    ]
    pieces = split(wanted, least)
    assert len(pieces) >= min(least, sum(min(each.offsets.end - each.offsets.first, least) for each in wanted))
    assert joined(pieces) == wanted


def joined(pieces):
    """Neighbours of one source, put together again."""
    found = []
    for each in pieces:
        offsets = each.offsets
        assert offsets.first < offsets.end
        before = found[-1] if found else None
        if before is not None and (before.source, before.offsets.partition) == (each.source, offsets.partition):
            assert before.offsets.end == offsets.first
            found[-1] = Part(
                each.source, OffsetRange(offsets.partition, offsets.epoch, before.offsets.first, offsets.end)
            )
        else:
            found.append(each)
    return found


def test_given_offsets():
    found = {0: PartitionState(0, "a", 5, 10, 0), 1: PartitionState(1, "a", 6, 11, 0)}
    assert places(given_offsets("startingOffsets", "Earliest", found)) == {0: ("a", 5), 1: ("a", 6)}
    assert places(given_offsets("endingOffsets", "latest", found)) == {0: ("a", 10), 1: ("a", 11)}
    assert places(given_offsets("startingOffsets", '{"1": 8}', found)) == {0: ("a", 5), 1: ("a", 8)}
    assert places(given_offsets("endingOffsets", '{"1": 8}', found)) == {0: ("a", 10), 1: ("a", 8)}
    assert places(given_offsets("startingOffsets", '{"0": 10}', found))[0] == ("a", 10)


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_given_offsets_behind_the_end_are_refused(option):
    found = {0: PartitionState(0, "a", 5, 10, 0), 1: PartitionState(1, "a", 6, 11, 0)}
    with pytest.raises(BehindEnd, match=f"option '{option}': partition 1 ends at offset 11, and 12 is behind it"):
        given_offsets(option, '{"1": 12}', found)


def test_a_checkpoint_behind_the_end_is_refused_but_of_another_epoch_or_partition():
    states = {0: PartitionState(0, "b", 5, 10, 0)}
    check_written(position([(0, "b", 10), (1, "b", 99)]), states)
    check_written(position([(0, "a", 11)]), states)
    with pytest.raises(JournalTooShort, match="partition 0: the checkpoint has offset 11, and the journal ends at 10"):
        check_written(position([(0, "b", 11)]), states)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "newest",
        "[]",
        "5",
        '{"0_0": 1}',
        '{" 0": 1}',
        '{"00": 1}',
        '{"' + "9" * 4000 + '": 1}',
        '{"0": -1}',
        '{"0": "1"}',
        '{"0": 1.5}',
        '{"x": 1}',
        '{"2": 1}',
        "[" * 100_000,
    ],
)
def test_offsets_that_make_no_sense_are_refused(text):
    with pytest.raises(InvalidOption, match="option 'startingOffsets'"):
        given_offsets("startingOffsets", text, {0: PartitionState(0, "a", 5, 10, 0)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    JSON
    | st.fixed_dictionaries(
        {
            "namespace": JSON,
            "partitions": st.lists(
                st.fixed_dictionaries({"partition": JSON, "epoch": JSON, "low": JSON, "stable": JSON}), max_size=2
            )
            | JSON,
        }
    )
)
def test_answers_that_make_no_sense_are_one_error(answer):
    try:
        states_of(answer)
    except JournalRefused:
        return


@given(JSON)
def test_a_foreign_checkpoint_is_one_error(found):
    try:
        places(found)
    except JournalRefused as error:
        assert "checkpoint" in str(error)  # noqa: PT017 - an empty object is a position


SPANS = st.lists(NUMBERS, max_size=8, unique=True).map(lambda edges: list(pairwise_of(sorted(edges))))


def pairwise_of(edges):
    return zip(edges[::2], edges[1::2], strict=False)


@given(NUMBERS, NUMBERS, st.none() | NUMBERS, SPANS, st.lists(NUMBERS, max_size=6), st.integers(1, 40))
def test_each_offset_comes_once_from_where_it_is(one, other, low, spans, files, least):
    """Captured files first, the journal from its first offset on, and nobody has the rest."""
    wanted = OffsetRange(3, "a1", min(one, other), max(one, other))
    found = parts(wanted, low, {(3, "a1"): spans, (3, "b2"): [(0, MAX_NUMBER)], (4, "a1"): [(0, MAX_NUMBER)]})
    at = wanted.first
    for each in found:
        offsets = each.offsets
        assert (offsets.partition, offsets.epoch, offsets.first) == (3, "a1", at)
        assert offsets.end > at
        at = offsets.end
        in_journal = low is not None and offsets.first >= low
        assert in_journal == (each.source is Source.JOURNAL)
        if each.source is Source.CAPTURE:
            assert any(first <= offsets.first and offsets.end <= end for first, end in spans)
        elif each.source is Source.NOWHERE:
            assert not any(first < offsets.end and offsets.first < end for first, end in spans)
            assert low is None or offsets.end <= low
    assert at == wanted.end
    assert len(joined(found)) == len(joined([piece for each in found for piece in cut(each, files, least)]))


@given(NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=6), st.integers(1, 40))
def test_a_part_is_cut_at_files_and_not_too_fine(one, other, files, least):
    whole = Part(Source.CAPTURE, OffsetRange(0, "a", min(one, other), max(one, other)))
    if one == other:
        return
    pieces = cut(whole, files, least)
    assert joined(pieces) == [whole]
    assert all(each.offsets.end in files and each.offsets.end - each.offsets.first >= least for each in pieces[:-1])


@given(POSITIONS, POSITIONS, states(), st.dictionaries(st.tuples(st.integers(0, 12), EPOCHS), SPANS, max_size=4))
def test_with_a_capture_all_between_two_positions_is_read_or_lost(start, end, found, captured):
    wanted, losses = ranges(start, end, found, captured)
    begun = places(start)
    for number, (epoch, last) in places(end).items():
        begun_epoch, offset = begun.get(number, (epoch, -1))
        mine = [part.offsets for part in wanted if part.offsets.partition == number and part.offsets.epoch == epoch]
        read = sum(each.end - each.first for each in mine)
        if begun_epoch == epoch and 0 <= offset < last:
            lost = sum(loss.rows for loss in losses if re.search(rf"partition {number}\b", str(loss.error)))
            assert read + lost == last - offset
        assert all(each.end <= last for each in mine)
    for part in wanted:
        offsets = part.offsets
        spans = captured.get((offsets.partition, offsets.epoch), [])
        state = found.get(offsets.partition)
        if part.source is Source.CAPTURE:
            assert any(first <= offsets.first and offsets.end <= end for first, end in spans)
        else:
            assert (state.epoch, state.low <= offsets.first) == (offsets.epoch, True)


def test_what_was_captured_of_an_ended_epoch_is_read_before_the_next():
    found = {0: PartitionState(0, "b", 10, 20, 0)}
    captured = {(0, "a"): [(0, 5), (7, 9)], (0, "b"): [(0, 12)]}
    wanted, losses = ranges(position([(0, "a", 3)]), position([(0, "b", 15)]), found, captured)
    assert [(each.source.value, each.offsets.epoch, each.offsets.first, each.offsets.end) for each in wanted] == [
        ("capture", "a", 3, 5),
        ("capture", "a", 7, 9),
        ("capture", "b", 0, 10),
        ("journal", "b", 10, 15),
    ]
    assert [(loss.rows, type(loss.error)) for loss in losses] == [(0, AnotherEpoch), (2, AnotherEpoch)]
    assert places(given_offsets("startingOffsets", "earliest", found, captured)) == {0: ("b", 0)}
    assert places(latest(position([]), found, captured, max_rows=4)) == {0: ("b", 4)}
