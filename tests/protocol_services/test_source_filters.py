"""Selectors and other filters of a source as clients send them."""

from typing import Any

import pytest

from protocol.codec import Described, Int, Symbol, ULong
from protocol.errors import InvalidField
from protocol.source_filters import NO_LOCAL, SELECTOR, read

TEXT = "color = 'red'"
BY_CODE = Described(ULong(0x0000468C00000004), TEXT)
BY_NAME = Described(SELECTOR, TEXT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Symbol("jms-selector"), BY_CODE),  # Qpid JMS, rhea
        (Symbol("selector"), BY_NAME),  # Proton
        (SELECTOR, BY_CODE),  # Go
        (SELECTOR, BY_NAME),
        (Symbol("any name"), BY_NAME),
        ("any name", BY_CODE),
        (Symbol("jms-selector"), TEXT),  # Apache NMS
        (SELECTOR, TEXT),
        (SELECTOR, Symbol(TEXT)),
    ],
)
def test_a_selector_is_known_by_its_descriptor_or_by_its_key(key: Any, value: Any) -> None:
    found = read({key: value, Symbol("com.microsoft:session-filter"): "s", Symbol("odd"): Described(Symbol("odd"), 1)})
    assert found.selectors == (TEXT,)
    assert found.entries == {key: value}
    assert not found.wants_no_local


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Symbol("no-local"), Described(ULong(0x0000468C00000003), "NoLocalFilter{}")),  # Qpid JMS
        (Symbol("x"), Described(NO_LOCAL, [])),
        (Symbol("no-local"), "NoLocalFilter{}"),
    ],
)
def test_no_local_is_known(key: Any, value: Any) -> None:
    assert read({key: value}).wants_no_local
    assert read({key: value}).entries == {}


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {Symbol("odd"): TEXT},
        {SELECTOR: None},
        {Symbol("jms-selector"): Described(Symbol("another:type"), TEXT)},
        {Symbol("selector"): Described(ULong(0x0000468C00000005), TEXT)},
        {Symbol("apache.org:xquery-filter:string"): Described(Symbol("apache.org:xquery-filter:string"), TEXT)},
        {Int(5): TEXT},
        {Symbol("x"): Described(Described(SELECTOR, 1), TEXT)},
    ],
)
def test_what_is_not_known_is_left_out(filters: dict[Any, Any]) -> None:
    assert read(filters) == ((), {}, False)


def test_an_empty_selector_is_none_and_is_in_place() -> None:
    entries = {SELECTOR: Described(SELECTOR, " ")}
    assert read(entries) == ((), entries, False)


def test_several_selectors_are_all_meant() -> None:
    entries = {Symbol("a"): BY_NAME, Symbol("b"): Described(SELECTOR, "n = 1")}
    assert read(entries).selectors == (TEXT, "n = 1")
    assert read(entries).entries == entries


@pytest.mark.parametrize("value", [Int(1), b"a", None, ["a"], {}])
def test_a_selector_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(InvalidField):
        read({SELECTOR: Described(SELECTOR, value)})
