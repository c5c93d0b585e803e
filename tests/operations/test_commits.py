"""Answers leave in the order of their turns, each after the commit of its turn and all earlier ones."""

from hypothesis import given
from hypothesis import strategies as st

from broker.metrics import WorkerMetrics
from broker.worker.commits import Commits


class Log:
    """Commits what the turns have staged: at once, or when it is waited for or asked."""

    def __init__(self):
        self.staged = []
        self.under_way = []
        self.durable = []
        self.is_slow = False
        self.is_written = False  # what is under way
        self.waits = 0

    @property
    def is_committing(self):
        return bool(self.under_way)

    def begin_commit(self, time_ms):
        assert not self.under_way, "one commit at a time"
        if not self.staged:
            return False
        self.staged, self.under_way = [], self.staged
        self.is_written = False
        if not self.is_slow:
            self.is_written = True
            self.end_commit(wait=False)
        return True

    def end_commit(self, wait=True):
        self.waits += wait and self.is_committing
        if wait or self.is_written:
            self.durable += self.under_way
            self.under_way = []


turns = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()))


@given(turns)
def test_answers_leave_in_order_after_their_commit(turns):
    log, metrics = Log(), WorkerMetrics()
    answers, left = [], []

    def hold():
        held = answers.copy()
        answers.clear()
        return held

    def release(held):
        for turn, changed in held:
            # Whatever was applied up to this turn may have been read for the answer.
            assert log.durable == [each for each in everything if each <= turn], (turn, changed)
            left.append(turn)

    commits = Commits(log, metrics, hold, release)
    everything = []
    for turn, (changes, is_slow, is_done_meanwhile) in enumerate(turns):
        log.is_slow = is_slow
        waits, must_wait = log.waits, commits.must_wait
        if is_done_meanwhile:
            log.is_written = True
            log.end_commit(wait=False)
            assert not commits.must_wait
        commits.go_on()
        assert log.waits == waits + (must_wait and not is_done_meanwhile)
        if changes:
            log.staged.append(turn)
            everything.append(turn)
        answers.append((turn, changes))
        waits = log.waits
        commits.end_turn(1.0, 1, turn)
        assert log.waits == waits, "the next turn may have to wait, but this one is applied"
        assert turn - len(left) <= 1, "at most the answers of the last two turns wait"
    commits.finish()
    assert left == list(range(len(turns)))
    assert log.durable == everything
    assert metrics.commits == len(everything)
