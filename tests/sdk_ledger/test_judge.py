"""Each breach that the judge of an SDK's ledger knows, and what excuses it."""

import pytest

from tests.sdk_ledger.judge import Entity, Judge, Outage

LOCK_S = 30.0
KILL = Outage("broker.worker", 100.0, 110.0, frees=True)
ELSEWHERE = Outage("storage.log.checkpointer", 100.0, 110.0, frees=False)


class Story:
    """Lines of a ledger: each call takes a second and ends at `at`, unless said otherwise."""

    def __init__(self, entity: str = "plain") -> None:
        self.entity = entity
        self.lines: list[dict] = []

    def send(self, *ids: str, at: float = 1.0, took: float = 0.5, error: str = "") -> "Story":
        line = {"entity": self.entity, "ids": ids, "session": "s" if self.entity == "sessions" else None}
        self.lines.append({"what": "sending", "at": at - took, **line})
        self.lines.append({"what": "sent", "at": at, "took": took, "error": error, **line})
        return self

    def receive(self, id: str, number: int = 1, *, at: float = 2.0, lock: float | None = None, **other) -> "Story":
        """`lock`: when it was handed out."""
        handed_out = at if lock is None else lock
        line = {"what": "received", "at": at, "entity": self.entity, "receiver": "r", "dead": False, "id": id}
        line |= {"number": number, "count": 1, "token": f"{number}-{handed_out}", "until": handed_out + LOCK_S}
        self.lines.append(line | {"session": "s" if self.entity == "sessions" else None, "sound": True} | other)
        return self

    def settle(self, outcome: str, *, at: float = 3.0, took: float = 0.5, error: str = "") -> "Story":
        """The delivery received last."""
        return self.ask(outcome, at=at - took).answer(at=at, took=took, error=error)

    def ask(self, outcome: str, *, at: float) -> "Story":
        received = next(line for line in reversed(self.lines) if line["what"] == "received")
        line = {name: received[name] for name in ("entity", "dead", "number", "token")}
        self.lines.append({"what": "settling", "at": at, "outcome": outcome, **line})
        return self

    def answer(self, *, at: float, took: float = 0.5, error: str = "", which: int = -1) -> "Story":
        asked = [line for line in self.lines if line["what"] == "settling"][which]
        self.lines.append({**asked, "what": "settled", "at": at, "took": took, "error": error})
        return self

    def session(self, *, at: float) -> "Story":
        line = {"what": "session", "at": at, "entity": self.entity, "receiver": "r", "session": "s"}
        self.lines.append(line | {"until": at + LOCK_S})
        return self

    def judge(self, *outages: Outage):
        entities = {
            "plain": Entity(LOCK_S),
            "sessions": Entity(LOCK_S, has_sessions=True, detects_duplicates=True),
        }
        return Judge(entities, outages).judge(self.lines)

    def breaches(self, *outages: Outage) -> str:
        return "\n".join(self.judge(*outages).breaches)


def test_a_message_that_was_sent_received_and_completed_is_no_breach():
    report = Story().send("m").receive("m").settle("complete").judge()
    assert not report.breaches
    assert not report.long_calls
    assert report.counts["accepted"] == report.counts["complete confirmed"] == 1


def test_an_accepted_message_that_never_came_or_never_ended_is_lost():
    assert "plain m: accepted and lost, 0 copies" in Story().send("m").breaches(KILL)
    assert "accepted and lost, 1 copies" in Story().send("m").receive("m").settle("abandon").breaches()
    refused = Story().send("m").receive("m").settle("complete", error="MessageLockLost")
    assert "accepted and lost" in refused.breaches(KILL)


def test_a_completion_that_failed_in_an_outage_may_have_been_done():
    story = Story().send("m").receive("m", at=99.0).settle("complete", at=105.0, took=5.5, error="MessageLockLost")
    assert not story.breaches(KILL)
    assert "accepted and lost" in story.breaches()


def test_a_message_that_was_not_accepted_may_come_or_not():
    assert not Story().send("m", error="ServiceTimeout").breaches()
    assert not Story().send("m", error="ServiceTimeout").receive("m").settle("complete").breaches()
    story = Story().send("m", error="ServiceTimeout").receive("m", 1).settle("complete").receive("m", 2)
    assert not story.settle("complete").breaches()


@pytest.mark.parametrize("outages", [(), (KILL,)])
@pytest.mark.parametrize("outcome", ["complete", "dead-letter"])
def test_nothing_excuses_that_what_ended_comes_again(outcome, outages):
    story = Story().send("m").receive("m").settle(outcome, at=101.0).receive("m", at=105.0)
    assert f"handed out again after it was confirmed as {outcome}" in story.breaches(*outages)


def test_an_older_delivery_that_is_read_late_is_no_new_one():
    story = Story().send("m").receive("m", at=40.0, lock=40.0).settle("complete", at=41.0)
    assert not story.receive("m", at=50.0, lock=5.0).settle("complete", at=51.0, error="MessageLockLost").breaches()


def test_two_confirmed_completions_are_never_right():
    story = Story().send("m").receive("m", at=99.0).receive("m", at=105.0).settle("complete", at=106.0)
    assert not story.breaches(KILL)
    story.lines += [{**line, "token": "1-99.0"} for line in story.lines if line["what"] in ("settling", "settled")]
    assert "confirmed 2 times as ['complete', 'complete']" in story.breaches(KILL)


def test_a_message_is_handed_out_again_when_its_lock_has_ended():
    early, late = (
        Story().send("m").receive("m").receive("m", at=at).settle("complete", at=50.0) for at in (31.0, 31.9)
    )
    assert "handed out again 1.00 s before its lock ended" in early.breaches()
    assert not late.breaches()


def test_a_lock_ends_with_the_process_that_held_it_and_with_an_abandon():
    story = Story().send("m").receive("m", at=95.0).receive("m", at=105.0).settle("complete", at=106.0)
    assert "before its lock ended" in story.breaches()
    assert not story.breaches(KILL)
    assert "before its lock ended" in story.breaches(ELSEWHERE), "a checkpointer has no locks"
    assert not Story().send("m").receive("m").settle("abandon").receive("m", at=4.0).settle("complete").breaches()
    asked = Story().send("m").receive("m").ask("abandon", at=3.0).receive("m", at=4.0).settle("complete", at=5.0)
    assert not asked.answer(at=6.0, which=0).breaches(), "an abandon may be done before its answer"


def test_a_message_that_was_sent_once_is_there_twice_only_if_its_call_met_an_outage():
    story = Story().send("m", at=105.0, took=10.0).receive("m", 1, at=106.0).settle("complete", at=107.0)
    story.receive("m", 2, at=106.0).settle("complete", at=107.0)
    assert "plain m: sent once and there 2 times" in story.breaches()
    assert not story.breaches(KILL)


def test_where_duplicates_are_detected_there_is_one_whatever_happened():
    story = Story("sessions").session(at=1.0).send("x/1", at=105.0, took=10.0).receive("x/1", 1).settle("complete")
    story.receive("x/1", 2).settle("complete")
    assert "sessions x/1: sent once and there 2 times" in story.breaches(KILL)


def test_what_nobody_sent_or_what_has_changed_is_told():
    assert "never sent" in Story().receive("m").settle("complete").breaches()
    assert "not as it was sent" in Story().send("m").receive("m", sound=False).settle("complete").breaches()


def test_dead_letters_are_those_that_somebody_put_there():
    story = Story().send("m").receive("m").settle("dead-letter")
    assert "confirmed as dead-lettered, not in the dead-letter queue" in story.breaches()
    assert not story.receive("m", dead=True, at=9.0).settle("complete", at=10.0).breaches()
    nobody = Story().send("m").receive("m").settle("complete").receive("m", dead=True, at=9.0)
    assert "though nobody put it there" in nobody.breaches()


def test_messages_of_a_session_come_in_their_order():
    story = Story("sessions").send("x/1", "x/2").session(at=2.0).receive("x/2", 2)
    assert "came before 1, which was accepted" in story.breaches()


def test_a_message_of_a_session_that_somebody_else_has_by_now_is_not_judged_by_order():
    story = Story("sessions").send("x/1", "x/2").session(at=2.0).receive("x/1", at=3.0, lock=2.0).settle("complete")
    story.session(at=105.0).receive("x/2", 2, at=106.0, lock=105.0).settle("complete", at=107.0)
    story.receive("x/2", 2, at=108.0, lock=2.0).settle("complete", at=109.0, error="SessionLockLost")
    report = story.judge(KILL)
    assert not report.breaches
    assert report.counts["late"] == 1


def test_long_calls_and_answers_that_the_broker_is_busy_are_listed():
    story = Story().send("m", at=30.0, took=10.0).receive("m").settle("complete")
    story.lines.append({"what": "retry", "at": 3.0, "error": "Azure... (ServiceBusy). For troubleshooting"})
    story.lines.append({"what": "retry", "at": 3.0, "error": "a connection was lost"})
    report = story.judge(KILL)
    assert [call.took for call in report.long_calls] == [10.0]
    assert len(report.busy) == 1
    assert "calls of 10 s and more: 1" in str(report)
