"""Connections to other workers: they carry forwarded messages there, and the answers back.

Between two partitions of this worker, a command is done in the next turn and its answer in the turn after that, so that
each comes after the other side's commit, as over a socket. When a connection cannot be made or is lost, the partitions
are told, and try again after a while.

On one machine other workers are dialled when there is something for them. Only the worker of the namespace's home is
dialled at once, and again when the connection is lost, because it sends the catalog. Between machines all others are,
because only they say which partitions they have.
"""

import select
from collections.abc import Callable, Iterable, Mapping, Sequence

from broker import wire
from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.logging import get_logger
from broker.partition.partition import Partition
from broker.settings.config import ConfigurationError
from broker.wire import (
    Answer,
    Ask,
    Beat,
    Catalog,
    Changed,
    Deleted,
    Followed,
    Forward,
    Forwarded,
    Hello,
    Keep,
    Remove,
    Replaced,
    Rules,
    Unused,
)
from broker.worker.copies import Copies, warn_of_other_store
from broker.worker.dialling import Dialler
from broker.worker.heartbeats import Heartbeats
from broker.worker.peer import Peer
from storage.records import NEVER, encode_document, entity_key

REDIAL_MS = 100
REDIAL_CLUSTER_MS = 250  # a name is resolved each time
LOOK_MS = 50  # at a connection that is under way
CLAIM_MS = 5000  # between two looks at a worker that claims a partition of this one

log = get_logger("worker")

Replies = tuple[Peer, list[Followed | Answer]]  # to the home, by the connection that they answer on


class Neighbours:
    """`partitions` are this worker's. `touch` is called with each of them that must commit because of an answer.
    `copies` follow the home's messages about the catalog. `identity` is that of this worker: see `wire.Hello`.
    `heartbeats` are those to other machines, if there are any.
    """

    def __init__(
        self,
        dialler: Dialler,
        identity: bytes,
        partitions: Mapping[int, Partition],
        partition_count: int,
        poll: select.epoll,
        touch: Callable[[Partition], None],
        copies: Copies,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self.inbox: list[Forward | Forwarded | Remove | Unused] = []  # for partitions of this worker, for the next turn
        self._dialler = dialler
        self._identity = identity
        self._partitions = partitions
        self._poll = poll
        self._touch = touch
        self._links: dict[int, Peer] = {}  # by worker
        self._workers: dict[int, int] = {}  # file descriptor of a link -> worker
        self._unreachable: set[int] = set()  # workers, so that it is logged once
        self._copies = copies
        self._heartbeats = heartbeats
        self._catalog: Catalog | None = None  # the home's, until the rules come that it lacks
        self._replies: list[Followed | Answer] = []  # to the home, which are to leave after the commit
        self._where: dict[int, int] = {}  # partition -> its worker, as far as that is known
        self._redial_ms: dict[int, int] = {}  # when to dial workers that are to be connected always
        if dialler.is_cluster:
            self._redial_ms = dict.fromkeys(range(dialler.workers), 0)
        else:
            self._where = {partition: partition % dialler.workers for partition in range(partition_count)}
            if HOME not in partitions:
                self._redial_ms[self._where[HOME]] = 0

    @property
    def dial_ms(self) -> int | None:
        """When `dial_due` is to be called."""
        return min(self._redial_ms.values()) if self._redial_ms else None

    def send(self, forwards: Iterable[Forward], answers: Iterable[Forwarded], now_ms: int) -> None:
        """Send batches, and answers to partitions of this worker; to be called after the commit of their turn."""
        self.inbox += answers
        used: dict[int, Peer] = {}
        for forward in forwards:
            if forward.partition in self._partitions:
                self.inbox.append(forward)
                continue
            worker = self._where.get(forward.partition)
            link = None if worker is None else self._links.get(worker) or self._dial(worker, now_ms)
            if worker is None or link is None:
                self._lost([forward.partition] if worker is None else self._there(worker), now_ms)
            else:
                link.answers.append(forward)
                used[worker] = link
        for worker, link in used.items():
            self._write(worker, link, now_ms)

    def serve(self, descriptor: int, event: int, now_ms: int) -> bool:
        """Read and write a link; False if no link has this descriptor."""
        worker = self._workers.get(descriptor)
        if worker is None:
            if (waiting := self._dialler.waits(descriptor)) is None:
                return False
            self._dial(waiting, now_ms)
            return True
        link = self._links[worker]
        if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self._read(worker, link, now_ms):
            return True
        if event & select.EPOLLOUT:
            self._write(worker, link, now_ms)
        return True

    def _read(self, worker: int, link: Peer, now_ms: int) -> bool:
        """False if the link was dropped."""
        messages = link.read()
        if messages is None:
            self._drop(worker, now_ms)
            return False
        if link.waits_to_read:
            self._write(worker, link, now_ms)
        for message in messages:
            match message:
                case Forwarded():
                    self.answered(message, now_ms)
                case Replaced(_, replaced):
                    for partition in replaced:
                        warn_of_other_store(partition)
                case Beat():
                    link.on_beat()
                case Ask(_, entity_id, number):
                    agrees = self._copies.agree(entity_id, now_ms)
                    self._replies.append(wire.answer(entity_id, number, agrees))
                case Keep(_, entity_id):
                    self._copies.keep(entity_id, now_ms)
                case Hello():
                    if not self._greeted(worker, message, now_ms):
                        return False
                case Catalog() | Rules() | Changed() | Deleted() if not self._follow(message, link, now_ms):
                    log.warning("missed a version of the catalog; reconnecting for all of it", version=message.version)
                    self._drop(worker, now_ms)  # after the next dial the home sends the whole catalog
                    return False
        return worker in self._links

    def _follow(self, message: Catalog | Rules | Changed | Deleted, home: Peer, now_ms: int) -> bool:
        """The home sends its catalog, or a change of it. False if a change was missed."""
        match message:
            case Catalog():
                log.info("catalog received", version=message.version)
                self._catalog = message
                lacking = self._copies.lacking(message.version, _stored(message))
                home.answers += [wire.stores(self._copies.store_ids()), wire.join(self._copies.in_service(), lacking)]
                self._write(self._where[HOME], home, now_ms)
                return True
            case Rules():
                catalog, self._catalog = self._catalog, None
                if catalog is None or catalog.version != message.version:
                    return False
                rules = dict(message.rules)
                self.remove(self._copies.catch_up(message.version, _stored(catalog), rules, now_ms), now_ms)
            case Deleted():
                if not self._copies.remove(message.version, message.entity_ids, now_ms):
                    return False
            case Changed():
                if not self._copies.change(message.version, [*changes.decided(message.changes)], now_ms):
                    return False
        self._replies.append(wire.followed(message.version))
        return True

    def take_replies(self) -> Replies | None:
        """What the home is to be told, by `reply`, after the commit that begins now."""
        if not self._replies:
            return None
        replies, self._replies = self._replies, []
        return self._links[self._where[HOME]], replies

    def reply(self, replies: Replies, now_ms: int) -> None:
        """Tell the home, unless the connection that these are for was lost."""
        link, messages = replies
        if self._home_link() is link:
            link.answers += messages
            self._write(self._where[HOME], link, now_ms)

    def _home_link(self) -> Peer | None:
        """The connection to the home's worker."""
        return self._links.get(self._where.get(HOME, -1))

    def dial_due(self, now_ms: int) -> None:
        for worker, due_ms in [*self._redial_ms.items()]:
            if due_ms <= now_ms:
                self._dial(worker, now_ms, quiet=not self._dialler.is_cluster)

    def _greeted(self, worker: int, message: Hello, now_ms: int) -> bool:
        """Note which partitions the worker has. False if the link was dropped."""
        hello = wire.greeting(message)
        name = self._dialler.name(worker)
        if hello.identity == self._identity:  # this address is our own
            self._drop(worker, now_ms)
            del self._redial_ms[worker]
            return False
        if problem := wire.incompatible(hello):
            log.error("worker speaks another version", worker=name, problem=problem)
            self._drop(worker, now_ms, REDIAL_CLUSTER_MS)
            return False
        if self._dialler.is_cluster:
            if claimed := sorted(self._partitions.keys() & set(hello.partitions)):
                log.error("another worker claims partitions of this one", worker=name, partitions=claimed)
                self._drop(worker, now_ms, CLAIM_MS)
                return False
            self._where |= dict.fromkeys(hello.partitions, worker)
            if self._heartbeats is not None and hello.version >= wire.VERSION_WITH_BEATS:
                link = self._links[worker]
                link.be_watched(self._heartbeats.patience)
                self._heartbeats.add(link)
                link.answers.append(wire.beat())
                self._write(worker, link, now_ms)
        if worker in self._unreachable:
            self._unreachable.discard(worker)
            log.info("connected to worker again", worker=name)
        if HOME in hello.partitions and (other := self._copies.adopt(hello.namespace_id)) is not None:
            raise ConfigurationError(
                f"partition {other} of this data directory belongs to another namespace than the home at {name}. "
                "Give the worker its own --data-dir, or set cluster.workers to those of its namespace"
            )
        return True

    def remove(self, entity_ids: Sequence[int], now_ms: int) -> None:
        """Tell the home of entities that were deleted here; as `tell_home`."""
        if entity_ids:
            self.tell_home([wire.remove(list(entity_ids))], now_ms)

    def tell_home(self, news: Sequence[Remove | Unused], now_ms: int) -> None:
        """Tell the home what its `Copies` have found; to be called after the commit.

        Does nothing while the home is not connected: after connecting, the home sends its catalog, and then it is told.
        """
        if HOME in self._partitions:
            self.inbox += news
        elif (link := self._home_link()) is not None:
            link.answers += news
            self._write(self._where[HOME], link, now_ms)

    def answered(self, answer: Forwarded, now_ms: int) -> None:
        """Take an answer, from another worker or from a partition of this one."""
        partition = self._partitions[answer.source_partition]
        partition.taken_over(answer.source, answer.by, answer.up_to, answer.refused, answer.busy, now_ms)
        self._touch(partition)

    def _dial(self, worker: int, now_ms: int, quiet: bool = False) -> Peer | None:
        if (link := self._links.get(worker)) is not None:
            return link
        try:
            connection = self._dialler.dial(worker, now_ms)
        except OSError as error:  # the worker is not running, its listen backlog is full, or there is no descriptor
            if worker in self._redial_ms:
                self._redial_ms[worker] = now_ms + (REDIAL_CLUSTER_MS if self._dialler.is_cluster else REDIAL_MS)
            self._note_unreachable(worker, str(error), quiet)
            return None
        if connection is None:
            self._redial_ms[worker] = now_ms + LOOK_MS
            return None
        if worker in self._redial_ms:
            self._redial_ms[worker] = NEVER
        link = self._links[worker] = Peer(connection)
        self._workers[connection.fileno()] = worker
        self._poll.register(connection, select.EPOLLIN)
        # TLS begins with what the side that dials wants to read.
        return link if self._read(worker, link, now_ms) else None

    def _note_unreachable(self, worker: int, reason: str, quiet: bool = False) -> None:
        if worker not in self._unreachable and not quiet:
            self._unreachable.add(worker)
            name = self._dialler.name(worker)
            log.warning("cannot connect to worker; messages for it wait", worker=name, error=reason)

    def _write(self, worker: int, link: Peer, now_ms: int) -> None:
        link.hold_answers()
        link.release()
        if not link.write():
            self._drop(worker, now_ms)
            return
        link.await_events(self._poll, select.EPOLLIN | select.EPOLLOUT if link.waits_to_write else select.EPOLLIN)

    def _drop(self, worker: int, now_ms: int, redial_ms: int = REDIAL_MS) -> None:
        link = self._links.pop(worker)
        del self._workers[link.socket.fileno()]
        self._poll.unregister(link.socket)
        if self._heartbeats is not None:
            self._heartbeats.discard(link)
        link.close()
        if link.problem:
            self._note_unreachable(worker, link.problem)
        else:
            log.info("connection to worker lost", worker=self._dialler.name(worker))
        if worker in self._redial_ms:
            self._redial_ms[worker] = now_ms + (max(redial_ms, REDIAL_CLUSTER_MS) if link.problem else redial_ms)
        if worker == self._where.get(HOME):
            self._catalog = None
            self._replies.clear()
        self._lost(self._there(worker), now_ms)

    def look_for_silence(self, now_ms: int) -> None:
        """Each second: drop the links to workers that have been silent for too long."""
        for worker, link in [*self._links.items()]:
            if link.is_silent():
                link.problem = "it does not give a sign of life"
                self._drop(worker, now_ms)
            elif link.has_begun_beat:
                self._write(worker, link, now_ms)

    def drop_watched(self, now_ms: int) -> None:
        """Drop the links to workers that watch this one: it has been silent for too long."""
        for worker, link in [*self._links.items()]:
            if link.silence is not None:
                self._drop(worker, now_ms)

    def _there(self, worker: int) -> list[int]:
        """The partitions that this worker has, as far as that is known."""
        return [partition for partition, at in self._where.items() if at == worker]

    def _lost(self, there: Sequence[int], now_ms: int) -> None:
        """Tell the partitions that no command to these others will be answered any more."""
        for partition in self._partitions.values():
            partition.unreachable(there, now_ms)


def _stored(catalog: Catalog) -> dict[bytes, bytes]:
    """The definitions as ENTITIES holds them."""
    return {entity_key(document["entity_id"]): encode_document(document) for document in catalog.definitions}
