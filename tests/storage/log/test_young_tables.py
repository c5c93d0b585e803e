"""Whatever is changed in whatever order, a young table tells what a plain dictionary would."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from storage.log.changes import Layer, YoungTable, packable
from storage.records import Place, queue_key
from storage.store import Table
from tests.storage.entered import entries
from tests.storage.entered import keys as keys_of

NUMBERS = range(12)
KEYS = [queue_key(1, Place.AVAILABLE, each) for each in NUMBERS]
BELOW = dict.fromkeys(KEYS[::2], b"below")
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
PREFIX = KEYS[0][:-8]


def ranges_of(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive numbers, in the order of the numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and sum(ranges[-1]) == number:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((number, 1))
    return ranges


def packable_parts(part: Any) -> Any:
    """The items or keys of a part of a piece."""
    return part if isinstance(part, list | tuple) else packable(part)


KINDS = ("put", "insert", "enter", "enter", "delete", "delete keys", "delete keys", "look")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), SOME), max_size=12)


def change(young: YoungTable, model: dict[bytes, bytes], kind: str, keys: list[bytes], value: bytes) -> None:
    """Change both in the same way; `model` has what is below, too."""
    if kind == "put":
        young.put([(key, value) for key in keys])
        model.update(dict.fromkeys(keys, value))
    elif kind == "insert":
        new = sorted(set(keys) - model.keys())
        young.insert([(key, value) for key in new], new)
        model.update(dict.fromkeys(new, value))
    elif kind == "enter":
        numbers = [at for at in NUMBERS if KEYS[at] in keys and KEYS[at] not in model]
        for first, count in ranges_of(numbers):
            young.insert_entries(entries([value] * count, [(1, first)]))
        model.update({KEYS[at]: value for at in numbers})
    elif kind == "delete keys":
        young.delete_keys(keys_of(PREFIX, ranges_of([KEYS.index(key) for key in keys])))
    elif kind == "delete":
        young.delete(tuple(keys))
    if kind.startswith("delete"):
        for key in keys:
            model.pop(key, None)


@given(STEPS)
def test_a_table_is_as_its_changes_say(steps):
    young, model = YoungTable(), dict(BELOW)
    for number, (kind, keys) in enumerate(steps):
        change(young, model, kind, keys, b"%d" % number)
        if kind == "look":
            agrees(young, model)
    deleted, changed = young.split()
    after = {key: value for key, value in BELOW.items() if key not in deleted}
    assert {**after, **dict(changed), **young.fresh} == model
    assert young.count() >= len({*young.fresh, *young.changed})
    agrees(young, model)


def written(below: dict[bytes, bytes], layer: Layer) -> dict[bytes, bytes]:
    """What is in a table after a checkpoint of this layer."""
    after = dict(below)
    for _, deleted, changed, fresh in layer.net_effect():
        for key in deleted:
            after.pop(key, None)
        after.update([*changed, *fresh])
    return after


def without_deleted(below: dict[bytes, bytes], layer: Layer) -> dict[bytes, bytes]:
    """What is in a table after a checkpoint that had room for nothing but the deletions."""
    gone = {key for _, deleted, _, _ in layer.net_effect() for key in deleted}
    return {key: value for key, value in below.items() if key not in gone}


@given(st.lists(st.tuples(STEPS, st.sampled_from((None, written, without_deleted))), min_size=1, max_size=4))
@example([([("enter", KEYS[1:2])], written), ([("delete", KEYS[1:2])], None)])
@example([([("enter", KEYS[1:4])], written), ([("delete keys", KEYS[2:3])], None)])
def test_merged_layers_are_right_over_a_table_that_has_what_was_in_them(layers):
    """A checkpoint may be in the tables though the worker was not told so: it found no room in another partition then,
    or its process died."""
    merged: Layer | None = None
    below, model = dict(BELOW), dict(BELOW)
    for steps, checkpoint in layers:
        newer = Layer()
        for number, (kind, keys) in enumerate(steps):
            change(newer.tables[Table.QUEUE], model, kind, keys, b"%d" % number)
        if merged is None:
            merged = newer
        else:
            merged.merge(newer)
        assert written(below, merged) == model
        if checkpoint is not None:
            below = checkpoint(below, merged)
            assert written(below, merged) == model
        hidden = {key for key in KEYS if merged.tables[Table.QUEUE].hides(key)}
        assert {key: value for key, value in below.items() if key not in hidden} == {
            key: value for key, value in model.items() if key not in hidden
        }


@given(STEPS, st.integers(1, 4))
def test_the_pieces_of_a_layer_are_its_net_effect(steps, fresh_items):
    layer, again = Layer(), Layer()
    for each in (layer, again):
        model = dict(BELOW)
        for number, (kind, keys) in enumerate(steps):
            change(each.tables[Table.QUEUE], model, kind, keys, b"%d" % number)
    pieces = list(layer.pieces(fresh_items))
    assert all(
        len(fresh) <= fresh_items or not isinstance(fresh, list) or hasattr(fresh, "begin") for _, _, _, fresh in pieces
    )
    joined: list[list[Any]] = [[], [], []]
    parts: list[Any]
    for table, *parts in pieces:
        assert table == Table.QUEUE
        for whole, part in zip(joined, parts, strict=True):
            whole += packable_parts(part)
    [(_, deleted, changed, fresh)] = again.net_effect() or [(0, [], [], [])]
    assert [sorted(set(joined[0])), sorted(joined[1]), sorted(joined[2])] == [
        sorted(set(deleted)),
        sorted(changed),
        sorted(fresh),
    ]


def agrees(young, model):
    below = [(key, value) for key, value in BELOW.items() if not young.hides(key)]
    for key in KEYS:
        assert (young.value(key) if young.hides(key) else BELOW.get(key)) == model.get(key)
        assert young.has_none_of([key]) is not young.hides(key)
    assert young.not_hidden(sorted(BELOW.items())) == below
    own = list(young.keys(b"", b"\xff", False))
    assert own == sorted(key for key in model if young.hides(key))
    assert list(young.keys(b"", b"\xff", True)) == own[::-1]
    assert young.items(own) == [(key, model[key]) for key in own]
