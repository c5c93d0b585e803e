"""States of sessions, and which sessions there are."""

import pytest

from broker.errors import InternalError, InvalidArgument, NotAllowed, QuotaExceeded
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.quarantine import quarantined
from storage.records import Place, encode_counts, entity_key, queue_key, session_entry_key, session_key
from storage.store import Table
from tests.partition.driver import DEAD, LOCK_MS, MAIN, Driver, deliveries, message
from tests.partition.hinted_store import HintedStore
from tests.partition.session_driver import SessionDriver


@pytest.fixture
def queue() -> SessionDriver:
    return SessionDriver()


def set_state(queue, session, state):
    queue.accept("setter", session)
    queue.of_session("set-session-state", session, state, receiver="setter")
    queue.close("setter")


def get_state(queue, session):
    queue.accept("getter", session)
    state = queue.of_session("get-session-state", session, receiver="getter")
    queue.close("getter")
    return state


def listed(queue, after_ms=None, skip=0, top=100):
    return queue.request("get-message-sessions", after_ms, skip, top)


# -- states


@pytest.mark.parametrize(("skip", "top"), [(2**63 - 1, 1), (0, 2**63 - 1), (2**64, 2**64)])
def test_a_page_of_sessions_beyond_all_bounds_is_refused(skip, top):
    queue = SessionDriver()
    queue.put("a", "1")
    for after_ms in (None, 0):
        for name in ("get-message-sessions", "page-message-sessions"):
            with pytest.raises(InvalidArgument, match="skip"):
                queue.request(name, after_ms, skip, top)


def test_a_page_of_sessions_tells_how_many_were_skipped(queue):
    for session_id in ("a", "b", "c"):
        queue.put(session_id, "1")
    for skip, skipped, page in ((0, 0, ["a", "b"]), (2, 2, ["c"]), (1, 1, ["b", "c"]), (3, 3, []), (9, 3, [])):
        assert queue.request("page-message-sessions", None, skip, 2) == (skipped, page)


def test_a_page_of_sessions_begins_behind_one_that_may_be_gone(queue):
    for session_id in ("a", "b", "d", "aa"):
        queue.put(session_id, "1")
    set_state(queue, "e", b"x")
    for behind, top, page in (
        ("a", 2, ["b", "d"]),
        ("c", 9, ["d", "e", "aa"]),
        ("", 1, ["a"]),
        ("aa", 9, []),
        ("é" * 128, 9, []),
    ):
        assert queue.request("message-sessions-behind", None, behind, top) == page
    assert queue.request("message-sessions-behind", 0, "a", 9) == ["e"]
    assert queue.request("message-sessions-behind", 0, "e", 9) == []
    for behind, top in (("a", 0), ("a", 2**63 - 1), ("é" * 1000, 1)):
        with pytest.raises(InvalidArgument):
            queue.request("message-sessions-behind", None, behind, top)
    with pytest.raises(NotAllowed):
        Driver().request("message-sessions-behind", None, "a", 1)


def test_a_session_has_no_state_until_one_is_set(queue):
    assert get_state(queue, "a") is None
    set_state(queue, "a", b"half")
    assert get_state(queue, "a") == b"half"
    assert get_state(queue, "b") is None


@pytest.mark.parametrize("nothing", [None, b""])
def test_a_state_is_replaced_and_cleared(queue, nothing):
    """Go says an empty state where others say none."""
    set_state(queue, "a", b"half")
    set_state(queue, "a", b"whole")
    assert get_state(queue, "a") == b"whole"
    set_state(queue, "a", nothing)
    assert get_state(queue, "a") is None
    for table in (Table.SESSIONS, Table.SESSION_STATES):
        assert queue.store.scan(table, b"\0", b"\xff" * 400, 10) == []
    set_state(queue, "a", nothing)
    assert queue.request("get-message-sessions", None, 0, 10) == []


def test_a_state_outlives_messages_locks_and_restarts(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.of_session("set-session-state", "a", b"half")
    queue.settle(Outcome.ACCEPTED, *queue.receive(1))
    queue.wait(LOCK_MS)
    queue.restart()
    assert get_state(queue, "a") == b"half"


def test_states_count_for_the_size_of_the_queue(queue):
    queue.put("a", "1")
    before = queue.counts()[3]
    set_state(queue, "a", b"x" * 100)
    set_state(queue, "b", b"x" * 10)
    assert queue.counts()[3] == before + 110
    set_state(queue, "a", b"x" * 30)
    assert queue.counts()[3] == queue.stored_counts().size_bytes == before + 40
    set_state(queue, "a", None)
    set_state(queue, "b", None)
    assert queue.counts()[3] == before


def test_a_state_does_not_make_the_queue_larger_than_it_may_be():
    queue = SessionDriver(max_size_mb=1)
    set_state(queue, "a", b"x" * 600_000)
    with pytest.raises(QuotaExceeded, match="maximum entity size"):
        set_state(queue, "b", b"x" * 600_000)
    queue.close("setter")
    set_state(queue, "a", b"x" * 100_000)
    set_state(queue, "b", b"x" * 600_000)
    with pytest.raises(QuotaExceeded):
        queue.put("a", "x" * 500_000)


def test_a_nearly_full_store_takes_no_larger_states_and_lets_them_be_cleared():
    queue = SessionDriver(HintedStore(capacity_bytes=20_000), PartitionSettings(store_watermark=0.5))
    set_state(queue, "a", b"x" * 12_000)
    with pytest.raises(QuotaExceeded, match="nearly full"):
        set_state(queue, "b", b"x")
    queue.close("setter")
    set_state(queue, "a", b"x" * 11_999)
    set_state(queue, "a", None)
    set_state(queue, "b", b"x")


def test_a_state_that_cannot_be_read_is_set_aside_once(queue):
    set_state(queue, "a", b"half")
    key = session_key(MAIN, b"a")
    queue.store.put(Table.SESSION_STATES, key, b"\0" * 12)
    with pytest.raises(InternalError, match="'a' cannot be read"):
        get_state(queue, "a")
    queue.close("getter")
    assert [(table, found) for table, found, _ in quarantined(queue.store)] == [(Table.SESSION_STATES, key)]
    assert get_state(queue, "a") is None
    assert queue.counts()[3] == 0
    set_state(queue, "a", b"anew")
    assert get_state(queue, "a") == b"anew"


def test_a_state_whose_row_cannot_be_read_is_replaced_and_sized_right(queue):
    set_state(queue, "a", b"x" * 50)
    queue.store.put(Table.SESSIONS, session_key(MAIN, b"a"), b"\0")
    assert listed(queue) == ["a"]
    assert get_state(queue, "a") == b"x" * 50
    set_state(queue, "a", b"x" * 5)
    assert queue.counts()[3] == 5


def test_counts_made_anew_know_the_states(queue):
    queue.put("a", "1")
    set_state(queue, "a", b"x" * 50)
    size_bytes = queue.counts()[3]
    queue.store.put(Table.COUNTS, entity_key(MAIN), encode_counts(queue.stored_counts())[:-1] + b"?")
    queue.store.commit()
    queue.restart()
    assert queue.counts()[3] == size_bytes


# -- which there are


def test_sessions_with_messages_or_state_are_listed_once(queue):
    queue.put("b", "1", "2")
    queue.put("a", "3")
    queue.put("later", "4", scheduled_ms=queue.now_ms + 100)
    set_state(queue, "b", b"x")
    set_state(queue, "kept", b"x")
    queue.accept("r", "locked")
    assert listed(queue) == ["a", "b", "kept"]
    queue.accept("s", "a")
    [one] = queue.receive(1, "s")
    assert listed(queue) == ["a", "b", "kept"]
    queue.settle(Outcome.ACCEPTED, one)
    assert listed(queue) == ["b", "kept"]


def test_sessions_are_listed_by_when_their_state_was_set(queue):
    queue.put("messages", "1")
    set_state(queue, "old", b"x")
    queue.now_ms += 1
    set_state(queue, "new", b"x")
    assert listed(queue, queue.now_ms - 1) == ["new"]
    assert listed(queue, queue.now_ms - 2) == ["new", "old"]
    assert listed(queue, queue.now_ms) == []
    queue.now_ms += 1
    set_state(queue, "old", b"y")
    assert listed(queue, queue.now_ms - 1) == ["old"]


def test_nothing_is_listed_where_there_is_nothing(queue):
    assert listed(queue) == []
    assert listed(queue, 0) == []


def test_sessions_are_listed_page_by_page(queue):
    for at in range(7):
        queue.put(f"s{at}", "1")
        if at % 2:
            set_state(queue, f"s{at}", b"x")
    set_state(queue, "s", b"x")
    names = ["s", *[f"s{at}" for at in range(7)]]
    assert [listed(queue, None, skip, 3) for skip in (0, 3, 6, 8)] == [names[:3], names[3:6], names[6:], []]
    assert listed(queue, None, 2, 3) == names[2:5]  # not where another page ended
    assert [listed(queue, 0, skip, 2) for skip in (0, 2, 4)] == [["s", "s1"], ["s3", "s5"], []]


def test_a_page_goes_on_where_the_last_one_ended_though_sessions_went(queue):
    for at in range(6):
        queue.put(f"s{at}", "1")
    assert listed(queue, None, 0, 3) == ["s0", "s1", "s2"]
    for session in ("s0", "s1"):
        queue.request("delete-batch", 1, queue.now_ms + 1, session)
    assert listed(queue, None, 3, 3) == ["s3", "s4", "s5"]


@pytest.mark.parametrize(("skip", "top"), [(-1, 1), (0, 0), (0, -1)])
def test_a_page_that_makes_no_sense_is_refused(queue, skip, top):
    with pytest.raises(InvalidArgument):
        listed(queue, None, skip, top)


# -- browsing


def test_a_session_is_browsed_without_its_lock_and_in_all_places(queue):
    queue.put("a", "1", "2", "3")
    queue.put("b", "4")
    queue.put("a", "5", scheduled_ms=queue.now_ms + 100)
    queue.accept("r", "a")
    one, _ = queue.receive(2)
    queue.settle(Outcome.DEFERRED, one)
    found = deliveries(queue.request("peek-session", "a", 0, 100, 1 << 20))
    assert [(d.body, d.place) for d in found] == [
        (b"1", Place.DEFERRED),
        (b"2", Place.AVAILABLE),
        (b"3", Place.AVAILABLE),
        (b"5", Place.SCHEDULED),
    ]
    assert [d.body for d in deliveries(queue.request("peek-session", "a", 3, 1, 1 << 20))] == [b"3"]
    assert queue.request("peek-session", "c", 0, 100, 1 << 20) == []
    assert [d.body for d in queue.peek()] == [b"1", b"2", b"3", b"4", b"5"]


# -- what cannot be read


def test_an_unreadable_message_of_a_session_is_set_aside_and_the_rest_is_received(queue):
    queue.put("a", "1", "2", "3", "4")
    queue.put("b", "5")
    queue.store.put(Table.QUEUE, queue_key(MAIN, Place.AVAILABLE, 1), b"\0" * 16)
    queue.store.put(Table.MESSAGES, (3).to_bytes(8, "big"), b"\0" * 60)
    queue.store.delete(Table.MESSAGES, (5).to_bytes(8, "big"))
    assert queue.accept("r") == "a"
    assert queue.bodies_for("r") == ["2", "4"]
    assert queue.held()[0] == 3
    assert queue.accept("s") == "b"
    assert queue.bodies_for("s") == []
    queue.close("s")
    assert queue.accept("s") is None
    # What the unreadable entry was listed under is not known; it goes when somebody comes across it.
    assert queue.listed() == [(Place.AVAILABLE, "a", 1), (Place.AVAILABLE, "a", 2), (Place.AVAILABLE, "a", 4)]
    queue.close("r")
    assert queue.accept("r", "a") == "a"
    queue.receive(2)
    assert queue.listed() == [(Place.AVAILABLE, "a", 2), (Place.AVAILABLE, "a", 4)]


def test_a_listing_without_its_message_offers_nothing(queue):
    queue.put("b", "1")
    queue.store.put(Table.SESSION_ENTRIES, session_entry_key(MAIN, Place.AVAILABLE, b"a", 7), b"")
    queue.store.commit()
    queue.restart()
    assert queue.offered() == ["b"]
    assert queue.listed() == [(Place.AVAILABLE, "b", 1)]


def test_a_message_set_aside_while_its_session_is_received_is_not_handed_out(queue):
    queue.put("a", "1", "2", "3")
    queue.accept("r", "a")
    [one] = queue.receive(1)  # the others are in memory now
    queue.store.put(Table.QUEUE, queue_key(MAIN, Place.AVAILABLE, 2), b"\0" * 16)
    assert [d.body for d in queue.peek()] == [b"1", b"3"]
    queue.settle(Outcome.RELEASED, one)
    assert queue.bodies_for("r") == ["1", "3"]


def test_peeking_at_an_unreadable_body_takes_it_out_of_its_session(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.receive(0)
    queue.store.put(Table.MESSAGES, (1).to_bytes(8, "big"), b"\0" * 60)
    assert [d.body for d in deliveries(queue.request("peek-session", "a", 0, 10, 1 << 20))] == [b"2"]
    assert queue.listed() == [(Place.AVAILABLE, "a", 2)]
    assert queue.bodies_for("r") == ["2"]


def test_scheduled_and_deferred_messages_that_cannot_be_read_are_set_aside(queue):
    [number] = queue.request("schedule", [message("1", session_id="a", scheduled_ms=queue.now_ms + 50)])
    queue.store.put(Table.QUEUE, queue_key(MAIN, Place.SCHEDULED, number), b"\0" * 16)
    queue.put("a", "2")
    queue.wait(50)
    assert queue.accept("r") == "a"
    assert queue.bodies_for("r") == ["2"]
    assert queue.counts(DEAD) == [0, 0, 0, 0, 0]
    assert queue.partition.tallies()[MAIN]["quarantined"] == 1
