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

    @property
    def is_committing(self):
        return bool(self.under_way)

    def begin_commit(self, time_ms):
        assert not self.under_way, "one commit at a time"
        if not self.staged:
            return False
        self.staged, self.under_way = [], self.staged
        if not self.is_slow:
            self.end_commit()
        return True

    def end_commit(self):
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
        if is_done_meanwhile:
            log.end_commit()
        if changes:
            log.staged.append(turn)
            everything.append(turn)
        answers.append((turn, changes))
        commits.end_turn(1.0, 1, turn)
        assert turn - len(left) <= 0, "at most the last turn's answers wait"
    commits.finish()
    assert left == list(range(len(turns)))
    assert log.durable == everything
    assert metrics.commits == len(everything)
