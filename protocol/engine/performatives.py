"""Checks the fields of performatives (AMQP 1.0, 2.7) before the engine sees them.

Proton reads what it can and skips the rest: a field of a wrong type counts as absent, a handle even as 0. It keeps some
fields as encoded bytes and copies them into its answer; there an array that claims 2^31 elements crashes the process.
So a performative is decoded first, under the limits of `protocol.codec`, unless it looks like one that was read before.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from protocol.codec import Array, Described, Symbol, UByte, UInt, ULong, UShort, decode
from protocol.errors import DecodeError, InvalidField
from protocol.symbols import DESCRIPTOR_OF

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
_ERROR, _SOURCE, _TARGET, _COORDINATOR = 0x1D, 0x28, 0x29, 0x30

MAX_VALUES: Final = 4096  # in one performative: about 3 ms of work

CODE_OF: Final[Mapping[str, int]] = {name: code for name, code in DESCRIPTOR_OF.items() if OPEN <= code <= CLOSE}


class _Field(NamedTuple):
    """`kinds` are types of `protocol.codec`; `composites` are the allowed codes of a described list."""

    name: str
    kinds: tuple[type, ...]
    mandatory: bool = False
    composites: tuple[int, ...] = ()


def _fields(*fields: tuple[Any, ...]) -> tuple[_Field, ...]:
    return tuple(_Field(*field) for field in fields)


_TEXT = (str, Symbol)  # some clients write one in place of the other
_MULTIPLE = (*_TEXT, Array, list)  # a field that may hold several symbols (1.4)
_UINT, _FLAG, _MAP = (UInt,), (bool,), (dict,)
_COMPOSITE = (Described,)
_CAPABILITIES = (("offered-capabilities", _MULTIPLE), ("desired-capabilities", _MULTIPLE))
_TERMINUS = (
    ("address", _TEXT),
    ("durable", _UINT),
    ("expiry-policy", _TEXT),
    ("timeout", _UINT),
    ("dynamic", _FLAG),
    ("dynamic-node-properties", _MAP),
)
_ERROR_FIELD = ("error", _COMPOSITE, False, (_ERROR,))

_FIELDS: Final[Mapping[int, tuple[_Field, ...]]] = {
    OPEN: _fields(
        ("container-id", _TEXT, True),
        ("hostname", _TEXT),
        ("max-frame-size", _UINT),
        ("channel-max", (UShort,)),
        ("idle-time-out", _UINT),
        ("outgoing-locales", _MULTIPLE),
        ("incoming-locales", _MULTIPLE),
        *_CAPABILITIES,
        ("properties", _MAP),
    ),
    BEGIN: _fields(
        ("remote-channel", (UShort,)),
        ("next-outgoing-id", _UINT, True),
        ("incoming-window", _UINT, True),
        ("outgoing-window", _UINT, True),
        ("handle-max", _UINT),
        *_CAPABILITIES,
        ("properties", _MAP),
    ),
    ATTACH: _fields(
        ("name", _TEXT, True),
        ("handle", _UINT, True),
        ("role", _FLAG, True),
        ("snd-settle-mode", (UByte,)),
        ("rcv-settle-mode", (UByte,)),
        ("source", _COMPOSITE, False, (_SOURCE,)),
        ("target", _COMPOSITE, False, (_TARGET, _COORDINATOR)),
        ("unsettled", _MAP),
        ("incomplete-unsettled", _FLAG),
        ("initial-delivery-count", _UINT),
        ("max-message-size", (ULong,)),
        *_CAPABILITIES,
        ("properties", _MAP),
    ),
    FLOW: _fields(
        ("next-incoming-id", _UINT),
        ("incoming-window", _UINT, True),
        ("next-outgoing-id", _UINT, True),
        ("outgoing-window", _UINT, True),
        ("handle", _UINT),
        ("delivery-count", _UINT),
        ("link-credit", _UINT),
        ("available", _UINT),
        ("drain", _FLAG),
        ("echo", _FLAG),
        ("properties", _MAP),
    ),
    TRANSFER: _fields(
        ("handle", _UINT, True),
        ("delivery-id", _UINT),
        ("delivery-tag", (bytes,)),
        ("message-format", _UINT),
        ("settled", _FLAG),
        ("more", _FLAG),
        ("rcv-settle-mode", (UByte,)),
        ("state", _COMPOSITE),
        ("resume", _FLAG),
        ("aborted", _FLAG),
        ("batchable", _FLAG),
    ),
    DISPOSITION: _fields(
        ("role", _FLAG, True),
        ("first", _UINT, True),
        ("last", _UINT),
        ("settled", _FLAG),
        ("state", _COMPOSITE),
        ("batchable", _FLAG),
    ),
    DETACH: _fields(("handle", _UINT, True), ("closed", _FLAG), _ERROR_FIELD),
    END: _fields(_ERROR_FIELD),
    CLOSE: _fields(_ERROR_FIELD),
    _ERROR: _fields(("condition", _TEXT, True), ("description", _TEXT), ("info", _MAP)),
    _SOURCE: _fields(
        *_TERMINUS,
        ("distribution-mode", _TEXT),
        ("filter", _MAP),
        ("default-outcome", _COMPOSITE),
        ("outcomes", _MULTIPLE),
        ("capabilities", _MULTIPLE),
    ),
    _TARGET: _fields(*_TERMINUS, ("capabilities", _MULTIPLE)),
    _COORDINATOR: _fields(("capabilities", _MULTIPLE)),
}
_NAME: Final[Mapping[int, str]] = {code: name.split(":")[1] for name, code in DESCRIPTOR_OF.items()}


def checked(frame: memoryview, at: int, code: int) -> list[Any]:
    """The fields of performative `code`, whose list begins at `at` and ends with the frame; padded with None.

    Raises DecodeError and LimitExceeded; InvalidField if a field is of a wrong type, or missing.
    """
    fields, end = decode(frame, at, MAX_VALUES)
    if not isinstance(fields, list) or end != len(frame):
        raise DecodeError(f"the body of {_NAME[code]} is not one list", at)
    return checked_fields(code, fields)


def checked_fields(code: int, fields: list[Any]) -> list[Any]:
    """The decoded fields of performative `code`, padded with None. Raises InvalidField as `checked` does."""
    _check(_NAME[code], code, fields)
    return fields + [None] * (len(_FIELDS[code]) - len(fields))


def _check(name: str, code: int, values: list[Any]) -> None:
    specified = _FIELDS[code]
    for field, value in zip(specified, values, strict=False):
        if value is None:
            if field.mandatory:
                raise InvalidField(f"{name}.{field.name}", "must not be null")
        elif type(value) not in field.kinds:
            raise InvalidField(f"{name}.{field.name}", f"must not be of type {type(value).__name__.lower()}")
        elif field.composites:
            descriptor = value.descriptor
            inner = DESCRIPTOR_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
            if inner not in field.composites or not isinstance(value.value, list):
                raise InvalidField(f"{name}.{field.name}", f"must not be what {descriptor!r} describes")
            _check(f"{name}.{field.name}", inner, value.value)
    for field in specified[len(values) :]:
        if field.mandatory:
            raise InvalidField(f"{name}.{field.name}", "is missing")
