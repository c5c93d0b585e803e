"""`peeklock pair cost`: the operations of a pairing, with the figures of the guide (PN11)."""

import json

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app


def cost(*arguments):
    return CliRunner().invoke(app, ["pair", "cost", *map(str, arguments)])


def told(*arguments):
    result = cost(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_with_ten_backlog_queues_a_syphon_polls_as_often_as_the_guide_says():
    polls = {"per_hour": 40, "per_day": 960, "days": 30, "in_days": 28_800}
    assert told("--messages", 0, "--outage", "0s") == {
        "outage": {"pings": 0, "messages": 0, "total": 0},
        "polls": polls,
    }
    assert told("--messages", 0, "--outage", "0s", "--backlog-queues", 1, "--days", 365)["polls"] == {
        "per_hour": 4,
        "per_day": 96,
        "days": 365,
        "in_days": 35_040,
    }


def test_an_outage_costs_pings_and_four_operations_for_each_message():
    assert told("--messages", 1000, "--outage", "1h")["outage"] == {"pings": 60, "messages": 4000, "total": 4060}
    many = told(
        *("--messages", 1000, "--outage", "PT1H", "--entities", 5, "--clients", 2),
        *("--ping-interval", "30s", "--failover-interval", "0s"),
    )
    assert many["outage"] == {"pings": 5 * 2 * 121, "messages": 4000, "total": 5210}


def test_an_outage_within_the_failover_interval_costs_nothing():
    assert told("--messages", 1000, "--outage", "9s")["outage"]["total"] == 0
    assert told("--messages", 1000, "--outage", "9s", "--failover-interval", "8s")["outage"]["total"] == 4001


def test_without_a_terminal_it_prints_columns():
    result = cost("--messages", 1000, "--outage", "90m", "--days", 1)
    assert result.stdout.splitlines() == [
        "IN                  WHAT                              OPERATIONS",
        "an outage of 1h30m  pings                                     90",
        "an outage of 1h30m  1000 messages, 4 operations each        4000",
        "an outage of 1h30m  all                                     4090",
        "an hour             polls of the syphon                       40",
        "a day               polls of the syphon                      960",
        "1 day               polls of the syphon                      960",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--outage", "1h"), "--messages"),
        (("--messages", "1"), "--outage"),
        (("--messages", "1", "--outage", "soon"), "--outage: 'soon' is no duration such as 30s"),
        (("--messages", "1", "--outage", "unlimited"), "--outage: 'unlimited' is more than 36500d"),
        (("--messages", "-1", "--outage", "1h"), "'--messages'"),
        (("--messages", "1", "--outage", "1h", "--entities", "0"), "'--entities'"),
        (("--messages", "1", "--outage", "1h", "--backlog-queues", "1001"), "'--backlog-queues'"),
        (("--messages", "1", "--outage", "1h", "--days", "0"), "'--days'"),
        (("--messages", "1", "--outage", "1h", "--ping-interval", "1"), "--ping-interval: '1' is no duration"),
        (("--messages", "1", "--outage", "1h", "--ping-interval", "99ms"), "ping_interval_ms is 99; it must be 100 to"),
        (("--messages", "1", "--outage", "1h", "--failover-interval", "25h"), "failover_interval_ms is 90000000"),
    ],
)
def test_wrong_use_is_said_with_the_option_and_the_limit(arguments, text):
    result = cost(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split()), result.stderr
