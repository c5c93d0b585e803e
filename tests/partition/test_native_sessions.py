"""Messages of sessions are handed out alike by the extension and by Python, also unusual ones and in small turns."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.partition.messages import session_hand_out
from broker.partition.settings import PartitionSettings
from broker.runs import ranges_of
from broker.wire import Outcome
from protocol.extension import extension
from tests.partition.driver import MAIN, START_MS, Driver, message

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")

SESSIONS = ["a", "b", "c", "d"]
RECEIVERS = st.integers(0, len(SESSIONS) - 1)
STEPS = st.lists(
    st.tuples(
        st.just("send"),
        st.lists(st.tuples(st.sampled_from(SESSIONS), st.sampled_from([None, None, None, 1, 50]), st.integers(0, 400))),
    )
    | st.tuples(st.just("grant"), RECEIVERS, st.integers(-3, 9))
    | st.tuples(st.just("settle"), st.integers(0, 9), st.integers(1, 9), st.sampled_from(Outcome))
    | st.tuples(st.sampled_from(["drain", "close", "break"]), RECEIVERS)
    | st.tuples(st.just("wait"), st.sampled_from([1, 49, 30_000])),
    max_size=25,
)
SMALL = PartitionSettings(pump_bytes=2_000, pump_stored_bytes=2_000, pump_bytes_per_receiver=1_200, window=4)


class World:
    def __init__(self, settings: PartitionSettings, receive_and_delete: bool) -> None:
        self.driver = Driver(settings=settings, requires_session=True)
        self.receive_and_delete = receive_and_delete
        self.limits = [0] * len(SESSIONS)
        self.held: list[bytes] = []  # tokens
        for number in range(len(SESSIONS)):
            self.open(number)

    def open(self, number: int) -> None:
        self.limits[number] = 0
        session = [SESSIONS[number], 0]
        self.driver.partition.open_receiver(
            number, MAIN, self.receive_and_delete and number == 0, self.driver.now_ms, session
        )

    def step(self, kind: str, *arguments: Any) -> Any:
        driver = self.driver
        if kind == "send":
            [sent] = arguments
            messages = [message(bytes(size), ttl_ms, session_id=session) for session, ttl_ms, size in sent]
            driver.partition.send(MAIN, messages, driver.now_ms)
        elif kind == "grant":
            number, count = arguments
            self.limits[number] = max(0, self.limits[number] + count)
            driver.partition.grant(number, self.limits[number])
        elif kind == "drain":
            driver.partition.drain(arguments[0], self.limits[arguments[0]])
        elif kind in ("close", "break"):
            driver.partition.close_receiver(arguments[0], kind == "break", driver.now_ms)
            self.open(arguments[0])
        elif kind == "wait":
            driver.wait(arguments[0])
        elif kind == "settle":
            at, count, outcome = arguments
            tokens, self.held[at : at + count] = self.held[at : at + count], []
            results = driver.partition.settle(MAIN, ranges_of(tokens), outcome, None, driver.now_ms)
            driver.partition.commit()
            return [*map(str, results)]
        driver.partition.commit()
        return self.pump()

    def pump(self) -> Any:
        pumped = self.driver.partition.pump(self.driver.now_ms)
        self.driver.partition.commit()
        seen = []
        for receiver, until_ms, items in pumped.deliveries:
            self.held += items[0::5]
            # Without the tokens: the extension may leave some out.
            seen.append((receiver, until_ms, items[1::5], items[2::5], items[3::5], items[4::5]))
        return seen, pumped.drained, pumped.more, [(key, str(error)) for key, error in pumped.closed]


@pytest.mark.parametrize("settings", [PartitionSettings(), SMALL], ids=["usual", "small"])
@given(STEPS, st.booleans())
def test_sessions_are_served_alike(settings, steps, receive_and_delete):
    one, other = World(settings, receive_and_delete), World(settings, receive_and_delete)
    assert one.driver.now_ms == START_MS
    for step in [*steps, *[("grant", number, 9) for number in range(len(SESSIONS))]]:
        seen = one.step(*step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session_hand_out, "extension", None)
            assert seen == other.step(*step)
        assert one.driver.counts() == other.driver.counts()
        one.driver.partition.check()
    assert len(one.held) == len(other.held)
