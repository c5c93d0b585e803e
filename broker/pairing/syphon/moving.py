"""The messages of one backlog queue on their way: what is sent next, together with what, and what becomes of it.

It holds the messages that we have locked, by sequence number. A lock that is lost does no harm: as long as we have the
lease of the queue, the message comes again to us, and is known. What the primary has taken is known, too, until the
backlog has forgotten it: so it is completed without being sent again.

Nothing here waits: outcomes and the time are told, and what is to be done can be read off. `to_complete`, `to_defer`,
`to_put_back` and `to_dead_letter` are messages to be settled, and `failures` are to be logged; who does that empties
the list.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from broker.pairing.aliases import Restored
from broker.pairing.syphon.blame import TOO_LARGE, Blame, Fault
from broker.pairing.syphon.destinations import Destination, Held, Lane, State
from protocol.message.batches import MAX_BATCH_MESSAGES, batch_bytes

# Batches on their way at once, of messages without a key to one destination; of a key it is one.
KEYLESS_BATCHES: Final = 4
BATCH_BYTES: Final = 256 << 10
# Of a destination's deferred messages that are fetched at once. Halved if they have too many bytes for one answer.
FETCH_MESSAGES: Final = 200
MAX_TAKEN: Final = 100_000  # messages whose completion was lost and that have not come again, at most


@dataclass(slots=True)
class Batch:
    """Messages of one lane that are sent in one transfer."""

    lane: Lane
    held: list[Held]
    era: int


class DeadLetter(NamedTuple):
    held: Held
    reason: str
    text: str


class Failed(NamedTuple):
    """A destination takes no messages for now. `is_first`: it did before."""

    destination: str
    text: str
    is_first: bool


class Fetch(NamedTuple):
    """Deferred messages to be locked, by their sequence numbers."""

    destination: Destination
    numbers: list[int]


class Mover:
    """`taken` has the messages that the primary took and the backlog has not forgotten yet, of earlier movers, too: the
    times when they came to the backlog, by sequence number.
    """

    def __init__(self, taken: dict[int, int]) -> None:
        self._taken = taken
        self._destinations: dict[str, Destination] = {}
        self._held: dict[int, Held] = {}
        self._ready: dict[Lane, None] = {}
        self._waiting: dict[Destination, None] = {}  # for the end of their waits
        self._unshelving: dict[Destination, None] = {}
        self._fetch_messages = FETCH_MESSAGES
        self.held_bytes = 0
        self.shelved = 0  # messages on all shelves
        self.aside = 0  # messages that are deferred, or are being deferred, or were and are not settled yet
        self.in_flight = 0
        self.to_complete: list[Held] = []
        self.to_defer: list[Held] = []
        self.to_put_back: list[Held] = []
        self.to_dead_letter: list[DeadLetter] = []
        self.failures: list[Failed] = []

    def __len__(self) -> int:
        """The number of messages that we hold."""
        return len(self._held)

    # -- what comes

    def take(self, source: Any, restored: Restored, now_ms: int, *, shelved: bool = False) -> None:
        """We have got this message of the backlog, locked, perhaps once more; `shelved` if it was deferred."""
        number = restored.number
        held = self._held.get(number)
        if held is not None:
            held.source, held.locked_ms = source, now_ms  # the lock that we had is lost
            return
        destination = self._destination(restored.path)
        held = Held(restored, source, destination.lane(restored.key), shelved, now_ms)
        self._held[number] = held
        destination.held += 1
        self.held_bytes += held.size
        if self._taken.get(number) == restored.enqueued_ms:
            self._drop(held)
            self.to_complete.append(held)
        elif destination.fault is not None:
            self.to_dead_letter.append(DeadLetter(held, destination.fault.reason, destination.fault.text))
        elif destination.defers and not shelved:
            self._defer(held)
        else:
            held.lane.waiting.append(held)
            self._wake(held.lane)

    def put_on_shelf(self, path: str, numbers: Sequence[int], now_ms: int) -> None:
        """Put messages that were found deferred on the shelf of their destination."""
        destination = self._destination(path)
        destination.shelf.put(numbers)
        self.shelved += len(numbers)
        self.aside += len(numbers)
        destination.shelve(now_ms)
        self._waiting[destination] = None
        self._shelve_lanes(destination)

    def aging(self, before_ms: int) -> list[Held]:
        """Messages that wait and that we have locked, or renewed, before that time."""
        return [each for each in self._held.values() if each.locked_ms < before_ms and each.message]

    # -- what is sent

    def ready(self) -> Lane | None:
        """A lane whose messages can be sent now."""
        while self._ready:
            lane = next(iter(self._ready))
            if self._sends(lane):
                return lane
            del self._ready[lane]
        return None

    def hold(self, lane: Lane) -> None:
        """The lane is not ready until `opened`, because there is no way to its destination yet."""
        self._ready.pop(lane, None)

    def opened(self, path: str) -> None:
        """There is a way to the destination now."""
        destination = self._destinations.get(path.lower())
        if destination is not None:
            self._wake_all(destination)

    def next_batch(self, lane: Lane, limit_bytes: int, most: int) -> Batch | None:
        """The next messages of a ready lane, at most so many, in at most so many bytes. None if there are none now."""
        held = self._next_part(lane, limit_bytes, most)
        if not held:
            self._ready.pop(lane, None)
            self._tidy(lane)
            return None
        lane.in_flight += 1
        destination = lane.destination
        destination.in_flight += 1
        self.in_flight += 1
        if not self._sends(lane):
            self._ready.pop(lane, None)
        return Batch(lane, held, destination.era)

    def _next_part(self, lane: Lane, limit_bytes: int, most: int) -> list[Held]:
        if lane.parts:
            part = lane.parts.popleft()
            if len(part) > most:
                lane.parts.appendleft(part[most:])
                del part[most:]
            return part
        waiting = lane.waiting
        most = min(most, MAX_BATCH_MESSAGES)
        enough_bytes = min(limit_bytes, BATCH_BYTES)
        part, size = [], 0
        while waiting and len(part) < most:
            held = waiting[0]
            if held.size > limit_bytes:
                waiting.popleft()
                text = f"The message has {held.size} bytes; {lane.destination.name} takes {limit_bytes}."
                self.to_dead_letter.append(DeadLetter(held, TOO_LARGE, text))
                continue
            size += batch_bytes(held.size)
            if part and size > enough_bytes:
                break
            part.append(waiting.popleft())
        return part

    # -- what becomes of it

    def accepted(self, batch: Batch) -> None:
        """The primary has taken all messages of the batch."""
        self._landed(batch)
        lane = batch.lane
        lane.destination.taken(batch.era)
        taken = self._taken
        for held in batch.held:
            taken[held.number] = held.enqueued_ms
            self._drop(held)
        while len(taken) > MAX_TAKEN:
            del taken[next(iter(taken))]
        self.to_complete += batch.held
        self._wake(lane)

    def failed(self, batch: Batch, fault: Fault, now_ms: int) -> None:
        """The batch was refused, or has no known outcome."""
        self._landed(batch)
        lane, held = batch.lane, batch.held
        match fault.blame:
            case Blame.MESSAGE if len(held) == 1:
                self.to_dead_letter.append(DeadLetter(held[0], fault.reason, fault.text))
            case Blame.MESSAGE:
                half = len(held) // 2
                lane.parts.appendleft(held[half:])
                lane.parts.appendleft(held[:half])
            case Blame.DESTINATION:
                lane.parts.appendleft(held)
                self._give_up(lane.destination, fault)
            case Blame.MOMENT:
                lane.parts.appendleft(held)
                self._fail(lane.destination, batch.era, fault, now_ms)
            case Blame.PRIMARY:
                lane.parts.appendleft(held)
        if lane.destination.defers:
            self._shelve_lanes(lane.destination)
        self._wake(lane)

    def unreachable(self, path: str, era: int, fault: Fault, now_ms: int) -> None:
        """There is no way to the destination, as was tried in this era of it."""
        destination = self._destinations.get(path.lower())
        if destination is None:
            return
        if fault.blame in (Blame.MESSAGE, Blame.DESTINATION):
            self._give_up(destination, fault)
        elif fault.blame is Blame.MOMENT:
            self._fail(destination, era, fault, now_ms)
            if destination.defers:
                self._shelve_lanes(destination)

    def _landed(self, batch: Batch) -> None:
        batch.lane.in_flight -= 1
        batch.lane.destination.in_flight -= 1
        self.in_flight -= 1

    def _fail(self, destination: Destination, era: int, fault: Fault, now_ms: int) -> None:
        if era == destination.era:
            self.failures.append(Failed(destination.name, fault.text, is_first=not destination.failures))
        destination.failed(era, now_ms)
        if destination.retry_ms is not None:
            self._waiting[destination] = None

    def _give_up(self, destination: Destination, fault: Fault) -> None:
        for held in self._emptied_lanes(destination):
            self.to_dead_letter.append(DeadLetter(held, fault.reason, fault.text))

    def _shelve_lanes(self, destination: Destination) -> None:
        """Messages of the shelf that nobody waits for go back there; others are deferred.

        While the shelf is emptied, only those of the shelf are in lanes.
        """
        if destination.state is State.UNSHELVING:
            return
        for held in self._emptied_lanes(destination):
            if held.is_shelved:
                self.to_put_back.append(held)
            else:
                self._defer(held)

    def _defer(self, held: Held) -> None:
        held.lane.destination.deferring += 1
        self.aside += 1
        self.to_defer.append(held)

    def _emptied_lanes(self, destination: Destination) -> list[Held]:
        """All messages that wait for being sent, those of each lane in order; none waits any more."""
        found: list[Held] = []
        for lane in list(destination.lanes.values()):
            for part in lane.parts:
                found += part
            found += lane.waiting
            lane.parts.clear()
            lane.waiting.clear()
            self._ready.pop(lane, None)
            self._tidy(lane)
        return found

    # -- settlements

    def settled(self, held: Iterable[Held]) -> None:
        """The backlog has completed or dead-lettered them."""
        for each in held:
            self.aside -= each.is_shelved
            self._forget(each)

    def deferred(self, held: Sequence[Held]) -> None:
        """The backlog has deferred them."""
        for each in held:
            destination = each.lane.destination
            destination.deferring -= 1
            destination.shelf.put((each.number,))
            self.shelved += 1
            self._waiting_again(destination)
            self._forget(each)

    def put_back(self, held: Sequence[Held]) -> None:
        """Put back messages that were fetched from the shelf, and are there again, or soon will be."""
        for each in held:
            each.lane.destination.shelf.put((each.number,))
            self.shelved += 1
            self._forget(each)

    def completion_lost(self, held: Held, source: Any) -> None:
        """The backlog has not completed the message with this lock. It comes again, and is completed then."""
        if held.source is not source:
            self.to_complete.append(held)
        elif held.is_shelved:
            self._shelve_again(held)
        else:
            self._forget(held, is_known=False)

    def deferral_lost(self, held: Held, source: Any) -> None:
        if held.source is not source:
            self.to_defer.append(held)
        else:
            held.lane.destination.deferring -= 1
            self.aside -= 1
            self._forget(held, is_known=False)

    def dead_letter_lost(self, dead_letter: DeadLetter, source: Any) -> None:
        held = dead_letter.held
        if held.source is not source:
            self.to_dead_letter.append(dead_letter)
        elif held.is_shelved:
            self._shelve_again(held)
        else:
            self._forget(held, is_known=False)

    def _shelve_again(self, held: Held) -> None:
        destination = held.lane.destination
        destination.shelf.put((held.number,))
        self.shelved += 1
        self._waiting_again(destination)
        self._forget(held, is_known=False)

    def _forget(self, held: Held, *, is_known: bool = True) -> None:
        """We do not hold it any more. `is_known`: the primary, if it has it, need not be asked of it again."""
        del self._held[held.number]
        if is_known:
            self._taken.pop(held.number, None)
        self._drop(held)
        destination = held.lane.destination
        destination.held -= 1
        self._tidy(held.lane)
        self._settle_down(destination)

    def _drop(self, held: Held) -> None:
        """We need the message itself no more."""
        if held.message:
            self.held_bytes -= held.size
            held.message = b""

    # -- the shelves

    def tick(self, now_ms: int) -> None:
        """Let the time pass."""
        for destination in list(self._waiting):
            destination.tick(now_ms)
            if destination.retry_ms is None:
                del self._waiting[destination]
                self._waiting_again(destination)
                self._wake_all(destination)
                self._settle_down(destination)

    def deadline_ms(self, now_ms: int) -> int | None:
        """When `tick` must be called next, besides after every other call."""
        due = [each.retry_ms for each in self._waiting if each.retry_ms is not None and each.retry_ms > now_ms]
        return min(due, default=None)

    def fetches(self, room: int) -> Iterator[Fetch]:
        """Deferred messages that should be locked now, at most so many."""
        for destination in list(self._unshelving):
            if room <= 0:
                return
            most = min(room, self._fetch_messages)
            if destination.is_fetching or destination.held > most // 2 or not len(destination.shelf):
                self._settle_down(destination)
                continue
            destination.is_fetching = True
            # Who has waited longest is first.
            del self._unshelving[destination]
            self._unshelving[destination] = None
            numbers = destination.shelf.take(most)
            self.shelved -= len(numbers)
            room -= len(numbers)
            yield Fetch(destination, numbers)

    def fetched(self, fetch: Fetch, missing: Sequence[int] = (), *, unlocked: Sequence[int] = ()) -> None:
        """The fetch is done: `take` got what was found. `missing` are gone, and `unlocked` are to be tried again."""
        destination = fetch.destination
        destination.is_fetching = False
        destination.shelf.put(unlocked)
        self.shelved += len(unlocked)
        if not unlocked:
            self._fetch_messages = min(2 * self._fetch_messages, FETCH_MESSAGES)
        self.aside -= len(missing)
        for number in missing:
            self._taken.pop(number, None)
        self._settle_down(destination)

    def fetch_less(self) -> None:
        """A fetch had too many bytes."""
        self._fetch_messages = max(1, self._fetch_messages // 2)

    def _waiting_again(self, destination: Destination) -> None:
        if destination.state is State.UNSHELVING:
            self._unshelving[destination] = None

    def _settle_down(self, destination: Destination) -> None:
        destination.emptied()
        if destination.state is not State.UNSHELVING:
            self._unshelving.pop(destination, None)
        if destination.is_idle and not destination.deferring and not destination.is_fetching:
            self._destinations.pop(destination.name.lower(), None)
            self._waiting.pop(destination, None)

    # -- the end

    def release(self) -> list[Held]:
        """Give up all messages that wait for being sent, and return those that are to be released.

        Those of shelves are in `to_put_back`. Nothing may be in flight.
        """
        assert not self.in_flight
        released: list[Held] = []
        for destination in list(self._destinations.values()):
            for held in self._emptied_lanes(destination):
                if held.is_shelved:
                    self.to_put_back.append(held)
                else:
                    released.append(held)
        for held in released:
            self._forget(held, is_known=False)
        return released

    # -- lanes

    def _destination(self, path: str) -> Destination:
        key = path.lower()
        found = self._destinations.get(key)
        if found is None:
            found = self._destinations[key] = Destination(path)
        return found

    def _sends(self, lane: Lane) -> bool:
        most = KEYLESS_BATCHES if lane.key is None else 1
        return not lane.is_empty and lane.in_flight < most and lane.destination.sends

    def _wake(self, lane: Lane) -> None:
        if self._sends(lane):
            self._ready[lane] = None
        elif lane.is_empty:
            self._tidy(lane)

    def _wake_all(self, destination: Destination) -> None:
        for lane in list(destination.lanes.values()):
            self._wake(lane)

    def _tidy(self, lane: Lane) -> None:
        if lane.is_empty and not lane.in_flight and lane.destination.lanes.get(lane.key) is lane:
            del lane.destination.lanes[lane.key]
