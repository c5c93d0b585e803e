import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.namespace.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("PT30S", 30_000),
        ("PT1M", 60_000),
        ("PT1H", 3_600_000),
        ("P7D", 7 * 86_400_000),
        ("P2W", 14 * 86_400_000),
        ("P1DT2H3M4.5S", 86_400_000 + 2 * 3_600_000 + 3 * 60_000 + 4_500),
        ("PT0.5S", 500),
        ("PT0,25S", 250),
        ("PT1.5M", 90_000),
        ("P0.5D", 43_200_000),
        ("PT0S", 0),
        ("PT0.0005S", 1),
        (" PT5S ", 5_000),
        ("P10675199DT2H48M5.4775807S", 922_337_203_685_478),
    ],
)
def test_a_duration_is_read_to_the_millisecond(text, duration_ms):
    assert parse_duration(text) == duration_ms


@pytest.mark.parametrize(
    "text",
    ["", "P", "PT", "P1", "1H", "PT1H2", "P1DT", "T1H", "PT-5S", "-PT5S", "pt5s", "00:01:00", "PT1S1M", "PT٣S", "P1Y"],
)
def test_an_invalid_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as PT30S"):
        parse_duration(text)


def test_months_are_not_taken_for_minutes():
    with pytest.raises(ValueError, match="ISO 8601"):
        parse_duration("P1M")


def test_only_the_last_part_may_have_a_fraction():
    with pytest.raises(ValueError, match="fraction in its last part"):
        parse_duration("PT1.5M3S")


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(0, "PT0S"), (250, "PT0.25S"), (60_000, "PT1M"), (604_800_000, "P7D"), (90_061_001, "P1DT1H1M1.001S")],
)
def test_a_duration_is_written_in_its_shortest_form(duration_ms, text):
    assert format_duration(duration_ms) == text


@given(st.integers(0, 10**15))
def test_what_is_written_is_read_back(duration_ms):
    assert parse_duration(format_duration(duration_ms)) == duration_ms
