"""Settings of the journal: where they come from, and what is refused."""

import pytest

from broker.settings.config import ConfigurationError
from broker.settings.sources import load
from broker.settings.stores import JournalMode


def test_patterns_keep_their_order_in_a_file_and_in_a_variable(tmp_path):
    file = tmp_path / "peeklock.toml"
    file.write_text("[journal]\nmode = 'events'\n[journal.modes]\n'b*' = 'off'\n'a' = 'bodies'\n'*' = 'events'\n")
    wanted = [("b*", JournalMode.OFF), ("a", JournalMode.BODIES), ("*", JournalMode.EVENTS)]
    assert list(load(file).settings.journal.modes.items()) == wanted
    environment = {"PEEKLOCK_JOURNAL__MODE": "events", "PEEKLOCK_JOURNAL__MODES": '{"z": "off", "a": "bodies"}'}
    assert list(load(None, {}, environment).settings.journal.modes) == ["z", "a"]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MODE": "all"}, "PEEKLOCK_JOURNAL__MODE: \"all\" must be"),
        ({"MODES": '{"a": "off"}'}, "has no effect while journal.mode is off"),
        ({"MODE": "events", "MODES": '{"a": 1}'}, "PEEKLOCK_JOURNAL__MODES"),
        ({"MODE": "events", "MODES": "a=off"}, "PEEKLOCK_JOURNAL__MODES: "),
        ({"RETENTION_HOURS": "0"}, "PEEKLOCK_JOURNAL__RETENTION_HOURS"),
        ({"RETENTION_BYTES": "1"}, "PEEKLOCK_JOURNAL__RETENTION_BYTES"),
        ({"BACKLOG_BYTES": "1"}, "PEEKLOCK_JOURNAL__BACKLOG_BYTES"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(environment, text):
    with pytest.raises(ConfigurationError) as error:
        load(None, {}, {f"PEEKLOCK_JOURNAL__{name}": value for name, value in environment.items()})
    assert text in str(error.value)
