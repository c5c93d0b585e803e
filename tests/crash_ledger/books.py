"""What a broker may do with transactions, sessions and message ids that it is killed over.

Pure, as the ledger: each book is told what one client saw, in the order in which it saw it, and names breaches. What
was never answered may have happened or not; what was answered must be so.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_NAMED = 20


class Ending(Enum):
    """How a transaction ended, as far as the client knows."""

    COMMITTED = auto()
    UNDONE = auto()  # rolled back by either side, or never discharged and its link closed
    UNKNOWN = auto()


@dataclass
class Book:
    """`breaches` are for people to read."""

    breaches: list[str] = field(default_factory=list)

    def breach(self, text: str) -> None:
        self.breaches.append(text)


@dataclass(frozen=True)
class Link:
    """A message of a chain: it was sent by this transaction, in place of the one with the generation before."""

    chain: int
    generation: int
    transaction: int  # 0: by none, at the beginning


class Chains(Book):
    """Each transaction takes a message of each of some chains and sends its successor: a chain has one message, always.

    - What a transaction sent is there if it was committed, and never if it was undone; all of it or nothing.
    - What it took does not come again once it was committed.
    - At the end each chain has exactly one message.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._moves: dict[int, list[Link]] = {}  # what each transaction sends
        self._endings: dict[int, Ending] = {}
        self._seen: set[Link] = {Link(chain, 0, 0) for chain in range(count)}
        self._past: dict[int, int] = dict.fromkeys(range(count), -1)  # the highest generation taken for good
        self.count = count
        self.committed = 0

    def begun(self, transaction: int, taken: list[Link]) -> list[Link]:
        """The successors that it sends."""
        moves = [Link(link.chain, link.generation + 1, transaction) for link in taken]
        self._moves[transaction] = moves
        return moves

    def ended(self, transaction: int, ending: Ending) -> None:
        self._endings[transaction] = ending
        if ending is not Ending.COMMITTED:
            return
        self.committed += 1
        for link in self._moves[transaction]:
            self._past[link.chain] = max(self._past[link.chain], link.generation - 1)

    def delivered(self, link: Link) -> None:
        if link.transaction and link not in self._moves.get(link.transaction, ()):
            self.breach(f"{link} was never sent")
        if self._endings.get(link.transaction) is Ending.UNDONE:
            self.breach(f"{link} is of a transaction that was rolled back")
        if link.generation <= self._past.get(link.chain, -1):
            self.breach(f"{link} came again though what took it was committed")
        self._seen.add(link)

    def close(self, left: list[Link]) -> None:
        """`left` is all that could be received at the end."""
        by_chain: dict[int, list[Link]] = defaultdict(list)
        for link in left:
            self.delivered(link)
            by_chain[link.chain].append(link)
        for chain in range(self.count):
            if len(by_chain[chain]) != 1:
                self.breach(f"chain {chain} has {len(by_chain[chain])} messages: {by_chain[chain]}")
        for transaction, moves in self._moves.items():
            there = sum(link in self._seen for link in moves)
            if there not in (0, len(moves)):
                self.breach(f"transaction {transaction} was done in part: {there} of {len(moves)} messages")
            elif self._endings.get(transaction) is Ending.COMMITTED and not there:
                self.breach(f"transaction {transaction} was committed and is lost")


Key = tuple[str, int]  # session, number of the message in it


class Order(Book):
    """Messages of sessions, each session sent by one sender with ascending numbers.

    - What was accepted comes, and before what was sent after its acceptance.
    - What was confirmed as completed does not come again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._accepted: dict[str, list[int]] = defaultdict(list)
        self._known: set[Key] = set()
        self._asked: set[Key] = set()
        self._completed: set[Key] = set()
        self._in_lock: dict[str, list[int]] = {}
        self._behind: dict[str, int] = defaultdict(int)  # index in _accepted below which all is asked to be completed

    @property
    def accepted_count(self) -> int:
        return len(self._known)

    @property
    def completed_count(self) -> int:
        return len(self._completed)

    def accepted(self, key: Key) -> None:
        self._accepted[key[0]].append(key[1])
        self._known.add(key)

    def locked(self, session: str) -> None:
        """A receiver has got the session."""
        self._in_lock[session] = []

    def delivered(self, key: Key) -> None:
        session, number = key
        had = self._in_lock[session]
        if key in self._completed:
            self.breach(f"{key} came again after its completion was confirmed")
        if had and number < had[-1] and key in self._known:
            self.breach(f"{key} came after {had[-1]}")
        for missed in self._not_asked(session):
            if missed >= number:
                break
            if missed not in had:
                self.breach(f"{key} came before {missed}, which was accepted")
        had.append(number)

    def _not_asked(self, session: str) -> list[int]:
        numbers = self._accepted[session]
        at = self._behind[session]
        while at < len(numbers) and (session, numbers[at]) in self._asked:
            at += 1
        self._behind[session] = at
        return [number for number in numbers[at:] if (session, number) not in self._asked]

    def completing(self, key: Key) -> None:
        """The broker may do it even if no answer comes."""
        self._asked.add(key)

    def completed(self, key: Key) -> None:
        self._completed.add(key)

    def not_completed(self, key: Key) -> None:
        """The broker has answered that the lock was lost, and no process was killed meanwhile."""
        self._asked.discard(key)
        self._behind[key[0]] = 0

    def close(self) -> None:
        for session in self._accepted:
            for number in self._not_asked(session):
                self.breach(f"{(session, number)} was accepted and is lost")


class Copies(Book):
    """Messages without a key on a partitioned queue. If a fragment does not answer, another one gets its messages, too.

    - What was accepted comes.
    - It comes once, unless a process was killed or stopped between its sending and its acceptance.
    - A copy whose completion was confirmed does not come again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, int | None] = {}  # in which epoch; None: while something was killed or stopped
        self._accepted: dict[int, bool] = {}  # whether nothing was killed or stopped since the sending
        self._copies: dict[int, set[int]] = defaultdict(set)  # sequence numbers
        self._completed: set[int] = set()

    @property
    def accepted_count(self) -> int:
        return len(self._accepted)

    @property
    def completed_count(self) -> int:
        return len(self._completed)

    @property
    def doubled_count(self) -> int:
        return sum(len(copies) > 1 for copies in self._copies.values())

    def sent(self, number: int, epoch: int | None) -> None:
        self._sent[number] = epoch

    def accepted(self, number: int, epoch: int | None) -> None:
        self._accepted[number] = epoch is not None and epoch == self._sent[number]

    def delivered(self, number: int, sequence_number: int) -> None:
        if number not in self._sent:
            self.breach(f"message {number} was never sent")
        if sequence_number in self._completed:
            self.breach(f"message {number} came again after the completion of {sequence_number} was confirmed")
        self._copies[number].add(sequence_number)

    def completed(self, sequence_number: int) -> None:
        self._completed.add(sequence_number)

    def close(self) -> None:
        for number in self._accepted.keys() - self._copies.keys():
            self.breach(f"message {number} was accepted and is lost")
        for number, copies in self._copies.items():
            if len(copies) > 1 and self._accepted.get(number):
                self.breach(f"message {number} is there {len(copies)} times, and nothing was killed or stopped")


class Ids(Book):
    """Messages with ids, sent again whenever an answer is missing and sometimes though it is not.

    - What was accepted comes.
    - An id is that of one message: it always comes with the same sequence number, and not after its completion.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accepted: set[str] = set()
        self.completed: set[str] = set()
        self._numbers: dict[str, int] = {}

    def delivered(self, message_id: str, sequence_number: int) -> None:
        first = self._numbers.setdefault(message_id, sequence_number)
        if first != sequence_number:
            self.breach(f"id {message_id} is that of two messages, {first} and {sequence_number}")
        elif message_id in self.completed:
            self.breach(f"id {message_id} came again after its completion was confirmed")

    def close(self) -> None:
        for message_id in self.accepted - self._numbers.keys():
            self.breach(f"id {message_id} was accepted and is lost")
