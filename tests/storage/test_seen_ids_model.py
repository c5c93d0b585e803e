"""Message ids that were seen, against a dict: ids, clock steps, windows, work in steps, commits and restarts."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.records import NEVER
from storage.seen_ids import PURGE_EVERY_MS
from storage.seen_runs import SeenLimits
from tests.models import model_settings
from tests.storage.seen_ids_driver import TABLES, Ids, digests

# Some differ in one half only, some in the last byte; two are the lowest and the highest that there are.
DIGESTS = sorted(
    {first[:8] + second[8:] for first in digests(3, 2) for second in digests(4, 3)}
    | {each[:15] + bytes([last]) for each in digests(3, 4) for last in (0, 1, 255)}
    | {bytes(16), b"\xff" * 16}
)


class SeenIdsModel(RuleBasedStateMachine):
    @initialize(
        run_ids=st.integers(1, 5),
        fan_out=st.integers(2, 3),
        chunk_ids=st.integers(1, 3),
        step_ids=st.integers(1, 4),
        filter_bytes=st.sampled_from([0, 64, 1 << 20]),
    )
    def begin(self, run_ids, fan_out, chunk_ids, step_ids, filter_bytes):
        limits = SeenLimits(run_ids, fan_out, chunk_ids, step_ids, filter_bytes=filter_bytes)
        self.ids = Ids(limits)
        self.known: dict[bytes, tuple[int, int]] = {}  # digest: end of the window, number
        self.committed: dict[bytes, tuple[int, int]] = {}

    def now_known(self) -> dict[bytes, int]:
        return {digest: number for digest, (end_ms, number) in self.known.items() if end_ms > self.ids.now_ms}

    @rule(
        sought=st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=9, unique=True),
        window_ms=st.sampled_from([2, 20, 40, 100]),
    )
    def accept(self, sought, window_ms):
        found = self.ids.find(*sought)
        assert found == {digest: number for digest, number in self.now_known().items() if digest in sought}
        new = [digest for digest in sought if digest not in found]
        if new:
            end_ms, numbers = self.ids.now_ms + window_ms, self.ids.add(*new, window_ms=window_ms)
            self.known.update((digest, (end_ms, number)) for digest, number in zip(new, numbers, strict=True))

    @rule(room_bytes=st.sampled_from([NEVER, NEVER, NEVER, 300, 0]), steps=st.sampled_from([1, 2, 100]))
    def work(self, room_bytes, steps):
        for _ in range(steps):
            self.ids.step(room_bytes)

    @rule(ms=st.sampled_from([1, 10, 10, 30, 200]))
    def wait(self, ms):
        self.ids.now_ms += ms

    @rule()
    def commit(self):
        self.ids.store.commit()
        self.committed = dict(self.known)

    @rule(committed=st.booleans())
    def restart(self, committed):
        if committed:
            self.commit()
        self.ids.store.abort()
        self.known = dict(self.committed)
        self.ids.start()

    @invariant()
    def all_are_found_that_are_known(self):
        assert self.ids.find(*DIGESTS) == self.now_known()

    @invariant()
    def memory_is_counted(self):
        ids, memory = self.ids.ids, self.ids.memory
        assert memory.recent_ids == len(ids._recent) + len(ids._cut_off)
        assert memory.filter_bytes <= memory.limits.filter_bytes

    def teardown(self):
        """When the last window has ended nothing is left, neither on disk nor in memory."""
        if not hasattr(self, "ids"):
            return
        self.ids.now_ms += 1000 + PURGE_EVERY_MS
        assert self.ids.work() == NEVER
        assert not any(self.ids.records(table) for table in TABLES)
        assert (self.ids.memory.recent_ids, self.ids.memory.filter_bytes) == (0, 0)


SeenIdsModel.TestCase.settings = model_settings(examples=200, steps=40)
TestSeenIdsModel = SeenIdsModel.TestCase
