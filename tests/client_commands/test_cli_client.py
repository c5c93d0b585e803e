"""The commands that are clients, against the real broker."""

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
import uuid

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from broker.cli.messages import corrected
from broker.cli.target import CONNECTION_STRING_VARIABLE
from protocol.client.connection import connect_to
from protocol.client.messages import Message, value_section
from protocol.codec import Short, Symbol, Timestamp
from tests.brokers import KEY_NAME, REPOSITORY, Broker
from tests.patience import PATIENCE_S

NAMES = (
    "sent",
    "received",
    "kept",
    "peeked",
    "purged",
    "counted",
    "resent",
    "chosen",
    "moved",
    "full",
    "delayed",
    "small",
)
QUEUES = "".join(f'[[queues]]\nname = "{name}"\n' for name in NAMES) + "max_message_size_kb = 1\n"


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    queues = QUEUES.replace('name = "full"', 'name = "full"\nmax_size_mb = 1')
    topic = '[[topics]]\nname = "news"\n[[topics.subscriptions]]\nname = "mine"\n'
    with Broker(tmp_path_factory.mktemp("commands"), queues + topic) as broker:
        yield broker


@pytest.fixture
def peeklock(broker, monkeypatch):
    """Run a command with the broker's connection string in the environment."""
    for name in list(os.environ):
        if name.startswith("PEEKLOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, broker.connection_string)
    return lambda *arguments, **options: CliRunner().invoke(app, [str(each) for each in arguments], **options)


def lines(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def bodies(result):
    return [line["body"] for line in lines(result)]


def test_a_delay_that_the_broker_does_not_take_is_no_success(peeklock):
    peeklock("send", "delayed", "--body", "x", "--count", 2)
    result = peeklock("receive", "delayed", "--keep", "--delay", "5s", "--count", 2)
    assert result.exit_code == 1
    assert "delivery.abandon_delays is off" in result.stderr
    assert [line["delivery_count"] for line in lines(peeklock("receive", "delayed", "--count", 2))] == [1, 0]


def test_send_and_receive(peeklock):
    result = peeklock("send", "sent", "--body", "héllo", "--subject", "s", "--property", "a=b", "--property", "n:=7")
    assert (result.exit_code, result.stdout) == (0, "1 message sent to sent\n")
    (message,) = lines(peeklock("receive", "sent"))
    assert re.fullmatch(r"[0-9a-f-]{36}", message.pop("message_id"))
    assert message.pop("enqueued").endswith("+00:00")
    assert message == {
        "sequence_number": 1,
        "subject": "s",
        "delivery_count": 0,
        "properties": {"a": "b", "n": 7},
        "body": "héllo",
    }
    result = peeklock("receive", "sent")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing to receive from sent" in result.stderr


def test_a_body_comes_from_standard_input_and_may_be_bytes(peeklock):
    assert peeklock("send", "sent", "--body", "-", input=b"\xff\x00").exit_code == 0
    assert bodies(peeklock("receive", "sent")) == [{"base64": "/wA="}]


def test_what_json_does_not_have_is_text(peeklock, broker):
    values = [float("nan"), float("-inf"), b"\xff", uuid.UUID(int=1)]

    async def work(connection):
        sender = await connection.sender("sent")
        await sender.send(Message(value_section(values), application_properties={"n": values[0]}).encode())

    on(broker, work)
    (message,) = lines(peeklock("receive", "sent"))
    assert message["body"] == ["nan", "-inf", {"base64": "/w=="}, "00000000-0000-0000-0000-000000000001"]
    assert message["properties"] == {"n": "nan"}


def test_many_are_sent_with_ids_of_their_own_and_received_at_most_so_many(peeklock):
    assert peeklock("send", "received", "--body", "x", "--count", 250).stdout == "250 messages sent to received\n"
    first = lines(peeklock("receive", "received", "--count", 240))
    assert len({message["message_id"] for message in first}) == 240
    assert len(lines(peeklock("receive", "received", "--count", 240))) == 10


def test_kept_messages_can_be_received_again(peeklock):
    peeklock("send", "kept", "--body", "x", "--count", 150)
    kept = lines(peeklock("receive", "kept", "--keep", "--count", 200))
    assert len(kept) == 150
    again = lines(peeklock("receive", "kept", "--count", 200))
    assert [message["delivery_count"] for message in again] == [0] * 150


def test_peek_takes_nothing(peeklock):
    for body in "abc":
        peeklock("send", "peeked", "--body", body, "--message-id", body)
    assert bodies(peeklock("peek", "peeked")) == ["a", "b", "c"]
    assert bodies(peeklock("peek", "peeked", "--count", 1)) == ["a"]
    (message,) = lines(peeklock("peek", "peeked", "--from", 3))
    assert (message["sequence_number"], message["message_id"], message["state"]) == (3, "c", "active")
    assert bodies(peeklock("peek", "peeked", "--dead-letter")) == []


def test_peek_goes_on_where_one_answer_ends(peeklock):
    peeklock("send", "purged", "--body", "x" * 100_000, "--count", 8)
    assert len(lines(peeklock("peek", "purged", "--count", 8))) == 8
    assert peeklock("purge", "purged", "--yes").exit_code == 0


def test_purge_asks_first(peeklock):
    peeklock("send", "purged", "--body", "x", "--count", 3)
    result = peeklock("purge", "purged", input="n\n")
    assert result.exit_code == 1
    assert "Delete all messages of purged?" in result.stderr
    assert len(lines(peeklock("peek", "purged"))) == 3
    assert peeklock("purge", "purged", input="y\n").stdout.endswith("3 messages deleted from purged\n")
    assert peeklock("purge", "purged", "--yes").stdout == "0 messages deleted from purged\n"
    result = peeklock("purge", "purged", "--dead-letter", "--yes")
    assert result.stdout == "0 messages deleted from purged/$deadletterqueue\n"


def test_queues_are_listed_with_their_counts(peeklock):
    peeklock("send", "counted", "--body", "x", "--count", 12)
    result = peeklock("queues")
    assert result.exit_code == 0
    head, *rows = [line.split() for line in result.stdout.splitlines()]
    names = ["ACTIVE", "LOCKED", "DEFERRED", "SCHEDULED", "DEAD-LETTERED", "TRANSFER", "NOT-FORWARDED", "BYTES"]
    assert head == ["QUEUE", *names]
    assert [row[0] for row in rows] == sorted([*NAMES, "news", "news/Subscriptions/mine"])
    (counted,) = [row for row in rows if row[0] == "counted"]
    assert counted[1:8] == ["12", *["0"] * 6]
    assert int(counted[8]) > 12
    (told,) = [each for each in json.loads(peeklock("queues", "--json").stdout) if each["name"] == "counted"]
    assert (told["active"], told["dead_lettered"], told["size_bytes"]) == (12, 0, int(counted[8]))


# --- resend -----------------------------------------------------------------------------------------------------------


def on(broker, work):
    """Run a coroutine function with a connection."""

    async def main():
        async with await connect_to(broker.connection_string) as connection:
            await work(connection)

    asyncio.run(main())


def dead_letter(broker, queue, messages):
    """Send messages and dead-letter them all."""

    async def work(connection):
        await (await connection.sender(queue)).send_all(message.encode() for message in messages)
        receiver = await connection.receiver(queue, credit=0)
        while taken := await receiver.fetch(100):
            await asyncio.gather(*(receiver.reject(received, "bad", "very bad") for received in taken))

    on(broker, work)


def test_dead_letters_are_sent_again_with_what_was_corrected(peeklock, broker):
    sent = [
        Message(
            value_section({"n": number}),
            message_id=f"m{number}",
            subject="s",
            ttl_ms=600_000 if number else None,
            application_properties={"keep": 1, "wrong": "x", "useless": True},
        )
        for number in range(3)
    ]
    dead_letter(broker, "resent", sent)
    (first, *_) = lines(peeklock("peek", "resent", "--dead-letter"))
    assert first["properties"]["DeadLetterReason"] == "bad"
    result = peeklock("resend", "resent", "--count", 1, "--set", "wrong=right", "--set", "n:=1.5", "--unset", "useless")
    assert (result.exit_code, result.stdout) == (0, "1 message sent to resent again\n")
    assert peeklock("resend", "resent").stdout == "2 messages sent to resent again\n"
    assert peeklock("resend", "resent").stdout == "0 messages sent to resent again\n"
    first, second, _third = lines(peeklock("receive", "resent", "--count", 10))
    assert (first["message_id"], first["subject"], first["body"]) == ("m0", "s", {"n": 0})
    assert first["properties"] == {"keep": 1, "wrong": "right", "n": 1.5}
    assert first["delivery_count"] == 0
    assert second["properties"] == {"keep": 1, "wrong": "x", "useless": True}


def test_many_dead_letters_keep_their_order(peeklock, broker):
    dead_letter(broker, "resent", [Message.of(b"%d" % number) for number in range(350)])
    assert peeklock("resend", "resent").stdout == "350 messages sent to resent again\n"
    assert bodies(peeklock("receive", "resent", "--count", 400)) == [str(number) for number in range(350)]


def test_a_dead_letter_that_is_refused_stays_where_it_is(peeklock, broker):
    """With the property that is set it is too large for the queue."""
    dead_letter(broker, "small", [Message.of(b"x" * 900, message_id="m")])
    result = peeklock("resend", "small", "--set", "long=" + "y" * 200)
    assert result.exit_code == 1
    assert result.stdout == "0 messages sent to small again\n"
    assert "amqp:link:message-size-exceeded" in result.stderr
    result = peeklock("resend", "small")
    assert result.stdout == "1 message sent to small again\n", result.stderr


def numbered(count, **properties):
    return [Message.of(b"%d" % number, application_properties={"n": number, **properties}) for number in range(count)]


def test_only_dead_letters_that_are_meant_are_sent_again(peeklock, broker):
    dead_letter(broker, "chosen", numbered(250))
    where = "--where", "n >= 100 AND n < 150 AND DeadLetterReason = 'bad' AND sys.SequenceNumber > 0"
    shown = peeklock("resend", "chosen", *where, "--set", "again:=true", "--dry-run")
    assert [line["properties"] for line in lines(shown)] == [{"n": n, "again": True} for n in range(100, 150)]
    assert shown.stderr == "50 messages would be sent to chosen again\n".replace(" again", "")
    assert len(lines(peeklock("peek", "chosen", "--dead-letter", "--count", 300))) == 250
    assert bodies(peeklock("peek", "chosen")) == []
    result = peeklock("resend", "chosen", *where, "--count", 20, "--json")
    assert (json.loads(result.stdout), result.stderr) == ({"entity": "chosen", "to": "chosen", "sent": 20}, "")
    result = peeklock("resend", "chosen", *where)
    assert (result.stdout, result.stderr) == ("30 messages sent to chosen again\n", "")
    assert bodies(peeklock("receive", "chosen", "--count", 300)) == [str(n) for n in range(100, 150)]
    kept = lines(peeklock("receive", "chosen", "--dead-letter", "--count", 300))
    assert [line["properties"]["n"] for line in kept] == [*range(100), *range(150, 250)]
    assert {line["delivery_count"] for line in kept} == {0}, "they were given back"


def test_dead_letters_go_elsewhere(peeklock, broker):
    dead_letter(broker, "chosen", numbered(3))
    assert peeklock("resend", "chosen", "--to", "received").stdout == "3 messages sent to received again\n"
    assert bodies(peeklock("receive", "received", "--count", 300)) == ["0", "1", "2"]


def test_a_full_target_leaves_dead_letters_where_they_are(peeklock, broker):
    peeklock("purge", "full", "--yes")
    dead_letter(broker, "chosen", [Message.of(b"x" * 50_000, message_id=str(n)) for n in range(40)])
    result = peeklock("resend", "chosen", "--to", "full")
    assert result.exit_code == 1
    sent = int(re.fullmatch(r"(\d+) messages sent to full again\n", result.stdout)[1])
    assert 0 < sent < 40
    assert re.fullmatch(r"peeklock: [^\n]+\(amqp:resource-limit-exceeded\)\n", result.stderr)
    there = {line["message_id"] for line in lines(peeklock("peek", "full", "--count", 100))}
    left = {line["message_id"] for line in lines(peeklock("receive", "chosen", "--dead-letter", "--count", 100))}
    assert len(there) == sent
    assert there | left == {str(n) for n in range(40)}


def test_messages_of_a_subscription_are_not_sent_to_it(peeklock, broker):
    result = peeklock("resend", "news/subscriptions/mine")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give --to" in result.stderr
    peeklock("send", "news", "--body", "x")
    assert peeklock("dead-letter", "news/subscriptions/mine").exit_code == 0
    assert peeklock("resend", "news/subscriptions/mine", "--to", "news").stdout == "1 message sent to news again\n"
    assert bodies(peeklock("receive", "news/Subscriptions/mine")) == ["x"]


@pytest.mark.parametrize("where", ["n >", "n = 'x", "sys.Nothing = 1", ""])
def test_a_condition_that_makes_no_sense(peeklock, where):
    result = peeklock("resend", "chosen", "--where", where)
    assert result.exit_code == 2
    assert result.stderr.startswith("peeklock: --where: ")
    assert "Traceback" not in result.stderr


# --- dead-letter ------------------------------------------------------------------------------------------------------


def test_the_oldest_messages_are_dead_lettered(peeklock):
    peeklock("send", "moved", "--body", "x", "--count", 5)
    result = peeklock("dead-letter", "moved", "--count", 2, "--reason", "r", "--description", "d é")
    assert (result.exit_code, result.stdout) == (0, "2 messages dead-lettered from moved\n")
    dead = lines(peeklock("receive", "moved", "--dead-letter", "--count", 9))
    assert [line["sequence_number"] for line in dead] == [1, 2]
    assert dead[0]["properties"] == {"DeadLetterReason": "r", "DeadLetterErrorDescription": "d é"}
    result = peeklock("dead-letter", "moved", "--json")
    assert json.loads(result.stdout) == {"entity": "moved", "dead_lettered": 1}
    assert peeklock("dead-letter", "moved", "--count", 9).stdout == "2 messages dead-lettered from moved\n"
    assert peeklock("dead-letter", "moved", "--count", 9).stdout == "0 messages dead-lettered from moved\n"


def test_messages_are_dead_lettered_by_number_or_condition(peeklock, broker):
    peeklock("purge", "moved", "--dead-letter", "--yes")

    async def work(connection):
        await (await connection.sender("moved")).send_all(message.encode() for message in numbered(300))
        receiver = await connection.receiver("moved", credit=0)
        taken = await receiver.fetch(10)
        await receiver.modify(taken.pop(3), undeliverable_here=True)
        await asyncio.gather(*map(receiver.release, taken))

    on(broker, work)
    found = lines(peeklock("peek", "moved", "--count", 300))
    numbers = [line["sequence_number"] for line in found]
    assert found[3]["state"] == "deferred"
    result = peeklock("dead-letter", "moved", "--number", numbers[3], "--number", numbers[250], "--reason", "r")
    assert result.stdout == "2 messages dead-lettered from moved\n", result.stderr
    result = peeklock("dead-letter", "moved", "--where", "n >= 290", "--count", 100)
    assert result.stdout == "10 messages dead-lettered from moved\n", result.stderr
    dead = lines(peeklock("receive", "moved", "--dead-letter", "--count", 300))
    assert [line["properties"]["n"] for line in dead] == [3, 250, *range(290, 300)]
    assert dead[0]["properties"]["DeadLetterReason"] == "r"
    left = lines(peeklock("receive", "moved", "--count", 300))
    assert [line["properties"]["n"] for line in left] == [n for n in range(290) if n not in (3, 250)]
    result = peeklock("dead-letter", "moved", "--number", numbers[3])
    assert result.stderr == f"peeklock: moved has no message with the number {numbers[3]}\n"
    assert peeklock("dead-letter", "moved", "--number", 1, "--count", 2).exit_code == 2


def test_the_broker_counts_the_time_to_live_anew():
    message = Message.of(b"", ttl_ms=5, absolute_expiry_ms=Timestamp(1), creation_ms=Timestamp(1), delivery_count=9)
    message.annotations = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(1), Symbol("mine"): "kept"}
    again = corrected(message, {})
    assert (again.ttl_ms, again.absolute_expiry_ms, again.creation_ms, again.delivery_count) == (5, None, None, None)
    assert again.annotations == {"mine": "kept"}


def test_a_senders_own_creation_time_is_kept_where_there_is_no_time_to_live():
    assert corrected(Message.of(b"", creation_ms=Timestamp(1)), {}).creation_ms == 1


# --- a part is done ---------------------------------------------------------------------------------------------------


def test_a_full_queue_says_how_many_it_has_stored(peeklock):
    peeklock("purge", "full", "--yes")
    result = peeklock("send", "full", "--body", "x" * 50_000, "--count", 200)
    assert result.exit_code == 1
    stored = int(re.fullmatch(r"(\d+) messages sent to full, of 200\n", result.stdout)[1])
    assert 0 < stored < 200
    assert re.fullmatch(r"peeklock: [^\n]+\(amqp:resource-limit-exceeded\)\n", result.stderr)
    assert len(lines(peeklock("peek", "full", "--count", 300))) == stored
    result = peeklock("send", "full", "--body", "x" * 50_000, "--count", 2, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"entity": "full", "sent": 0})


def test_a_full_store_says_how_many_it_has_stored(peeklock, tmp_path, capfd):
    config = '[[queues]]\nname = "q"\n[store]\nmap_size_bytes = 16777216\n'
    with Broker(tmp_path, config) as small:
        given = "--connection-string", small.connection_string
        result = peeklock("send", "q", "--body", "x" * 100_000, "--count", 400, *given)
        assert result.exit_code == 1
        stored = int(re.fullmatch(r"(\d+) messages sent to q, of 400\n", result.stdout)[1])
        assert result.stderr.startswith("peeklock: ")
        assert result.stderr.count("\n") == 1
        counts = peeklock("queues", *given)
        assert counts.exit_code == 0, counts.stderr
        (row,) = [line.split() for line in counts.stdout.splitlines()[1:]]
        assert int(row[1]) == stored > 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_broker_that_dies_leaves_a_doubt(peeklock, tmp_path):
    """What it has accepted is counted; the outcome of the others is not known."""
    with Broker(tmp_path, '[[queues]]\nname = "q"\n') as mortal:
        killer = threading.Timer(1.5, mortal.kill)
        killer.start()
        result = peeklock(
            "send", "q", "--body", "x", "--count", 10_000_000, "--connection-string", mortal.connection_string
        )
        killer.join()
        assert result.exit_code == 1
        assert re.fullmatch(r"\d+ messages sent to q, of 10000000\n", result.stdout)
        assert re.fullmatch(r"peeklock: [^\n]+; up to \d+ more may be stored\n", result.stderr)
        mortal.start()


def test_progress_is_shown_on_a_terminal_and_never_in_the_output(broker):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "broker.cli", "send", "received", "--body", "x", "--count", "3000"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")}
    environment |= {CONNECTION_STRING_VARIABLE: broker.connection_string, "TERM": "xterm"}
    sent = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert (sent.communicate(timeout=PATIENCE_S)[0], sent.returncode) == (b"3000 messages sent to received\n", 0)
    assert b"sending to received" in shown
    assert b"/3000" in shown


@pytest.mark.parametrize(
    ("redirections", "code", "error"),
    [
        (">/dev/full", 1, "peeklock: standard output: No space left on device\n"),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 2, ""),
    ],
)
def test_output_that_goes_nowhere(broker, redirections, code, error):
    body = "-" if "<&-" in redirections else "x"
    command = [sys.executable, "-m", "broker.cli", "send", "purged", "--body", body]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")}
    environment |= {CONNECTION_STRING_VARIABLE: broker.connection_string}
    ended = subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *command],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, error)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_unknown_queue(peeklock):
    result = peeklock("receive", "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("peeklock: The messaging entity")
    assert "amqp:not-found" in result.stderr


def test_a_wrong_key(peeklock, broker):
    result = peeklock("peek", "sent", "--connection-string", broker.connection_string_for(KEY_NAME, "wrong"))
    assert result.exit_code == 1
    assert "InvalidSignature" in result.stderr


def test_no_broker(peeklock):
    result = peeklock("queues", "--connection-string", "Endpoint=amqp://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr == "peeklock: cannot connect to 127.0.0.1 port 1: Connection refused\n"


def test_tls_where_there_is_none(peeklock, broker):
    target = broker.connection_string.replace("UseDevelopmentEmulator=true", "")
    result = peeklock("peek", "sent", "--connection-string", target)
    assert result.exit_code == 1
    assert (
        result.stderr == f"peeklock: cannot connect to localhost port {broker.amqp_port}: it does not speak TLS there\n"
    )


def test_a_port_that_is_not_amqp(peeklock, broker):
    result = peeklock("peek", "sent", "--connection-string", f"Endpoint=amqp://localhost:{broker.http_port}")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"peeklock: cannot connect to localhost port {broker.http_port}: the peer ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("receive", ""), ("send", "/", "--body", "x"), ("resend", "sent", "--to", ""), ("transfer", "sent", "")],
)
def test_a_name_that_is_empty(peeklock, arguments):
    result = peeklock(*arguments)
    assert result.exit_code == 2
    assert "names nothing" in result.stderr


def test_a_subscription_that_is_named_as_a_queue(peeklock):
    result = peeklock("receive", "news/mine")
    assert result.stderr == (
        "peeklock: The messaging entity 'sb://localhost/news/mine' could not be found. (amqp:not-found); "
        "if it is a subscription, its name here is TOPIC/subscriptions/NAME\n"
    )


@pytest.mark.parametrize(
    "arguments", [("move", "sent", "--to", "99999999999999999999"), ("dead-letter", "sent/$deadletterqueue")]
)
def test_what_cannot_be(peeklock, arguments):
    result = peeklock(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")


def test_no_connection_string(peeklock, monkeypatch):
    monkeypatch.delenv(CONNECTION_STRING_VARIABLE)
    result = peeklock("queues")
    assert result.exit_code == 2
    assert CONNECTION_STRING_VARIABLE in result.stderr


def test_a_connection_string_that_makes_no_sense(peeklock):
    result = peeklock("queues", "--connection-string", "localhost")
    assert result.exit_code == 2
    assert result.stderr.startswith("peeklock: --connection-string: ")


@pytest.mark.parametrize("arguments", [("--property", "n:=1" + "0" * 40), ("--subject", "\udcff")])
def test_a_value_that_amqp_does_not_have(peeklock, arguments):
    result = peeklock("send", "sent", "--body", "x", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("peeklock: AMQP has no such value: ")


def test_a_name_that_is_no_text(peeklock):
    result = peeklock("receive", "\udcff")
    assert (result.exit_code, result.stderr) == (2, "peeklock: a name has characters that are no text\n")


@pytest.mark.parametrize("pair", ["name", "=value", ":=1", "n:={}", "n:=[1]", "n:=nonsense", "n:=NaN", "n:=1e999"])
def test_a_property_that_makes_no_sense(peeklock, pair):
    result = peeklock("send", "sent", "--body", "x", "--property", pair)
    assert result.exit_code == 2
    assert "--property" in result.stderr


def test_the_connection_string_in_the_environment_is_no_unknown_setting(peeklock, tmp_path):
    (tmp_path / "any.toml").write_text("".join(f"[{section}]\nport = 0\n" for section in ("amqp", "http", "ops")))
    assert peeklock("config", "check", "--config", str(tmp_path / "any.toml")).exit_code == 0


@pytest.mark.parametrize(
    ("sent_by", "key", "kept"), [("s", "s", None), (None, "id", None), (None, "mine", "mine"), ("s", None, None)]
)
def test_a_key_that_a_partitioned_entity_has_added_is_not_sent_again(sent_by, key, kept):
    shown = {Symbol("x-opt-partition-id"): Short(1)} | ({Symbol("x-opt-partition-key"): key} if key else {})
    again = corrected(Message.of(b"", message_id="id", group_id=sent_by, annotations=shown), {})
    assert again.annotations == ({"x-opt-partition-key": kept} if kept else {})
    plain = Message.of(b"", message_id="id", annotations={Symbol("x-opt-partition-key"): "id"})
    assert corrected(plain, {}).annotations == {"x-opt-partition-key": "id"}
