"""Answers leave in the order of their turns, each after the commit of its turn and all earlier ones."""

from hypothesis import given
from hypothesis import strategies as st

from broker.metrics import WorkerMetrics
from broker.worker.commits import TURNS_TOGETHER, Commits

BYTES_TOGETHER = 1000


class Log:
    """Commits what the turns have staged: at once, or when it is waited for or asked."""

    together_bytes = BYTES_TOGETHER

    def __init__(self):
        self.staged = []
        self.under_way = []
        self.durable = []
        self.is_slow = False
        self.is_written = False  # what is under way
        self.waits = 0
        self.commits = 0

    @property
    def is_committing(self):
        return bool(self.under_way)

    def begin_commit(self, time_ms):
        assert not self.under_way, "one commit at a time"
        if not self.staged:
            return False
        self.staged, self.under_way = [], self.staged
        self.is_written = False
        self.commits += 1
        if not self.is_slow:
            self.is_written = True
            self.end_commit(wait=False)
        return True

    def end_commit(self, wait=True):
        self.waits += wait and self.is_committing
        if wait or self.is_written:
            self.durable += self.under_way
            self.under_way = []


turns = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from((0, BYTES_TOGETHER // 2))))


@given(turns)
def test_answers_leave_in_order_after_their_commit(turns):
    log, metrics = Log(), WorkerMetrics()
    answers, left = [], []

    def hold():
        held = answers.copy()
        answers.clear()
        return held

    def release(held):
        for turn in held:
            # Whatever was applied up to this turn may have been read for the answer.
            assert [each for each in log.durable if each <= turn] == [each for each in everything if each <= turn]
            left.append(turn)

    commits = Commits(log, metrics, hold, release)
    everything = []
    for turn, (changes, is_slow, is_done_meanwhile, came_bytes) in enumerate(turns):
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
        answers.append(turn)
        waits = log.waits
        commits.end_turn(1.0, 1, came_bytes, turn)
        assert log.waits == waits, "the next turn may have to wait, but this one is applied"
        assert turn - len(left) < 2 * TURNS_TOGETHER, "turns of this commit and the next"
    commits.finish()
    assert left == list(range(len(turns)))
    assert log.durable == everything
    assert metrics.commits == log.commits <= len(everything)


@given(st.integers(1, 2 * TURNS_TOGETHER), st.integers(0, BYTES_TOGETHER))
def test_turns_go_into_the_next_commit_until_they_are_enough(turns, came_bytes):
    log, metrics = Log(), WorkerMetrics()
    left = []
    answers = []

    def hold():
        held = answers.copy()
        answers.clear()
        return held

    commits = Commits(log, metrics, hold, left.append)
    log.is_slow = True
    for turn in range(turns + 1):  # the disk writes the first one meanwhile
        commits.go_on()
        log.staged.append(turn)
        answers.append(turn)
        commits.end_turn(float(turn), 3, came_bytes, turn)
        if log.waits:
            break
    together = min(turns, TURNS_TOGETHER, -(-BYTES_TOGETHER // came_bytes) if came_bytes else turns)
    if turns > together:
        assert (left, log.under_way) == ([[0]], list(range(1, together + 1)))
    else:
        assert (left, log.under_way, log.waits) == ([], [0], 0)
    commits.finish()
    assert [turn for held in left for turn in held] == log.durable
