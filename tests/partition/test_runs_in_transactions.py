"""A run that is sent in a transaction is a part of it as its messages are when they come one by one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BrokerError
from broker.partition.settings import PartitionSettings
from broker.partition.transactions import MAX_MESSAGES
from broker.wire import Operation, Outcome, SendOperation, SendRunOperation, SettleOperation
from protocol.message.intake import take_apart
from storage.store import Table
from tests.partition.driver import MAIN, Driver, deliveries, run
from tests.partition.test_runs import IDS, KINDS, SESSIONS, TTLS_MS, encoded

OTHER_ID = 9
KEY = "transaction"
MESSAGES = st.lists(st.tuples(IDS, SESSIONS, st.sampled_from(["s", "s" * 200]), TTLS_MS), min_size=1, max_size=5)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), MESSAGES),
        st.tuples(st.just("many"), st.booleans(), st.sampled_from([MAX_MESSAGES - 1, MAX_MESSAGES, MAX_MESSAGES + 1])),
        st.tuples(st.just("settle"), st.booleans(), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("wait"), st.booleans(), st.sampled_from([1000, 61_000])),
        st.tuples(st.just("full"), st.booleans(), st.just(0)),
    ),
    max_size=6,
)


def sent(queue: int, messages: list[Any], quiet: bool, in_runs: bool) -> Operation:
    if in_runs:
        return SendRunOperation(queue, quiet, len(messages), run(messages))
    return SendOperation(queue, quiet, [[message] for message in messages])


def outcome_of(queue: Driver, properties: dict[str, Any], steps: list[Any], commit: bool, in_runs: bool) -> list[Any]:
    """What callers are told, what is stored and counted, and what is received afterwards."""
    other = queue.add_queue(OTHER_ID)
    session = ["a", 0] if properties.get("requires_session") else None
    first = [take_apart(encoded(f"first {number}", "a", "s", None), want_message_id=True) for number in range(6)]
    queue.partition.send(MAIN, first, queue.now_ms)
    queue.partition.open_receiver("r", MAIN, False, queue.now_ms, session)
    queue.partition.grant("r", 8)
    queue.partition.advance(queue.now_ms)
    tokens = [each.token for _, _, items in queue.partition.pump(queue.now_ms).deliveries for each in deliveries(items)]
    assert len(tokens) == 6
    queue.partition.commit()
    told: list[Any] = []
    begins = True
    for kind, is_other, what in steps:
        if kind == "wait":
            queue.now_ms += what
            queue.partition.advance(queue.now_ms)
            continue
        if kind == "full":
            queue.change(status="SendDisabled")
            continue
        operation: Operation
        if kind == "settle":
            named = [tokens[each] if each < len(tokens) else b"no such token, %d" % each for each in what]
            operation = SettleOperation(MAIN, is_other, named, Outcome.ACCEPTED, None, "r")
        else:
            subjects = [("id", "a", "s" * 250, None)] * what if kind == "many" else what
            messages = [list(take_apart(encoded(*each), want_message_id=True)) for each in subjects]
            operation = sent(other if is_other and session is None else MAIN, messages, is_other, in_runs)
        try:
            told.append(queue.partition.transact(KEY, begins, [operation], queue.now_ms))
        except BrokerError as error:
            told.append(str(error))
        begins = False
    try:
        queue.partition.discharge(KEY, commit, queue.now_ms)
    except BrokerError as error:
        told.append(str(error))
    queue.partition.advance(queue.now_ms)
    pumped = [(to, deliveries(items)) for to, _, items in queue.partition.pump(queue.now_ms).deliveries]
    queue.partition.commit()
    queue.partition.check()
    stored = {table: queue.store.scan(table, b"", b"\xff" * 40, 1000) for table in Table if table != Table.META}
    bodies = [(to, [(each.number, each.body) for each in found]) for to, found in pumped]
    return [told, queue.partition.tallies(), bodies, stored]


@pytest.mark.parametrize("properties", KINDS, ids=lambda each: "+".join(each) or "plain")
@given(OPERATIONS, st.booleans())
def test_a_run_in_a_transaction_is_as_its_messages_are(properties, steps, commit):
    ends = [outcome_of(Driver(**properties), properties, steps, commit, in_runs) for in_runs in (False, True)]
    assert ends[0] == ends[1]


@given(OPERATIONS, st.booleans(), st.integers(0, 3000))
def test_a_run_that_memory_cannot_hold_is_stored_before_the_commit(steps, commit, commit_bytes):
    ends = []
    for in_runs in (False, True):
        queue = Driver()
        queue.restart(PartitionSettings(commit_bytes=commit_bytes))
        told, tallies, bodies, _ = outcome_of(queue, {}, steps, commit, in_runs)
        ends.append([told, tallies, bodies])
    assert ends[0] == ends[1]


@given(OPERATIONS, st.integers(0, 30_000), st.integers(0, 30_000))
def test_what_the_limits_of_bytes_allow_of_a_run_is_taken(steps, of_connection, of_all):
    ends = []
    for in_runs in (False, True):
        queue = Driver()
        queue.restart(PartitionSettings(connection_transaction_bytes=of_connection, transaction_bytes=of_all))
        ends.append(outcome_of(queue, {}, steps, True, in_runs))
    assert ends[0] == ends[1]
