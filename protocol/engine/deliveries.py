"""Deliveries: their tags, the outcomes of both sides, and their transactions.

A delivery is valid until it is settled or its link has ended.
"""

from functools import lru_cache
from typing import Any

from protocol import codec
from protocol.codec import Described, ULong
from protocol.engine.proton.library import (
    SCRATCH_BYTES,
    Pointer,
    condition_of,
    ffi,
    lib,
    map_of,
    scratch,
    set_condition,
    set_value,
)

Delivery = Pointer

ACCEPTED: int = lib.PN_ACCEPTED
REJECTED: int = lib.PN_REJECTED
RELEASED: int = lib.PN_RELEASED
MODIFIED: int = lib.PN_MODIFIED
DECLARED = 0x33  # outcomes and states of transactions (4.5.5, 4.5.8), for which proton has no names
TRANSACTIONAL = 0x34

_update, _settle = lib.pn_delivery_update, lib.pn_delivery_settle

# The deliveries of one transaction mostly have the same few states. Longer states are not cached.
_SHORT_STATE_BYTES = 128


def tag_of(delivery: Delivery) -> bytes:
    tag = lib.pn_delivery_tag(delivery)
    return bytes(ffi.buffer(tag.start, tag.size))


def is_settled(delivery: Delivery) -> bool:
    """True if the peer has settled the delivery."""
    return bool(lib.pn_delivery_settled(delivery))


# -- our outcome


def settle(delivery: Delivery, state: int) -> None:
    """Settle with an outcome without fields: accepted, released, modified, or rejected without error."""
    _update(delivery, state)
    _settle(delivery)


def reject(delivery: Delivery, name: str, description: str) -> None:
    """Settle as rejected; `name` is the error's condition (3.4.2)."""
    set_condition(lib.pn_disposition_condition(lib.pn_delivery_local(delivery)), name, description)
    lib.pn_delivery_update(delivery, REJECTED)
    lib.pn_delivery_settle(delivery)


def forget(delivery: Delivery) -> None:
    """Settle a delivery that the peer has settled; nothing is sent."""
    _settle(delivery)


def describe_rejected(delivery: Delivery, name: str, description: str, info: dict[Any, Any]) -> None:
    """Set the fields of `rejected`, for settling with it or offering it later (3.4.2)."""
    set_condition(lib.pn_disposition_condition(lib.pn_delivery_local(delivery)), name, description, info)


def describe_modified(delivery: Delivery, failed: bool, undeliverable_here: bool, annotations: dict[Any, Any]) -> None:
    """Set the fields of `modified`, for settling with it or offering it later (3.4.5)."""
    disposition = lib.pn_delivery_local(delivery)
    lib.pn_disposition_set_failed(disposition, failed)
    lib.pn_disposition_set_undeliverable(disposition, undeliverable_here)
    if annotations:
        set_value(lib.pn_disposition_annotations(disposition), annotations)


# -- the peer's


def rejection(delivery: Delivery) -> tuple[str, str, dict[Any, Any]]:
    """Condition, description and info of the peer's `rejected` (3.4.2)."""
    error = lib.pn_disposition_condition(lib.pn_delivery_remote(delivery))
    info = map_of(lib.pn_condition_info(error))
    return (*condition_of(error), info)


def modification(delivery: Delivery) -> tuple[bool, dict[Any, Any]]:
    """Undeliverable-here and message-annotations of the peer's `modified` (3.4.5)."""
    disposition = lib.pn_delivery_remote(delivery)
    annotations = map_of(lib.pn_disposition_annotations(disposition))
    return bool(lib.pn_disposition_is_undeliverable(disposition)), annotations


# -- transactions (4.4)


def transaction_of(delivery: Delivery) -> bytes | None:
    """The transaction id in a received message's transactional-state, which may be empty; None without such a state."""
    if lib.pn_delivery_remote_state(delivery) != TRANSACTIONAL:
        return None
    return transactional_state(delivery)[0]


def transactional_state(delivery: Delivery) -> tuple[bytes, Described | None]:
    """Transaction id, empty if there is none, and outcome of the peer's transactional-state (4.5.8)."""
    size = lib.pn_data_encode(lib.pn_disposition_data(lib.pn_delivery_remote(delivery)), scratch.buffer, SCRATCH_BYTES)
    if size <= 0:
        return b"", None
    read = _read_state if size <= _SHORT_STATE_BYTES else _read_state.__wrapped__
    return read(scratch.view[0:size])


@lru_cache(maxsize=1024)
def _read_state(fields: bytes) -> tuple[bytes, Described | None]:
    decoded = codec.decode_exactly(fields)
    transaction, outcome = (*decoded, None, None)[:2] if isinstance(decoded, list) else (None, None)
    return (
        transaction if isinstance(transaction, bytes) else b"",
        outcome if isinstance(outcome, Described) else None,
    )


def settle_in(transaction: bytes, delivery: Delivery, outcome: int) -> None:
    """Settle with an outcome without fields, as a part of the transaction."""
    data = lib.pn_disposition_data(lib.pn_delivery_local(delivery))
    encoded = state_in(transaction, outcome)
    lib.pn_data_clear(data)
    lib.pn_data_decode(data, encoded, len(encoded))
    lib.pn_delivery_update(delivery, TRANSACTIONAL)
    lib.pn_delivery_settle(delivery)


@lru_cache(maxsize=1024)
def state_in(transaction: bytes, outcome: int) -> bytes:
    """The fields of a transactional-state with an outcome without fields."""
    return codec.encode([transaction, Described(ULong(outcome), [])])


def describe_in(transaction: bytes, delivery: Delivery, outcome: Described) -> None:
    """Set the fields of `TRANSACTIONAL`, for settling with it or offering it later."""
    set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction, outcome])


def declare(delivery: Delivery, transaction: bytes) -> None:
    """Answer a declare (4.5.5)."""
    set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction])
    settle(delivery, DECLARED)
