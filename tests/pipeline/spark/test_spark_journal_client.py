"""The client of the journal against a server with faults; no Spark."""

import itertools
import threading
import time

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

from hypothesis import given
from hypothesis import strategies as st

from protocol.client.messages import Message, value_section
from protocol.codec import Byte, Int, Long, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from protocol.extension import extension
from pyspark_peeklock import records
from pyspark_peeklock.errors import (
    AnotherEpoch,
    InvalidOption,
    JournalRefused,
    JournalUnreachable,
    OutOfRetention,
)
from pyspark_peeklock.journal_client import Endpoint, JournalClient, parsed_url
from pyspark_peeklock.options import Access
from pyspark_peeklock.parts import OffsetRange
from tests.pipeline.spark.faulty_journal import EPOCH, Journal, JournalServer, Partition, message_of, record_of, rows


@pytest.fixture
def journal(tmp_path):
    tables = [rows(0, 0, 300), rows(0, 300, 200, "invoices/subscriptions/a")]
    return Journal({0: Partition(pa.concat_tables(tables)), 3: Partition(rows(3, 0, 10))})


@pytest.fixture
def client(journal, tmp_path):
    with JournalServer(journal) as server:
        client = client_of(tmp_path, server.url)
        yield client
        client.close()


def client_of(tmp_path, url, timeout_s=5.0):
    path = tmp_path / "secret"
    path.write_text("Endpoint=sb://localhost;SharedAccessKeyName=n;SharedAccessKey=k;UseDevelopmentEmulator=true")
    return JournalClient(Endpoint(Access(str(path), None), url, timeout_s))


def offsets(client, first, end, partition=0, epoch=EPOCH, entity=None):
    found = client.batches(OffsetRange(partition, epoch, first, end), entity=entity, records=False)
    return [offset for batch in found for offset in batch.column("journalOffset").to_pylist()]


def test_partitions_are_listed(client):
    namespace, states = client.states()
    assert (namespace, list(states), states[0].stable, states[3].low) == ("ns", [0, 3], 500, 0)


def test_a_range_comes_in_order_and_once(client, journal):
    assert offsets(client, 7, 487) == list(range(7, 487))
    assert offsets(client, 5, 5) == []
    journal.max_rows = 33  # the endpoint may end an answer early
    assert offsets(client, 0, 500) == list(range(500))
    assert offsets(client, 0, 10, partition=3) == list(range(10))


def test_after_an_answer_with_rows_the_next_is_asked_for_at_once(client, journal, monkeypatch):
    pauses = []
    here = threading.get_ident()  # other threads of this process sleep as well
    really = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: pauses.append(s) if threading.get_ident() == here else really(s))
    journal.max_rows = 33
    assert offsets(client, 0, 500) == list(range(500))
    assert offsets(client, 0, 500, entity="inv*") == list(range(300, 500))
    assert pauses == []


def test_only_entities_that_fit_are_read(client, journal):
    journal.max_rows = 70
    assert offsets(client, 0, 500, entity="inv*") == list(range(300, 500))
    assert offsets(client, 0, 500, entity="nothing") == []


@pytest.mark.parametrize("fault", ["cut", "cut between", "slow", "length", 500, 503, 429])
def test_after_a_fault_it_goes_on_behind_the_last_row(client, journal, fault):
    journal.faults += [fault, fault]
    assert offsets(client, 0, 500) == list(range(500))
    asked = [first for _, first, _, _ in journal.requests]
    # The last batch is cut off, then the only one of each further answer.
    expected = {"cut": [0, 400, 400], "cut between": [0, 400, 400], "slow": [0], "length": [0]}
    assert asked == expected.get(fault, [0, 0, 0])


def test_with_a_pattern_a_cut_between_batches_is_noticed(client, journal):
    journal.faults += ["cut between"]
    assert offsets(client, 0, 500, entity="*") == list(range(500))
    assert len(journal.requests) == 2


def test_rows_that_are_missing_or_out_of_order_are_not_taken(tmp_path):
    table = pa.concat_tables([rows(0, 0, 5), rows(0, 6, 5)])
    for broken in (table, table.take(list(range(9, -1, -1)))):
        with JournalServer(Journal({0: Partition(broken)})) as server:
            client = client_of(tmp_path, server.url, 0.1)
            with pytest.raises(JournalUnreachable, match=r"rows are missing|out of order"):
                offsets(client, 0, 10)


def test_what_is_out_of_retention_is_named(client, journal):
    journal.partitions[0].low = 100
    with pytest.raises(OutOfRetention, match="needs offset 7, and the journal has 100 to 500") as caught:
        offsets(client, 7, 200)
    assert (caught.value.first, caught.value.low, caught.value.stable) == (7, 100, 500)


def test_offsets_above_the_end_are_waited_for(client, journal):
    """An endpoint that has just started may not have read all of its files."""
    whole = journal.partitions[0]
    few = journal.partitions[0] = Partition(whole.table.slice(0, 5))

    class Growing(list):
        def append(self, request):
            if len(self) == 2:
                few.table = whole.table
            super().append(request)

    journal.requests = Growing()
    assert offsets(client, 10, 20) == list(range(10, 20))
    assert len(journal.requests) == 3


def test_offsets_that_never_come_end_in_an_error(journal, tmp_path):
    with JournalServer(journal) as server, pytest.raises(OutOfRetention, match="the journal has 0 to 500"):
        offsets(client_of(tmp_path, server.url, 0.3), 501, 510)


def test_another_epoch_is_named(client):
    with pytest.raises(AnotherEpoch, match=f"epoch ffff, and the journal now has epoch {EPOCH}"):
        offsets(client, 0, 10, epoch="ffff")


def test_what_a_repetition_does_not_change_is_said_at_once(client, journal):
    journal.token = "other"
    with pytest.raises(JournalRefused, match="401 Unauthorized: no token"):
        client.states()
    journal.token = ""
    with pytest.raises(JournalRefused, match="404 Not Found: no such partition"):
        offsets(client, 0, 10, partition=1)


def test_a_refusal_has_the_text_for_users(client, journal):
    journal.token = "other"
    journal.refusal = (
        b"<Error><Code>401</Code><Detail>SubCode=40100. No right for &lt;orders&gt;. TrackingId:1_G0, "
        b"Timestamp:2026-01-31T07:30:00</Detail></Error>"
    )
    with pytest.raises(JournalRefused, match=r"401 Unauthorized: No right for <orders>\.$"):
        client.states()


def test_an_authority_that_is_none_is_refused_also_without_tls(tmp_path):
    (tmp_path / "secret").write_text("Endpoint=sb://h;UseDevelopmentEmulator=true")
    access = Access(str(tmp_path / "secret"), "/dev/null")
    with pytest.raises(InvalidOption, match="option 'caFile': /dev/null"):
        Endpoint(access, "http://h", 1).connect()


def test_an_endpoint_that_is_away_is_named(tmp_path):
    with pytest.raises(JournalUnreachable, match=r"nothing has come for 0 s .*Connection refused"):
        client_of(tmp_path, "http://127.0.0.1:9", 0.2).states()


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:5300", "ftp://h", "http://h/path", "http://", "http://h:99999", "//[::1", "http://h:0"),
        *("http://h#part", "http://two words", "http://a..b", f"http://{'a' * 64}", "http://user:key@h"),
    ],
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(InvalidOption, match="httpEndpoint"):
        parsed_url(url)


def test_records_become_bodies_and_properties():
    made = [
        message_of(1),
        None,
        record_of(Message.of(b"")),
        record_of(Message.of(b"x" * 300, annotations={"a": 1}, message_id="i")),
        record_of(Message.of(b"", subject="s" * 300, to="somewhere", reply_to="q", correlation_id="c")),
        record_of(Message(value_section("text"))),
        record_of(Message(value_section([1]))),
    ]
    found = columns_of(made)
    assert found["body"] == [b"body 1", None, b"", b"x" * 300, b"", b"text", None]
    assert found["applicationProperties"] == [[("n", "1")], None, [], [], [], [], []]
    assert found["replyTo"] == ["r", None, None, None, "q", None, None]
    assert list(columns_of(made, frozenset({"body"}))) == ["body"]


def columns_of(stored, wanted=records.COLUMNS, states=()):
    """By the extension if there is one, and by Python, which must be the same."""
    found = records.columns_of(stored, wanted, states)
    # A slice, so that the array does not begin where its buffers do.
    column = pa.array([b"before", None, *stored, b"behind"], pa.binary()).slice(2, len(stored))
    arrays = records.arrays_of(column, wanted, states)
    for array in arrays.values():
        array.validate(full=True)
    assert {name: array.to_pylist() for name, array in arrays.items()} == found
    return found


VALUES = (
    st.none()
    | st.booleans()
    | st.text(max_size=300)
    | st.binary(max_size=5)
    | st.floats(allow_nan=False)
    | st.uuids()
    | st.text("abc", max_size=3).map(Symbol)
    | st.one_of(
        *(
            st.integers(*bounds).map(kind)
            for kind, bounds in {
                UByte: (0, 255), UShort: (0, 65535), UInt: (0, (1 << 32) - 1), ULong: (0, (1 << 64) - 1),
                Byte: (-128, 127), Short: (-32768, 32767), Int: (-(1 << 31), (1 << 31) - 1),
                Long: (-(1 << 63), (1 << 63) - 1), Timestamp: (-(1 << 63), (1 << 63) - 1),
            }.items()
        )
    )
)  # fmt: skip


@given(
    st.lists(
        st.none()
        | st.builds(
            dict,
            body=st.binary(max_size=300) | st.text(max_size=5).map(value_section) | st.just(value_section([1])),
            reply_to=st.none() | st.text(max_size=300),
            application_properties=st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
            | st.just({str(number): number for number in range(65)}),
        ),
        max_size=5,
    )
)
def test_records_of_any_messages_are_the_same_columns_in_both_ways(messages):
    made = []
    for each in messages:
        if each is None:
            made.append(None)
            continue
        body, rest = each["body"], {name: value for name, value in each.items() if name != "body"}
        made.append(record_of(Message.of(body, **rest) if isinstance(body, bytes) else Message(body, **rest)))
    columns_of(made)
    columns_of([*made, b"half way"], states=[len(made)])


def test_records_of_only_what_is_wanted():
    made = [message_of(number) for number in range(20)]
    for names in itertools.chain.from_iterable(itertools.combinations(sorted(records.COLUMNS), n) for n in range(1, 4)):
        assert columns_of(made, frozenset(names)).keys() == set(names)
    assert records.arrays_of(pa.array([], pa.binary()), records.COLUMNS)["body"].to_pylist() == []


def test_buffers_that_are_too_small_are_refused():
    if extension is None:
        pytest.skip("there is no extension")
    column = pa.array([b"abc", None, b"d"], pa.binary())
    validity, places, data = column.buffers()
    for arguments in (
        (validity, places, data, 0, 99, 1),
        (validity, places, data, -1, 1, 1),
        (validity, b"", data, 0, 0, 1),
        (b"", places, data, 0, 3, 1),
        (validity, places, b"ab", 0, 3, 1),
        (validity, bytes(4) + b"\xff" * 4, data, 0, 1, 1),
    ):
        with pytest.raises(ValueError, match="not the buffers"):
            extension.record_columns(*arguments)


def test_states_of_sessions_are_bodies():
    stored = [b"half way", message_of(1), b"", None]
    found = columns_of(stored, states=[0, 2])
    assert found["body"] == [b"half way", b"body 1", b"", None]
    assert found["applicationProperties"] == [None, [("n", "1")], None, None]
    assert list(columns_of(stored, frozenset({"replyTo"}), [0, 2])["replyTo"]) == [None, "r", None, None]


def test_a_broken_record_is_an_error_and_nothing_else():
    whole = message_of(1)
    for end in range(len(whole)):
        try:
            columns_of([whole[:end]])
        except JournalRefused as error:
            assert "record" in str(error)  # noqa: PT017 - some cuts leave a record that can be read
            refuses(whole[:end])
    for at, value in itertools.product(range(24, len(whole)), (0, 0x7F, 0xFF)):
        broken = whole[:at] + bytes([value]) + whole[at + 1 :]
        try:
            columns_of([broken])
        except JournalRefused:
            refuses(broken)


def refuses(broken):
    with pytest.raises(JournalRefused, match="record"):
        records.arrays_of(pa.array([broken]), records.COLUMNS)
