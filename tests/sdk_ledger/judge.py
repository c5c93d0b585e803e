"""The ledger of an SDK's senders and processors over kills, and what a broker may do.

Pure. The ledger is a list of lines, in the order in which one program saw them; times are Unix seconds, of the broker's
machine. Each line has `what` and `at`, and

sending, sent    entity, session, ids; `sent` has also took (s), and error, empty if it was accepted
received         entity, receiver, dead (out of the dead-letter queue), id, number, count, token, until, session, sound
settling, settled  entity, dead, number, token, outcome; `settled` has also took and error
session          entity, receiver, session, until: a receiver got the session
error, retry, idle, held up    what the SDK told, and what the program noticed of itself

An SDK sends again what was not answered, and processors work at once, so the order on the wire is not known. But the
end of a lock tells when its delivery was handed out: the lock's duration earlier. So of two deliveries of a message
that one is later whose lock ends later, whenever a program reads it.

What must be:

- A message that was accepted is received, and ends: its completion is confirmed, or its dead-lettering is and it is in
  the dead-letter queue. Once is enough: a settlement that failed in an outage may have been done.
- What was confirmed as completed or dead-lettered is not handed out again, and not confirmed a second time. Nothing
  excuses that.
- A message is handed out again only if the lock of the delivery before has ended. A lock ends by its time, by a
  settlement, or with the processes that held it: those of its partition's worker, which has all locks in its memory,
  and of the gateway whose link had it.
- A message that was sent once is there once. An SDK that gets no answer sends again, so there may be more if its call
  was not accepted, or was under way in an outage; where the broker detects duplicates, there is one all the same.
- Messages of a session come in their order (`tests.crash_ledger.books.Order`).
- What comes was sent, as it was sent. Nothing is in a dead-letter queue that nobody put there.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash_ledger.books import Order

Line = Mapping[str, Any]
LONG_CALL_S = 10.0
CLOCK_S = 0.5  # ends of locks are told in wall time, from which a partition's clock may differ for a time
ENDINGS = ("complete", "dead-letter")


@dataclass(frozen=True)
class Outage:
    """From a kill until all entities take messages again. `frees`: what was killed has locks, or links with locks."""

    victim: str
    began: float
    ended: float
    frees: bool

    def __str__(self) -> str:
        return f"{self.victim}: recovered after {self.ended - self.began:.2f} s"

    def meets(self, began: float, ended: float) -> bool:
        return began <= self.ended and ended >= self.began


@dataclass(frozen=True)
class Entity:
    lock_s: float
    has_sessions: bool = False
    detects_duplicates: bool = False


@dataclass(frozen=True)
class Call:
    what: str
    entity: str
    began: float
    took: float
    error: str

    @property
    def ended(self) -> float:
        return self.began + self.took

    def __str__(self) -> str:
        return f"{self.what} on {self.entity}: {self.took:.2f} s, {_brief(self.error) or 'accepted'}"


@dataclass
class Settlement:
    outcome: str
    token: str
    until: float  # the end of the lock
    asked: float
    ended: float | None = None
    error: str = ""

    @property
    def is_confirmed(self) -> bool:
        return self.ended is not None and not self.error


@dataclass
class Copy:
    """One stored message. `receipts`: (when, end of the lock, token)."""

    id: str
    session: str | None = None
    receipts: list[tuple[float, float, str]] = field(default_factory=list)
    settlements: dict[str, Settlement] = field(default_factory=dict)  # by token

    def was_asked(self, outcome: str) -> bool:
        return any(each.outcome == outcome for each in self.settlements.values())

    def confirmed_ends(self) -> list[Settlement]:
        return [each for each in self.settlements.values() if each.is_confirmed and each.outcome in ENDINGS]


@dataclass
class Report:
    outages: Sequence[Outage]
    breaches: list[str]
    calls: list[Call]
    counts: Counter[str]
    errors: Counter[str]  # of calls
    told: Counter[str]  # by processors
    busy: list[str]  # what the SDK tried again because the broker said that it is busy, and for which it waits 10 s
    held_up_s: float  # longest time for which the program itself got no processor

    @property
    def long_calls(self) -> list[Call]:
        return [call for call in self.calls if call.took >= LONG_CALL_S]

    def __str__(self) -> str:
        kills = Counter(outage.victim for outage in self.outages)
        longest = sorted(self.calls, key=lambda call: -call.took)[: max(10, len(self.long_calls))]
        lines = [
            f"{len(self.outages)} kills: " + ", ".join(f"{victim} {count}" for victim, count in kills.most_common()),
            *(f"slowest, {each}" for each in sorted(self.outages, key=lambda each: each.began - each.ended)[:1]),
            ", ".join(f"{name} {count:,}" for name, count in self.counts.items()),
            f"calls that failed: {self.errors.total():,} of {len(self.calls):,}",
            *(f"  {count:,} times {text}" for text, count in self.errors.most_common(10)),
            f"errors that processors told: {self.told.total():,}",
            *(f"  {count:,} times {text}" for text, count in self.told.most_common(10)),
            f"answers that the broker is busy: {len(self.busy)}",
            *(f"  {_brief(text)}" for text in self.busy[:5]),
            f"the program got no processor for {self.held_up_s:.1f} s at most",
            f"calls of {LONG_CALL_S:.0f} s and more: {len(self.long_calls)}; the longest:",
            *(f"  {call}{self._during(call)}" for call in longest),
            f"breaches: {len(self.breaches)}",
            *self.breaches[:30],
        ]
        return "\n".join(lines)

    def _during(self, call: Call) -> str:
        return "".join(f", {each.victim} killed" for each in self.outages if each.meets(call.began, call.ended))


class Judge:
    def __init__(self, entities: Mapping[str, Entity], outages: Sequence[Outage]) -> None:
        self._entities = entities
        self._outages = outages
        self._sends: dict[tuple[str, str], Call | None] = {}  # by entity and id; None: not answered
        self._copies: dict[tuple[str, int], Copy] = {}  # by entity and sequence number
        self._dead: Counter[tuple[str, str]] = Counter()  # what came out of dead-letter queues, by entity and id
        self._order = {name: Order() for name, entity in entities.items() if entity.has_sessions}
        self._session_until: dict[tuple[str, str], float] = {}
        self._late: set[str] = set()  # tokens of deliveries of sessions that somebody else has by now
        self._breaches: list[str] = []
        self._calls: list[Call] = []
        self._told: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._busy: list[str] = []
        self._held_up_s = 0.0

    def judge(self, lines: Iterable[Line]) -> Report:
        takes = {
            "sending": self._sending,
            "sent": self._sent,
            "received": self._received,
            "settling": self._settling,
            "settled": self._settled,
            "session": self._session,
            "error": self._error,
            "retry": self._retry,
            "held up": self._held_up,
        }
        for line in lines:
            self._counts[line["what"]] += 1
            if (take := takes.get(line["what"])) is not None:
                take(line)
        for copy in self._copies.items():
            self._judge_copy(*copy)
        self._judge_sends()
        for name, order in self._order.items():
            order.close()
            self._breaches += [f"{name}: in its session, {breach}" for breach in order.breaches]
        return Report(
            self._outages,
            self._breaches,
            self._calls,
            self._counts,
            Counter(f"{call.what}: {_brief(call.error)}" for call in self._calls if call.error),
            self._told,
            self._busy,
            self._held_up_s,
        )

    def in_outage(self, began: float, ended: float, *, frees: bool = False) -> bool:
        return any(outage.meets(began, ended) for outage in self._outages if outage.frees or not frees)

    # --- lines

    def _sending(self, line: Line) -> None:
        for each in line["ids"]:
            self._sends[line["entity"], each] = None

    def _sent(self, line: Line) -> None:
        call = self._called("send", line)
        for each in line["ids"]:
            self._sends[line["entity"], each] = call
            if not call.error:
                self._counts["accepted"] += 1
                if line["entity"] in self._order:
                    self._order[line["entity"]].accepted(_key(line["session"], each))

    def _received(self, line: Line) -> None:
        entity, number, token = line["entity"], line["number"], line["token"]
        name = f"{entity} {number}, {line['id']}"
        if (entity, line["id"]) not in self._sends:
            self._breaches.append(f"{name}: never sent")
        if not line["sound"]:
            self._breaches.append(f"{name}: its body is not as it was sent")
        if line["dead"]:
            self._dead[entity, line["id"]] += 1
            return
        copy = self._copies.setdefault((entity, number), Copy(line["id"], line["session"]))
        if copy.id != line["id"]:
            self._breaches.append(f"{name}: has the number of {copy.id}")
        copy.receipts.append((line["at"], line["until"], token))
        if entity in self._order:
            if line["until"] < self._session_until.get((entity, line["session"]), 0.0) - CLOCK_S:
                self._late.add(token)
                self._counts["late"] += 1
            else:
                self._order[entity].delivered(_key(line["session"], line["id"]))

    def _settling(self, line: Line) -> None:
        if line["dead"]:
            return
        copy = self._copies[line["entity"], line["number"]]
        until = next(until for _, until, token in reversed(copy.receipts) if token == line["token"])
        copy.settlements[line["token"]] = Settlement(line["outcome"], line["token"], until, line["at"])
        if self._ends_in_order(line):
            self._order[line["entity"]].completing(_key(copy.session, copy.id))

    def _settled(self, line: Line) -> None:
        call = self._called(line["outcome"], line)
        if line["dead"]:
            if not call.error:
                self._counts["completed out of dead-letter queues"] += 1
            return
        copy = self._copies[line["entity"], line["number"]]
        settlement = copy.settlements[line["token"]]
        settlement.ended, settlement.error = line["at"], line["error"]
        if not call.error:
            self._counts[f"{line['outcome']} confirmed"] += 1
        if self._ends_in_order(line):
            order, key = self._order[line["entity"]], _key(copy.session, copy.id)
            if not call.error:
                order.completed(key)
            elif not self.in_outage(settlement.asked, line["at"]) and not copy.confirmed_ends():
                order.not_completed(key)

    def _ends_in_order(self, line: Line) -> bool:
        return line["entity"] in self._order and line["outcome"] in ENDINGS and line["token"] not in self._late

    def _session(self, line: Line) -> None:
        self._session_until[line["entity"], line["session"]] = line["until"]
        self._order[line["entity"]].locked(line["session"])

    def _error(self, line: Line) -> None:
        self._told[f"{line['entity']}, {line['source']}: {_brief(line['error'])}"] += 1

    def _retry(self, line: Line) -> None:
        if "ServiceBusy" in line["error"] or "server-busy" in line["error"]:
            self._busy.append(line["error"])

    def _held_up(self, line: Line) -> None:
        self._held_up_s = max(self._held_up_s, line["took"])

    def _called(self, what: str, line: Line) -> Call:
        call = Call(what, line["entity"], line["at"] - line["took"], line["took"], line["error"])
        self._calls.append(call)
        return call

    # --- what must be

    def _judge_copy(self, at: tuple[str, int], copy: Copy) -> None:
        name, number = at
        entity = self._entities[name]
        title = f"{name} {number}, {copy.id}"
        endings = copy.confirmed_ends()
        if len(endings) > 1:
            self._breaches.append(f"{title}: confirmed {len(endings)} times as {[each.outcome for each in endings]}")
        if endings:
            end = endings[0]
            assert end.ended is not None
            for when, until, token in copy.receipts:
                if when > end.ended and until >= end.until and token != end.token:
                    self._breaches.append(f"{title}: handed out again after it was confirmed as {end.outcome}")
        if not entity.has_sessions:
            self._judge_locks(title, entity, copy)
        if endings and endings[0].outcome == "dead-letter" and not self._dead[name, copy.id]:
            self._breaches.append(f"{title}: confirmed as dead-lettered, not in the dead-letter queue")

    def _judge_locks(self, title: str, entity: Entity, copy: Copy) -> None:
        deliveries = sorted(copy.receipts, key=lambda receipt: receipt[1])
        for (_, ends, token), (when, until, later) in itertools.pairwise(deliveries):
            handed_out = until - entity.lock_s
            settlement = copy.settlements.get(token)
            self._counts["delivered again"] += 1
            if later == token:
                self._breaches.append(f"{title}: delivered twice with one lock")
            elif (
                handed_out < ends - CLOCK_S
                and not (settlement is not None and settlement.asked <= when)
                and not self.in_outage(ends - entity.lock_s, when, frees=True)
            ):
                self._breaches.append(f"{title}: handed out again {ends - handed_out:.2f} s before its lock ended")

    def _judge_sends(self) -> None:
        copies: dict[tuple[str, str], list[Copy]] = defaultdict(list)
        for (entity, _), copy in self._copies.items():
            copies[entity, copy.id].append(copy)
        for at, call in self._sends.items():
            found = copies[at]
            if call is None or call.error:
                may_be_twice = True
            else:
                may_be_twice = self.in_outage(call.began, call.ended)
                if not self._dead[at] and not any(self._may_have_ended(copy) for copy in found):
                    self._breaches.append(f"{at[0]} {at[1]}: accepted and lost, {len(found)} copies were received")
            if self._dead[at] > sum(copy.was_asked("dead-letter") for copy in found):
                self._breaches.append(f"{at[0]} {at[1]}: in the dead-letter queue though nobody put it there")
            if len(found) > 1:
                self._counts["there twice"] += 1
                if self._entities[at[0]].detects_duplicates or not may_be_twice:
                    self._breaches.append(f"{at[0]} {at[1]}: sent once and there {len(found)} times")

    def _may_have_ended(self, copy: Copy) -> bool:
        """A confirmed end; or one that was asked for and not refused for sure."""
        return any(
            each.is_confirmed or each.ended is None or self.in_outage(each.asked, each.ended)
            for each in copy.settlements.values()
            if each.outcome in ENDINGS
        )


def _key(session: str | None, message_id: str) -> tuple[str, int]:
    assert session is not None
    return session, int(message_id.rpartition("/")[2])


def _brief(error: str) -> str:
    """Without what differs from call to call."""
    return error.split(". ")[0].split("\n")[0][:150]
