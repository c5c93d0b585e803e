"""The journal's process gives signs of life only while its thread makes progress, or waits for the disk."""

import asyncio
from contextlib import suppress
from pathlib import Path

from broker.gateway import running
from broker.gateway.running import keep_beating
from broker.journal.consumers import Consumers
from broker.journal.following import Follower, Retention
from broker.journal.process import SignsOfThread
from storage.data_dir import RUN
from storage.journal.queues import Mode, Modes
from tests.logged_turns import Turns
from tests.logs import crash, open_log
from tests.patience import PATIENCE_S, until


def test_a_thread_goes_on_while_it_gives_signs_or_waits_for_the_disk():
    signs = SignsOfThread()
    assert signs.goes_on()  # it has just begun
    assert not signs.goes_on()
    signs.beat()
    signs.beat()
    assert [signs.goes_on(), signs.goes_on()] == [True, False]
    with signs.waiting_for_disk():
        assert [signs.goes_on(), signs.goes_on(), signs.goes_on()] == [True, True, True]
    assert [signs.goes_on(), signs.goes_on()] == [True, False]


async def _beats(monkeypatch, goes_on, expected):
    monkeypatch.setattr(running, "BEAT_SECONDS", 0.001)
    beats: list[int] = []
    beating = asyncio.create_task(keep_beating(lambda: beats.append(1), goes_on))
    await until(lambda: len(beats) >= expected)
    await asyncio.sleep(0.05)  # no more may come of a thread that hangs
    beating.cancel()
    with suppress(asyncio.CancelledError):
        await beating
    return len(beats)


def test_a_loop_beats_no_more_for_a_thread_that_hangs(monkeypatch):
    assert asyncio.run(_beats(monkeypatch, SignsOfThread().goes_on, 1)) == 1
    assert asyncio.run(asyncio.wait_for(_beats(monkeypatch, lambda: True, 2), PATIENCE_S)) > 1


def test_who_follows_logs_gives_signs_with_each_frame_and_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    signs = SignsOfThread()
    follower = Follower(
        tmp_path, 1, Modes(Mode.BODIES, {}), Retention(1e9, 1 << 40, 1 << 40), Consumers(tmp_path, ()), signs=signs
    )
    follower.open()
    log = open_log(tmp_path, (0,))
    turns = Turns((0,), 3)
    for _ in range(20):
        turns.turn(log.stores, log.commit)
    crash(log)
    for _ in range(3):
        signs.goes_on()
        follower.cycle()
        assert signs.goes_on()
    follower.close()
