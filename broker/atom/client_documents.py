"""Atom documents as a client of the management API reads and writes them (management.md 1.5, 1.7).

A client that changes an entity sends back what it has read, with some elements changed: what an update omits gets the
service's default. So descriptions stay XML here, and elements that we do not know are kept.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from broker.atom import xml
from broker.atom.documents import ENTRY_TYPE
from broker.atom.entities import ORDER, Form, form_of
from broker.atom.rules import FIRST
from broker.atom.values import UNLIMITED_MS, read_boolean, read_duration_ms, read_number
from broker.errors import InvalidArgument
from broker.namespace.durations import format_duration

REQUEST_TYPE: Final = ENTRY_TYPE
MAX_DETAIL_CHARACTERS: Final = 500

# What the service says of an entity, and clients cannot set.
READ_ONLY: Final = frozenset(
    {
        "AccessedAt", "CorrelationFilterCount", "CountDetails", "CreatedAt", "EntityAvailabilityStatus", "FilterCounts",
        "MessageCount", "SizeInBytes", "SqlFilterCount", "SubscriptionCount", "UpdatedAt",
    }
)  # fmt: skip
_NESTED: Final = "AuthorizationRules"

_COUNTS: Final = {
    "active": "ActiveMessageCount",
    "dead_lettered": "DeadLetterMessageCount",
    "scheduled": "ScheduledMessageCount",
    "transfer": "TransferMessageCount",
    "transfer_dead_lettered": "TransferDeadLetterMessageCount",
}
_FIRST_RULE: Final = re.compile(rb"<(\w+:)?%s\s*/>" % FIRST.encode())
_BEHIND_FIRST_RULE: Final = "MessageCount"
_SUB_CODE: Final = re.compile(r"\s*SubCode=(\d+)[.:]\s*")
_TRACKING: Final = re.compile(r"[\s,]*\bTrackingId:.*", re.DOTALL)


class Described(NamedTuple):
    """An entry: the last part of the entity's name, the name of its description element, and the element."""

    title: str
    element: str
    description: Element


class Key(NamedTuple):
    """An authorization rule of an entity, without its keys."""

    name: str
    rights: tuple[str, ...]


def read_entries(body: bytes) -> list[Described]:
    """The entries of a feed, or the only one of an entry. Raises InvalidArgument if it is neither."""
    root = xml.parse(body)
    if root.tag == f"{{{xml.ATOM}}}entry":
        entries = [root]
    elif root.tag == f"{{{xml.ATOM}}}feed":
        entries = [each for name, each in xml.children(root, xml.ATOM) if name == "entry"]
    else:
        raise InvalidArgument("The answer is no Atom document.")
    return [_read_entry(each) for each in entries]


def _read_entry(entry: Element) -> Described:
    content = xml.child(entry, "content", xml.ATOM)
    for name, description in xml.children(content) if content is not None else ():
        return Described(xml.text_of(xml.child(entry, "title", xml.ATOM)), name, description)
    raise InvalidArgument("The answer has an entry without a description.")


def write_entry(description: Element, first_rule: str = "") -> bytes:
    """The body of a request that creates or changes an entity.

    `first_rule` is the element that `rules.write` makes, for a new subscription. It is put in as text, because the
    types of values in it have prefixes, which are lost in a tree of elements.
    """
    if first_rule:
        description.insert(_place("subscription", description, _BEHIND_FIRST_RULE), Element(_name(FIRST)))
    entry = Element(f"{{{xml.ATOM}}}entry")
    content = SubElement(entry, f"{{{xml.ATOM}}}content", {"type": "application/xml"})
    content.append(description)
    written: bytes = tostring(entry, encoding="utf-8")
    return _FIRST_RULE.sub(lambda _: first_rule.encode(), written) if first_rule else written


def wrapped(description: str) -> bytes:
    """Write an entry, as `write_entry` does, around an element that is written already and keeps its prefixes."""
    content = f'<content type="application/xml">{description}</content>'
    return f'<entry xmlns="{xml.ATOM}">{content}</entry>'.encode()


def new_description(element: str) -> Element:
    return Element(_name(element))


def settable(kind: str) -> list[str]:
    """The names of the elements that a client can set on entities of this kind."""
    return [name for name in ORDER[kind] if name not in READ_ONLY and name != _NESTED]


def change(kind: str, description: Element, values: Mapping[str, str]) -> None:
    """Set elements, in the order that the service wants; an empty text removes the element.

    What only the service sets is removed.
    """
    for name in READ_ONLY:
        _remove(description, name)
    for name, text in values.items():
        _remove(description, name)
        if text:
            added = Element(_name(name))
            added.text = text
            description.insert(_place(kind, description, name), added)


def _remove(description: Element, name: str) -> None:
    for found in description.findall(_name(name)):
        description.remove(found)


def _place(kind: str, description: Element, name: str) -> int:
    """Find the place before the first element that comes later in the order of the service."""
    later = {_name(each) for each in ORDER[kind][ORDER[kind].index(name) :]}
    for place, each in enumerate(description):
        if each.tag in later:
            return place
    return len(description)


def _name(element: str) -> str:
    return f"{{{xml.SERVICE_BUS}}}{element}"


# --- what a description says ------------------------------------------------------------------------------------------


def settings(description: Element) -> dict[str, Any]:
    """The values by the names of their elements: booleans, whole numbers, and texts; durations are ISO 8601.

    A duration that is None is unlimited.
    """
    found = {}
    for name, element in xml.children(description):
        if name not in READ_ONLY and name != _NESTED and len(element) == 0 and not xml.is_nil(element):
            found[name] = value(name, (element.text or "").strip())
    return found


def value(name: str, text: str) -> Any:
    """The value of an element; its text if that is not what it should be."""
    try:
        match form_of(name):
            case Form.BOOLEAN:
                return read_boolean(text)
            case Form.NUMBER:
                return read_number(text)
            case Form.DURATION:
                duration_ms = read_duration_ms(text)
                return None if duration_ms >= UNLIMITED_MS else format_duration(duration_ms)
            case Form.TEXT:
                return text
    except ValueError:
        return text


def text_of(description: Element, name: str) -> str:
    """The text of an element, empty if there is none."""
    return xml.text_of(xml.child(description, name))


def counts(description: Element) -> dict[str, int]:
    """The messages in each state; nothing if the service does not say."""
    details = xml.child(description, "CountDetails")
    given = {} if details is None else dict(xml.children(details, xml.COUNTS))
    found = {}
    for state, name in _COUNTS.items():
        if name in given:
            found[state] = _number(given[name])
    return found


def number_of(description: Element, name: str) -> int | None:
    """A count or a size of the entity."""
    found = xml.child(description, name)
    return None if found is None else _number(found)


def _number(element: Element) -> int:
    try:
        return read_number(xml.text_of(element))
    except ValueError as error:
        raise InvalidArgument(f"The answer has no number in {element.tag!r}.") from error


def keys(description: Element) -> list[Key]:
    rules = xml.child(description, _NESTED)
    found = []
    for _, rule in xml.children(rules) if rules is not None else ():
        rights = xml.child(rule, "Rights")
        names = tuple(xml.text_of(each) for _, each in xml.children(rights)) if rights is not None else ()
        found.append(Key(xml.text_of(xml.child(rule, "KeyName")), names))
    return found


def read_error(body: str) -> tuple[int | None, str]:
    """The sub code and the text of an error, without what is for the service's own support (management.md 1.15).

    The text is empty if the body is not the service's.
    """
    try:
        detail = xml.text_of(xml.parse(body.encode()).find("{*}Detail"))
    except InvalidArgument:
        return None, ""
    sub_code = _SUB_CODE.match(detail)
    text = _TRACKING.sub("", _SUB_CODE.sub("", detail, count=1))
    return int(sub_code[1]) if sub_code else None, text[:MAX_DETAIL_CHARACTERS]
