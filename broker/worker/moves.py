"""Moves of plain entities to other partitions, as the namespace's home sees them.

A gateway leads a move (`broker.gateway.moving`). The home says what is to be moved, and in the end decides: see
`BeginMove`, `EndMove` and `CancelMove` of `broker.catalog.changes`.

The entity is frozen before the end, and stays so until its partition hears the decision, or has connected to the home
anew. So a move is given up here as soon as the gateway, or one of the two partitions, has lost its connection; then
the end is refused. A restart of the home gives up all of them, because the others connect anew.
"""

import os
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from broker.catalog.catalog import Definition
from broker.errors import InvalidArgument, NotAllowed, ServerBusy

TOKEN_BYTES = 16

C = TypeVar("C", bound=Hashable)


class Move(NamedTuple, Generic[C]):
    caller: C  # the gateway
    entity_id: int
    partitions: tuple[int, int]  # from the first to the second


class Moves(Generic[C]):
    """The moves that have begun, by their tokens."""

    def __init__(self) -> None:
        self._moves: dict[bytes, Move[C]] = {}

    def begin(self, caller: C, of: Definition, to: object, partition_count: int) -> tuple[bytes, Move[C]]:
        """Begin a move to this partition. Returns its token. Raises InvalidArgument, NotAllowed, ServerBusy."""
        path = of.description.path
        if type(to) is not int or not 0 <= to < partition_count:
            raise InvalidArgument(f"'partition' is {to!r}; it must be 0 to {partition_count - 1}.")
        if of.description.kind == "subscription":
            raise NotAllowed(f"'{path}' is a subscription; it is moved with its topic.")
        if len(of.partitions) != 1:
            raise NotAllowed(f"'{path}' is partitioned: it is on several partitions already.")
        if of.partitions[0] == to:
            raise InvalidArgument(f"'{path}' is on partition {to} already.")
        self.require_none([of.entity_id], path)
        token, move = os.urandom(TOKEN_BYTES), Move(caller, of.entity_id, (of.partitions[0], to))
        self._moves[token] = move
        return token, move

    def end(self, token: object) -> Move[C]:
        """It does not go on any more, whether it is done or given up. Raises InvalidArgument."""
        found = self._moves.pop(token, None) if isinstance(token, bytes) else None
        if found is None:
            raise InvalidArgument("The move has ended. Please try again.")
        return found

    def require_none(self, entity_ids: Collection[int], path: str) -> None:
        """Refuse a change while one of these entities is being moved, because definitions must not change then.

        Raises ServerBusy.
        """
        if any(move.entity_id in entity_ids for move in self._moves.values()):
            raise ServerBusy(f"'{path}' is being moved to another partition. Please try again.")

    def forget(self, entity_ids: Collection[int]) -> None:
        """These entities are deleted."""
        self._drop(token for token, move in self._moves.items() if move.entity_id in entity_ids)

    def left(self, caller: C, partitions: Collection[int]) -> list[Move[C]]:
        """The caller, which has these partitions, is gone. Returns the moves that are given up."""
        return self._drop(
            token
            for token, move in self._moves.items()
            if move.caller == caller or not set(move.partitions).isdisjoint(partitions)
        )

    def end_all(self) -> list[Move[C]]:
        """They are given up."""
        return self._drop(self._moves)

    def _drop(self, tokens: Iterable[bytes]) -> list[Move[C]]:
        return [self._moves.pop(token) for token in list(tokens)]
