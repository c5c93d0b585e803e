"""Dead letters sent again by a job, with a real broker: what is repaired, what stays, and what faults leave."""

import asyncio
import threading
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from protocol.client.connection import connect_to
from protocol.client.messages import Message, data_section, value_section
from protocol.codec import Int, Timestamp, UInt, encode
from protocol.message.batches import pack_batch
from protocol.message.sections import scan, usual_form
from protocol.symbols import Descriptor
from tests.brokers import Broker
from tests.caller import KILL_DRIVERS
from tests.patience import PATIENCE_S
from tests.pipeline.holding import locked
from tests.pipeline.programs import Program, counts_over_http

pytest.importorskip("pyspark")

from pipeline.jobs import resubmit
from pipeline.jobs.running import WrongUse
from pyspark_peeklock.rows import SCHEMA

DEAD = "/$deadletterqueue"
ENTITIES = """
partitions = 2

[[queues]]
name = "orders"
requires_duplicate_detection = true
lock_duration_ms = 300000

[[queues]]
name = "plain"

[[queues]]
name = "talks"
requires_session = true
requires_duplicate_detection = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

[[queues]]
name = "other"
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), ENTITIES) as broker:
        yield broker


@pytest.fixture
def run(quick, broker, tmp_path):
    """Runs the job on an entity; returns its exit code."""
    secret = tmp_path / "secret"
    secret.write_text(broker.connection_string)

    def run(entity, *arguments, valid="true"):
        common = ["--connection-string-file", secret, "--http-endpoint", f"http://localhost:{broker.http_port}"]
        common += ["--entity", entity, "--output", tmp_path / "out", "--valid", valid]
        return resubmit.main([str(each) for each in (*common, *arguments)])

    return run


def in_broker(broker, work):
    async def connected():
        async with await connect_to(broker.connection_string) as connection:
            return await work(connection)

    return asyncio.run(connected())


def numbered(count, prefix):
    return [Message.of(b"%d" % n, message_id=f"{prefix}{n}") for n in range(count)]


def dead_letter(broker, queue, messages, reason="Bad", *, subscription=""):
    """Send these, and dead-letter all that the queue, or the subscription of a topic, has."""

    async def work(connection):
        sender = await connection.sender(queue)
        for start in range(0, len(messages), 500):
            await sender.send(pack_batch([each.encode() for each in messages[start : start + 500]]), is_batch=True)
        left = len(messages)
        while left:
            path = queue + subscription
            receiver = (
                await connection.accept_next_session(path, 5) if queue == "talks" else await connection.receiver(path)
            )
            async with receiver:
                while received := await receiver.fetch(500, 0.2):
                    await asyncio.gather(*(receiver.reject(each, reason, "why") for each in received))
                    left -= len(received)

    in_broker(broker, work)


def take(broker, queue):
    """All messages of the queue in their order, received and deleted."""

    async def work(connection):
        found = []
        receiver = await connection.receiver(queue, credit=0, receive_and_delete=True)
        while received := await receiver.fetch(1000, 0.2):
            found += [each.message() for each in received]
        return found

    return in_broker(broker, work)


def count(broker, queue):
    async def work(connection):
        counts = await (await connection.management(queue)).counts()
        return counts.active, counts.dead_lettered

    return in_broker(broker, work)


def test_first_it_only_shows_and_then_it_repairs_sends_and_completes(run, broker, tmp_path, capsys):
    bodies = [b'{"currency": "%s"}' % each for each in (b"EURO", b"EUR", b"?") * 3]
    messages = [Message.of(body, message_id=f"m{n}") for n, body in enumerate(bodies)]
    dead_letter(broker, "orders", messages)
    repair = ["--set", "body=replace(string(body), 'EURO', 'EUR')", "--where", "messageId <> 'm8'"]
    valid = "get_json_object(string(body), '$.currency') = 'EUR' AND before.body IS NOT NULL"
    assert run("orders", *repair, valid=valid) == 0
    said = capsys.readouterr().out
    assert count(broker, "orders") == (0, 9)
    assert "Dry run, nothing was changed: 6 of 8 dead letters of orders would be sent to orders." in said
    assert 'body: {"currency": "EURO"}\n        {"currency": "EUR"}\n' in said
    assert "drops what comes twice" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert "{&#34;currency&#34;: &#34;EURO&#34;}" in page

    assert run("orders", *repair, "--apply", valid=valid) == 0
    assert "6 messages sent to orders, 6 dead letters completed. 2 not valid, not sent." in capsys.readouterr().out
    assert count(broker, "orders") == (6, 3)
    found = take(broker, "orders")
    assert [each.content() for each in found] == [b'{"currency": "EUR"}'] * 6
    assert all(each.message_id.startswith("resubmit/orders@") for each in found)
    assert {each.message_id.rpartition("/")[2] for each in found} == {"1"}
    outcomes = pq.read_table(tmp_path / "out" / "outcomes").to_pylist()
    assert sorted(each["outcome"] for each in outcomes) == ["not valid: not sent"] * 2 + ["sent and completed"] * 6
    assert [each.message_id for each in take(broker, "orders" + DEAD)] == ["m2", "m5", "m8"]


def properties_section(message):
    [found] = [usual_form(message, each) for each in scan(message) if each.kind is Descriptor.APPLICATION_PROPERTIES]
    return found


def test_what_is_not_repaired_keeps_its_bytes_and_its_types(run, broker, capsys):
    # A long in eight bytes, which has a shorter form, too.
    pairs = encode("n") + b"\x81\x00\x00\x00\x00\x00\x00\x00\x05"
    typed = {"u": UInt(7), "t": Timestamp(5), "b": True, "f": 2.5, "x": UUID(int=9), "y": b"\x00", "s": "text"}
    pairs += b"".join(encode(name) + encode(value) for name, value in typed.items())
    size, items = (len(pairs) + 4).to_bytes(4, "big"), (2 * len(typed) + 2).to_bytes(4, "big")
    section = b"\x00\x53\x74\xd1" + size + items + pairs
    plain = Message(correlation_id=UUID(int=3), annotations={"x-opt-own": UInt(8)}).encode()[: -len(data_section(b""))]
    body = value_section(["a", 1]) + b"\x00\x53\x78\xc1\x01\x00"

    async def send(connection):
        await (await connection.sender("other")).send(plain + section + body)
        receiver = await connection.receiver("other")
        await receiver.reject(await receiver.receive(PATIENCE_S), "Bad", "why")

    in_broker(broker, send)
    assert run("other", "--set", "subject='mended'", "--to", "plain", "--apply") == 0
    assert "plain: it does not detect duplicates: what is sent by two runs is there twice" in capsys.readouterr().out

    async def receive(connection):
        receiver = await connection.receiver("plain", receive_and_delete=True)
        return (await receiver.receive(PATIENCE_S)).payload

    payload = in_broker(broker, receive)
    assert properties_section(payload) == section
    found = Message.decode(payload)
    assert (found.subject, found.correlation_id, found.body) == ("mended", UUID(int=3), body)
    assert (type(found.annotations["x-opt-own"]), found.delivery_count or 0) == (UInt, 0)
    assert count(broker, "other") == (0, 0)


def test_of_a_subscription_they_go_to_the_topic_and_properties_keep_their_types(run, broker, capsys):
    own = {"v": Int(1), "gone": "x", "kept": Int(3)}
    dead_letter(broker, "news", [Message.of(b"1", application_properties=own)], subscription="/subscriptions/all")
    others = "map_filter(applicationProperties, (k, v) -> k NOT IN ('v', 'gone'))"
    changed = f"map_concat({others}, map('v', '2', 'new', 'n'))"
    assert run("news/subscriptions/all", "--set", f"applicationProperties={changed}", "--apply") == 0
    assert "1 message sent to news, 1 dead letter completed." in capsys.readouterr().out
    [found] = take(broker, "news/subscriptions/all")
    properties = found.application_properties
    assert properties == {"v": 2, "kept": 3, "new": "n"}
    assert [type(properties[name]) for name in ("v", "kept", "new")] == [Int, Int, str]
    assert take(broker, "news/subscriptions/all" + DEAD) == []


def test_what_others_have_locked_is_left_and_a_second_run_doubles_nothing(run, broker, capsys):
    dead_letter(broker, "orders", numbered(20, "right-"), reason="Right")
    dead_letter(broker, "orders", numbered(20, "wrong-"), reason="Wrong")
    common = ["--where", "deadLetterReason = 'Right'", "--apply"]

    with locked(broker, "orders" + DEAD, 12):
        assert run("orders", *common) == 3
    assert "20 messages sent to orders, 8 dead letters completed, 12 LEFT" in capsys.readouterr().out
    assert run("orders", *common) == 0
    assert "12 messages sent to orders, 12 dead letters completed." in capsys.readouterr().out
    assert sorted(int(each.content()) for each in take(broker, "orders")) == list(range(20))
    left = take(broker, "orders" + DEAD)
    assert sorted(each.message_id for each in left) == sorted(f"wrong-{n}" for n in range(20))
    assert {each.delivery_count or 0 for each in left} == {0}


def test_sessions_keep_their_order(run, broker):
    messages = [Message.of(b"%d" % n, group_id=f"s{n % 7}", message_id=f"s{n}") for n in range(700)]
    dead_letter(broker, "talks", messages)
    assert run("talks", "--set", "sessionId=concat(sessionId, '-again')", "--apply") == 0

    async def received(connection):
        found = {}
        while len(found) < 7:
            receiver = await connection.accept_next_session("talks", 5)
            async with receiver:
                taken = await receiver.fetch(1000, 1)
                found[receiver.session_id] = [int(each.message().content()) for each in taken]
                await receiver.accept_all(taken)
        return found

    assert in_broker(broker, received) == {f"s{s}-again": list(range(s, 700, 7)) for s in range(7)}
    assert count(broker, "talks") == (0, 0)


def when_sent(broker, queue, then):
    """A thread that does something as soon as the first message is in the queue."""

    def work():
        while not asyncio.run(counts_over_http(broker, queue))["active"]:
            pass
        then()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_broker_killed_between_send_and_completion_loses_and_doubles_nothing(run, broker, capsys):
    dead_letter(broker, "orders", numbered(3000, "killed-broker-"))
    found = []

    def kill():
        broker.kill()
        broker.start()
        found.append(asyncio.run(counts_over_http(broker, "orders"))["dead_lettered"])

    thread = when_sent(broker, "orders", kill)
    assert run("orders", "--apply") == 0
    thread.join()
    assert found[0] > 0  # there were dead letters left
    assert sorted(int(each.content()) for each in take(broker, "orders")) == list(range(3000))
    assert take(broker, "orders" + DEAD) == []


@pytest.mark.skipif(not KILL_DRIVERS, reason="make kill-drivers")
def test_a_driver_killed_between_send_and_completion_loses_and_doubles_nothing(run, broker, tmp_path):
    dead_letter(broker, "orders", numbered(3000, "killed-driver-"))
    secret = tmp_path / "elsewhere"
    secret.write_text(broker.connection_string)
    arguments = ["jobs", "run", "resubmit", "--connection-string-file", secret, "--entity", "orders", "--apply"]
    arguments += ["--http-endpoint", f"http://localhost:{broker.http_port}", "--valid", "true", "--output"]
    driver = Program(tmp_path, *arguments, tmp_path / "of-killed")
    when_sent(broker, "orders", driver.kill).join()
    sent, dead = count(broker, "orders")
    assert sent > 0
    assert dead > 0
    assert run("orders", "--apply") == 0
    assert sorted(int(each.content()) for each in take(broker, "orders")) == list(range(3000))
    assert take(broker, "orders" + DEAD) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--set", "body"], "it is COLUMN=SQL"),
        (["--set", "messageId='x'"], "a column is one of body, applicationProperties"),
        (["--set", "subject='x'", "--set", "subject='y'"], "--set subject is given twice"),
        (["--to", "nowhere"], "there is no queue or topic 'nowhere'"),
        (["--http-endpoint", "ftp://x"], "--http-endpoint: 'ftp://x' is no address"),
    ],
)
def test_what_makes_no_sense_is_wrong_use(run, capsys, wrong, text):
    assert run("plain", *wrong) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repairs": {"subject": "nothing"}}, "--set subject: [UNRESOLVED_COLUMN"),
        ({"repairs": {"subject": "body"}}, "is binary, not string; string(body) is its text"),
        ({"repairs": {"body": "map('a', 'b')"}}, "is map<string,string>, not binary"),
        ({"repairs": {"applicationProperties": "1"}}, "is int, not map<string,string>"),
        ({"where": "1 +"}, "--where: [PARSE_SYNTAX_ERROR]"),
        ({"where": "subject"}, "--where: 'subject' is no condition"),
        ({"valid": "before.nothing = 1"}, "--valid: [FIELD_NOT_FOUND]"),
    ],
)
def test_an_expression_that_makes_no_sense_is_wrong_use(quick, changes, text):
    work = resubmit.Work("orders", "orders", "true", {}, "true", 1, None)._replace(**changes)
    with pytest.raises(WrongUse) as wrong:
        resubmit.planned(quick.createDataFrame([], SCHEMA), work)
    assert text in str(wrong.value)


def test_an_entity_that_is_not_there_and_a_wrong_key_are_named(run, broker, tmp_path, capsys):
    assert run("nowhere", "--to", "plain") == 3
    assert "nowhere" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "secret").write_text(broker.connection_string_for("RootManageSharedAccessKey", "wrong-key"))
    assert run("plain", "--to", "plain") == 3
    assert "wrong-key" not in capsys.readouterr().err
