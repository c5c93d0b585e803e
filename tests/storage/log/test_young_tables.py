"""Whatever is changed in whatever order, a young table tells what a plain dictionary would."""

from hypothesis import given
from hypothesis import strategies as st

from storage.log.changes import YoungTable

KEYS = [bytes([each]) for each in range(12)]
BELOW = dict.fromkeys(KEYS[::2], b"below")
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from(("put", "insert", "delete", "look")), SOME), max_size=12)


@given(STEPS)
def test_a_table_is_as_its_changes_say(steps):
    young, model = YoungTable(), dict(BELOW)
    for number, (kind, keys) in enumerate(steps):
        value = b"%d" % number
        if kind == "put":
            young.put([(key, value) for key in keys])
            model.update(dict.fromkeys(keys, value))
        elif kind == "insert":
            new = sorted(set(keys) - model.keys())
            young.insert([(key, value) for key in new], new)
            model.update(dict.fromkeys(new, value))
        elif kind == "delete":
            young.delete(tuple(keys))
            for key in keys:
                model.pop(key, None)
        else:
            agrees(young, model)
    deleted, changed = young.split()
    after = {key: value for key, value in BELOW.items() if key not in deleted}
    assert {**after, **dict(changed), **young.fresh} == model
    assert young.count() >= len({*young.fresh, *young.changed})
    agrees(young, model)


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
