import io
import json
import logging

import pytest
import structlog

from broker.logging import configure_logging
from broker.settings.config import Settings
from broker.settings.log import Log, LogFormat


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def logged(stream_type=io.StringIO, **settings):
    stream = stream_type()
    configure_logging(Log(**settings), stream)
    return stream


def line(stream) -> dict:
    [text] = stream.getvalue().splitlines()
    return json.loads(text)


def test_without_a_terminal_an_event_is_one_line_of_json_with_time_in_utc():
    stream = logged()
    structlog.get_logger().info("link opened", entity="orders", role="receiver", reason="two\nlines")
    event = line(stream)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "link opened", "level": "info", "entity": "orders", "role": "receiver", "reason": "two\nlines"
    }  # fmt: skip


def test_on_a_terminal_an_event_is_readable():
    stream = logged(Terminal)
    structlog.get_logger().info("link opened", entity="orders")
    assert "link opened" in stream.getvalue()
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        json.loads(stream.getvalue())


@pytest.mark.parametrize(
    ("stream_type", "log_format", "starts_json"),
    [(Terminal, LogFormat.JSON, True), (io.StringIO, LogFormat.CONSOLE, False)],
)
def test_the_format_can_be_set(stream_type, log_format, starts_json):
    stream = logged(stream_type, format=log_format)
    structlog.get_logger().info("x")
    assert stream.getvalue().startswith("{") is starts_json


def test_console_output_to_a_file_has_no_colours():
    stream = logged(format=LogFormat.CONSOLE)
    structlog.get_logger().warning("x", entity="orders")
    assert "\x1b" not in stream.getvalue()


def test_events_below_the_level_are_not_written():
    stream = logged(level="warning")
    log = structlog.get_logger()
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [json.loads(text)["event"] for text in stream.getvalue().splitlines()] == ["c", "d"]


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
@pytest.mark.parametrize(
    "fields",
    [
        {"key": "hunter2"},
        {"primary_key": "hunter2"},
        {"Root_Key": "hunter2"},
        {"password": "hunter2"},
        {"token": "hunter2"},
        {"connection_string": "hunter2"},
        {"body": b"hunter2"},
        {"body": "hunter2"},
        {"message": b"hunter2"},
        {"data": memoryview(b"hunter2")},
        {"rule": {"key_name": "k", "secondary_key": "hunter2"}},
        {"rules": [{"primary_key": "hunter2"}]},
        {"found": ["Endpoint=sb://localhost;SharedAccessKeyName=k;SharedAccessKey=hunter2;"]},
        {"text": "SharedAccessSignature sr=amqp%3a%2f%2fq&sig=hunter2%3d&se=1&skn=k"},
        {"settings": Settings(security={"root_key": "hunter2"})},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_key_and_no_body_is_written(log_format, fields):
    stream = logged(format=log_format)
    structlog.get_logger().info("x", **fields)
    assert stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_a_key_in_the_text_of_an_exception_is_masked():
    stream = logged()
    try:
        raise ValueError("Endpoint=sb://a;SharedAccessKey=hunter2;")
    except ValueError:
        structlog.get_logger().exception("failed")
    event = line(stream)
    assert "ValueError" in event["exception"]
    assert "SharedAccessKey=***;" in event["exception"]
    assert "hunter2" not in stream.getvalue()


def test_an_exception_is_written_on_a_terminal_too():
    stream = logged(Terminal)
    try:
        raise ValueError("what happened")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "what happened" in stream.getvalue()


def test_names_counts_and_lock_tokens_are_no_secrets():
    stream = logged()
    fields = {"key_name": "k", "tokens": 3, "lock_token": "0a0b", "keys": 2, "body_bytes": 7}
    structlog.get_logger().info("x", **fields)
    assert fields.items() <= line(stream).items()


def test_logs_of_libraries_have_the_same_form():
    stream = logged()
    logging.getLogger("asyncio").error("never awaited: %s", "task")
    logging.getLogger("asyncio").info("not of interest")
    event = line(stream)
    assert (event["event"], event["logger"], event["level"]) == ("never awaited: task", "asyncio", "error")


def test_a_library_that_logs_an_exception_has_it_written():
    stream = logged()
    try:
        raise ValueError("what happened")
    except ValueError:
        logging.getLogger("aiohttp").exception("request failed")
    assert "what happened" in line(stream)["exception"]


# A client may call itself what it likes; each of these would control a terminal, or look like another line.
HOSTILE = [
    "a\x1b[2J",
    "a\n2026-01-01T00:00:00Z [info     ] all is well",
    "a\x9b31m",
    "a\u2028b",
    "a\x85b",
    "\u202eb",
    "\r",
    "\0",
]


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_clients_say_stays_within_its_line_and_is_printable(log_format, text):
    stream = logged(format=log_format)
    structlog.get_logger().info("x", client=text, inner={text: [text, {"deep": text}]}, pair=(text,))
    logging.getLogger("asyncio").error("a task of %s has failed", text)
    first, second, nothing = stream.getvalue().split("\n")
    assert (first + second).isprintable()
    assert nothing == ""
    if log_format is LogFormat.JSON:
        assert (json.loads(first)["client"], json.loads(first)["inner"]) == (text, {text: [text, {"deep": text}]})
        assert json.loads(second)["event"] == f"a task of {text} has failed"


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_traceback_has_lines_of_its_own_that_look_like_no_others(text):
    stream = logged(format=LogFormat.CONSOLE)
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger().exception("failed")
    head, *lines, nothing = stream.getvalue().split("\n")
    assert head.isprintable()
    assert all(line.isprintable() and line.startswith("  ") for line in lines)
    assert nothing == ""
