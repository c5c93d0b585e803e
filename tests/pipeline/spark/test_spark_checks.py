"""What is refused before a row is sent or read: options, schemas, and rows by their columns. No Java."""

import pytest

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

from pyspark.sql import types as t

from protocol.client.messages import Message
from pyspark_peeklock.encoding import sections, too_large, unfit
from pyspark_peeklock.errors import InvalidOption, UnfitRow, UnfitSchema
from pyspark_peeklock.options import Access, BrowseOptions, JournalOptions, Options, SinkOptions
from pyspark_peeklock.sink import checked_columns

TEXT, BINARY, TIME = t.StringType(), t.BinaryType(), t.TimestampType()
SECRET = {"connectionStringFile": "/secret"}


def struct(**columns):
    return t.StructType([t.StructField(name, kind) for name, kind in columns.items()])


def sink(**options):
    return SinkOptions.of(Options({**SECRET, **options}))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"messageId": TEXT}, "column 'body' is missing"),
        ({"body": t.IntegerType(), "messageId": TEXT}, "column 'body' must be binary or string, not int"),
        ({"body": TEXT, "mesageId": TEXT}, "has no column 'mesageId'; did you mean 'messageId'"),
        ({"body": TEXT, "messageId": TEXT, "zzz": TEXT}, "has no column 'zzz'; drop it"),
        (
            {"body": TEXT, "messageId": TEXT, "applicationProperties": t.MapType(TEXT, t.LongType())},
            "map<string,string>",
        ),
        ({"body": TEXT, "messageId": TEXT, "scheduledTime": TEXT}, "'scheduledTime' must be timestamp, not string"),
        ({"body": TEXT, "messageId": t.LongType()}, "column 'messageId' must be string"),
        ({"body": TEXT}, "set option idFromPosition=queryId/batch/partition/row"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns, message):
    with pytest.raises(UnfitSchema, match=message):
        checked_columns(struct(**columns), sink(entity="q"))


def test_names_of_columns_are_in_any_case():
    names = checked_columns(struct(BODY=TEXT, messageid=TEXT, TARGETentity=TEXT, LockedUntil=TIME), sink())
    assert names == {"body": "BODY", "messageId": "messageid", "targetEntity": "TARGETentity"}
    whole = sink(entity="q", sendAmqpMessage="true")
    assert checked_columns(struct(AMQPMESSAGE=BINARY), whole) == {"amqpMessage": "AMQPMESSAGE"}
    placed = struct(amqpMessage=BINARY, partition=t.IntegerType(), journalOffset=t.LongType())
    assert list(checked_columns(placed, whole)) == ["amqpMessage", "partition", "journalOffset"]
    with pytest.raises(UnfitSchema, match="columns 'Body' and 'body' are both 'body'"):
        checked_columns(struct(Body=TEXT, body=TEXT, messageId=TEXT), sink(entity="q"))


def test_a_target_is_needed_and_is_not_the_entity_that_a_row_came_from():
    plain = {"body": TEXT, "messageId": TEXT}
    with pytest.raises(UnfitSchema, match="where to"):
        checked_columns(struct(**plain), sink())
    assert checked_columns(struct(**plain, entity=TEXT), sink())["targetEntity"] == "entity"
    of_journal = {
        "body": BINARY,
        "namespace": TEXT,
        "entity": TEXT,
        "partition": t.IntegerType(),
        "journalOffset": t.LongType(),
    }
    with pytest.raises(UnfitSchema, match="where to"):
        checked_columns(struct(**of_journal), sink())
    names = checked_columns(struct(**of_journal, targetEntity=TEXT, lockedUntil=TIME), sink())
    assert (names["targetEntity"], names["entity"]) == ("targetEntity", "entity")
    assert "lockedUntil" not in names


@pytest.mark.parametrize(
    ("read", "options", "message"),
    [
        (SinkOptions, {}, "option 'connectionStringFile' is missing"),
        (SinkOptions, {**SECRET, "ConnectionString": "Endpoint=sb://x"}, "credentials are no option values"),
        (SinkOptions, {**SECRET, "sharedAccessKey": "x"}, "credentials are no option values"),
        (SinkOptions, {**SECRET, "maxInFlights": "3"}, "did you mean 'maxInFlight'"),
        (SinkOptions, {**SECRET, "maxInFlight": "0"}, "'maxInFlight' may be a whole number from 1 to 1000, not '0'"),
        (SinkOptions, {**SECRET, "maxInFlight": "9" * 5000}, "'maxInFlight' may be"),
        (SinkOptions, {**SECRET, "maxInFlight": "\u0663"}, "'maxInFlight' may be"),
        (SinkOptions, {**SECRET, "maxInFlight": "1".zfill(20) + "0" * 9}, "'maxInFlight' may be .* to 1000, not '0000"),
        (SinkOptions, {**SECRET, "maxInFlight": "1".zfill(20) + "0" * 5000}, "'maxInFlight' may be"),
        (SinkOptions, {**SECRET, "entity": " "}, "'entity' is empty: give it a value, or leave it out"),
        (JournalOptions, {**SECRET, "entity": ""}, "'entity' is empty"),
        (JournalOptions, {**SECRET, "entity": "a\0b"}, "'entity' has characters that are no text"),
        (JournalOptions, {**SECRET, "capturePath": "/a\ud800"}, r"'capturePath' has .* no text: '/a\\ud800'"),
        (JournalOptions, {**SECRET, "entity": "x" * 1025}, "'entity' may be a pattern of 1 to 1024 printable"),
        (JournalOptions, {**SECRET, "entity": "a\tb"}, "'entity' may be a pattern"),
        (JournalOptions, {**SECRET, "startingOffsetsByTimestamp": '{"0_0": 1}'}, "may be JSON such as"),
        (JournalOptions, {**SECRET, "startingOffsetsByTimestamp": '{"-1": 1}'}, "may be JSON such as"),
        (JournalOptions, {**SECRET, "group.id": "x"}, "is of another source, .*: Spark's checkpoint is the position"),
        (JournalOptions, {**SECRET, "maxEventsPerTrigger": "5"}, "another source, .* maxMessagesPerTrigger bounds"),
        (JournalOptions, {**SECRET, "eventhubs.connectionString": "x"}, "credentials are no option values"),
        (SinkOptions, {**SECRET, "idFromPosition": "true"}, "may be queryId/batch/partition/row, not 'true'"),
        (BrowseOptions, SECRET, "option 'entity' is missing"),
        (BrowseOptions, {**SECRET, "entity": "q", "subQueue": "dead"}, "'subQueue' may be active or deadletter"),
        (JournalOptions, {**SECRET, "endingOffsets": "earliest"}, "option 'endingOffsets'"),
        (JournalOptions, {**SECRET, "startingTimestamp": "yesterday"}, "'startingTimestamp' may be a time such as"),
        (JournalOptions, {**SECRET, "startingTimestamp": "9" * 30}, "'startingTimestamp' may be a time such as"),
        (JournalOptions, {**SECRET, "startingTimestamp": "1", "startingOffsets": "latest"}, "cannot both be given"),
        (JournalOptions, {**SECRET, "maxMessagePerTrigger": "5"}, "did you mean 'maxMessagesPerTrigger'"),
        (JournalOptions, {**SECRET, "consumerName": "copier"}, "'consumerName' is for streams"),
        (JournalOptions, {**SECRET, "subscribe": "orders"}, "is of Spark's source for Kafka, .* with option entity"),
        (JournalOptions, {**SECRET, "kafka.bootstrap.servers": "h:1"}, "Kafka, .* named with connectionStringFile"),
        (JournalOptions, {**SECRET, "fetchOffset.numRetries": "3"}, "Kafka, and is not here: retryTimeoutSeconds"),
        (
            JournalOptions,
            {**SECRET, "maxOffsetsPerTrigger": "3"},
            "'maxOffsetsPerTrigger' is for streams of mode=journal",
        ),
        (
            JournalOptions,
            {**SECRET, "subQueue": "active"},
            "'subQueue' is for mode=browse, and does not count for batch",
        ),
        (JournalOptions, {**SECRET, "batchBytes": "5000"}, "'batchBytes' is for writing"),
        (JournalOptions, {**SECRET, "startingTimestamp": "1", "startingOffsetsByTimestamp": "{}"}, "cannot both be"),
        (JournalOptions, {**SECRET, "startingOffsetsByTimestamp": "[1]"}, "may be JSON such as"),
        (
            JournalOptions,
            {**SECRET, "endingOffsetsByTimestamp": '{"0": "soon"}'},
            "'endingOffsetsByTimestamp' may be a",
        ),
        (JournalOptions, {**SECRET, "endingOffsets": "latest", "endingTimestamp": "1"}, "cannot both be given"),
        (JournalOptions, {**SECRET, "startingTimestamp": "2", "endingTimestamp": "1"}, "is before 'startingTimestamp'"),
        (BrowseOptions, {**SECRET, "entity": "q", "startingOffsets": "latest"}, "does not count for mode=browse"),
        (BrowseOptions, {**SECRET, "entity": "q", "httpEndpoint": "http://h"}, "without option 'asOfOffsets'"),
        (BrowseOptions, {**SECRET, "entity": "q", "asOfOffsets": "latest", "filterPushdown": "true"}, "does not count"),
        (SinkOptions, {**SECRET, "entity": "q", "onBadRow": "drop"}, "'onBadRow' may be fail or skip or queue"),
        (SinkOptions, {**SECRET, "entity": "q", "onBadRow": "queue"}, "'onBadRow=queue' and 'badRowEntity'"),
        (SinkOptions, {**SECRET, "entity": "q", "badRowEntity": "q2"}, "'onBadRow=queue' and 'badRowEntity'"),
        (SinkOptions, {**SECRET, "entity": "q", "mode": "journal"}, "'mode' is for .*, and does not count for writing"),
        (JournalOptions, {**SECRET, "consumersName": "copier"}, "did you mean 'consumerName'"),
        (JournalOptions, {**SECRET, "failOnDataLoss": "maybe"}, "'failOnDataLoss' may be true or false"),
    ],
)
def test_options_that_make_no_sense_are_refused(read, options, message):
    more = {"is_stream": False} if read is JournalOptions else {}
    with pytest.raises(InvalidOption, match=message):
        read.of(Options(options), **more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "'endingOffsets' is for batch queries of mode=journal, and does not count"),
        ({"endingTimestamp": "5"}, "'endingTimestamp' is for batch queries"),
        ({"filterPushdown": "true"}, "'filterPushdown' is for mode=browse and batch queries"),
        ({"maxTriggerDelay": "5m"}, "'maxTriggerDelay' does not count without option 'minOffsetsPerTrigger'"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "'maxTriggerDelay' may be a span such as 500ms"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "larger than what a batch may have at most"),
        ({"maxMessagesPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, "cannot both be given"),
    ],
)
def test_options_that_make_no_sense_for_a_stream_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        JournalOptions.of(Options({**SECRET, **options}), is_stream=True)


def test_options_that_kafkas_users_know_are_taken():
    given = {
        "minOffsetsPerTrigger": "5",
        "maxOffsetsPerTrigger": "7",
        "maxTriggerDelay": "90 s",
        "startingTimestamp": "0",
    }
    found = JournalOptions.of(Options({**SECRET, **given}), is_stream=True)
    assert (found.min_messages, found.max_messages, found.max_trigger_delay_s) == (5, 7, 90.0)
    assert found.starting_times.of(3).year == 1970


@pytest.mark.parametrize("name", ["a b", "a/b", ".", "..", "a" * 101, "n\u00e4me"])
def test_a_consumer_has_a_plain_name(name):
    with pytest.raises(InvalidOption, match="option 'consumerName' must have 1 to 100 letters"):
        JournalOptions.of(Options({**SECRET, "consumerName": name}), is_stream=True)


def test_options_of_spark_are_let_through():
    options = sink(CHECKPOINTLOCATION="/tmp/x", path="/y", entity="q", IDFROMPOSITION="QUERYID/batch/partition/row")
    assert (options.entity, options.is_id_from_position) == ("q", True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff", "it is no text"),
        (b"", "has no Endpoint"),
        (b"Endpoint=sb://h;hunter2", "no '='"),
    ],
)
def test_a_secret_file_that_cannot_be_used_is_named_and_not_shown(tmp_path, content, message):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidOption, match=message) as caught:
        Access(str(path), None).connection_string()
    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)


FINE = {
    "body": pa.array([b"x", b"x", b"x"]),
    "messageId": pa.array(["1", "2", "3"]),
}
PROPERTIES = pa.map_(pa.string(), pa.string())
LAST_MICROS = 253_402_300_799_999_999  # of the year 9999


def times(*micros):
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", "UTC"))


BAD_TEXT = pa.array([b"x", b"\x80", b"x"]).view(pa.string())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": pa.array([b"x", None, b"x"])}, "row 1 of this task: column 'body' is null"),
        ({"messageId": pa.array(["x", "\u00fc" * 129, "x"])}, "row 1 .*'messageId' has more than 128 characters"),
        ({"sessionId": pa.array(["x", "s" * 129, None])}, "row 1 .*'sessionId' has more than 128 characters"),
        ({"contentType": pa.array([None, "\u00fc", "x"])}, "row 1 .*'contentType' is not of ASCII"),
        ({"timeToLiveMs": pa.array([1, 0, 1])}, "row 1 .*'timeToLiveMs' is not from 1"),
        ({"timeToLiveMs": pa.array([None, 1 << 32, 1])}, "row 1 .*'timeToLiveMs' is not from 1"),
        ({"scheduledTime": times(0, -1, 0)}, "row 1 .*'scheduledTime' is not from 1970 to 9999"),
        ({"scheduledTime": times(None, LAST_MICROS + 1, 0)}, "row 1 .*'scheduledTime' is not from 1970 to 9999"),
        ({"subject": BAD_TEXT}, "row 1 .*'subject' is not of valid UTF-8"),
        (
            {"sessionId": pa.array([None, "s", "s"]), "partitionKey": pa.array(["k", "k", "s"])},
            "row 1 .*'partitionKey'",
        ),
        ({"applicationProperties": pa.array([[], [("a", "x" * 40_000)], []], PROPERTIES)}, "row 1 .* more than 32768"),
    ],
)
def test_rows_that_do_not_fit_are_named(columns, message):
    with pytest.raises(UnfitRow, match=message):
        refuse(unfit({**FINE, **columns}))


def refuse(bad):
    """Raises for the only row that does not fit."""
    [(row, why)] = bad.items()
    raise UnfitRow(row, *why)


def test_all_rows_that_do_not_fit_are_found_at_once():
    entries = pa.array([None, [("a", "x" * 40_000), ("b", "x" * 40_000)], [("a", None)]], PROPERTIES)
    columns = {**FINE, "body": pa.array([None, b"x", None]), "contentType": pa.array(["\u00fc", "x", "x"])}
    found = unfit({**columns, "applicationProperties": entries})
    assert [(row, column) for row, (column, _) in found.items()] == [
        (0, "body"),
        (1, "applicationProperties"),
        (2, "body"),
    ]
    fine = Message.of(b"x", message_id="1").encode()
    found = unfit({"amqpMessage": pa.array([None, fine, fine[:-1]], pa.binary())})
    assert list(found) == [0, 2]
    assert found[0] == ("amqpMessage", "is null")
    assert "is no message that could be sent" in found[2][1]


def test_the_first_and_last_time_fit():
    assert unfit({**FINE, "scheduledTime": times(0, LAST_MICROS, None)}) == {}


def test_a_property_of_invalid_text_is_named():
    entries = pa.MapArray.from_arrays(pa.array([0, 0, 1, 3]), pa.array(["a", "b", "c"]), BAD_TEXT)
    with pytest.raises(UnfitRow, match=r"row 2 .*'applicationProperties' is not of valid UTF-8"):
        refuse(unfit({**FINE, "applicationProperties": entries}))


def test_a_message_that_is_too_large_is_named():
    array = sections({**FINE, "body": pa.array([b"x", b"x" * 1000, b"x" * 999])})
    largest = len(array[1].as_py()) - 8
    assert too_large(array, largest) == too_large(array, 0) == {}
    with pytest.raises(UnfitRow, match=f"row 1 .*'body' makes a message of {largest} bytes; .* takes {largest - 1}"):
        refuse(too_large(array, largest - 1))
