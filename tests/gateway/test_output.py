"""Output is accounted for before it is written, and takes no memory that it need not."""

from typing import Any

import pytest

from broker.gateway.output import Output


class Record:
    """What a transport and the account of unsent output are told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.kept_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("add", "add_pieces", "skip", "write"):
            return lambda data: self.told.append((name, list(data) if isinstance(data, list) else data))
        raise AttributeError(name)


class Telling(Record):
    waiting = 0

    def get_write_buffer_size(self) -> int:
        return self.waiting


class Silent(Record):
    """A transport of uvloop or of a test."""

    def get_write_buffer_size(self) -> int:
        raise NotImplementedError


def output(record: Any) -> Output:
    return Output(record, record)


def test_frames_are_written_after_they_are_accounted_for() -> None:
    record = Record()
    assert output(record).write(b"frames") == 6
    assert record.told == [("add", b"frames"), ("write", b"frames")]


def test_pieces_are_written_one_by_one_and_let_go() -> None:
    record = Record()
    pieces = [memoryview(b"one"), memoryview(b"two!")]
    expected = [("add_pieces", list(pieces)), *(("write", piece) for piece in pieces)]
    assert output(record).write(pieces) == 7
    assert record.told == expected
    assert pieces == []


def test_what_is_no_frame_moves_the_position_only() -> None:
    record = Record()
    output(record).write_other(b"AMQP")
    assert record.told == [("skip", 4), ("write", b"AMQP")]


@pytest.mark.parametrize(("waiting", "kept", "held"), [(0, 0, 0), (5, 3, 5), (3, 5, 5)])
def test_what_waits_is_kept_and_counts_once(waiting: int, kept: int, held: int) -> None:
    record = Telling()
    record.waiting, record.kept_bytes = waiting, kept
    assert output(record).waiting_bytes() == waiting
    assert output(record).held_bytes() == held


@pytest.mark.parametrize("transport", [Record, Silent])
def test_of_a_transport_that_does_not_tell_only_what_is_kept_counts(transport: type[Record]) -> None:
    record = transport()
    record.kept_bytes = 5
    assert output(record).waiting_bytes() == 0
    assert output(record).held_bytes() == 5
