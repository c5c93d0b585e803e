"""Connections to other workers: they carry forwarded messages there, and the answers back.

Between two partitions of this worker, a command is done in the next turn and its answer in the turn after that, so that
each comes after the other side's commit, as over a socket. Other workers are dialled when there is something for them.
When a connection cannot be made or is lost, the partitions are told, and try again after a while.

The worker of the namespace's home partition is dialled at once, and again when the connection is lost, because it sends
the catalog.
"""

import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from broker import wire
from broker.catalog.catalog import HOME
from broker.logging import get_logger
from broker.partition.partition import Partition
from broker.wire import (
    Answer,
    Ask,
    Catalog,
    Changed,
    Deleted,
    Followed,
    Forward,
    Forwarded,
    Hello,
    Keep,
    Remove,
    Rules,
    Unused,
)
from broker.worker.copies import Copies
from broker.worker.peer import Peer
from storage.records import encode_document, entity_key

REDIAL_MS = 100

log = get_logger("worker")

Replies = tuple[Peer, list[Followed | Answer]]  # to the home, by the connection that they answer on


class Neighbours:
    """Partition p, of `partition_count`, is on worker p % len(sockets); `sockets` are the paths, by worker.

    `partitions` are this worker's. `touch` is called with each of them that must commit because of an answer.
    `copies` follow the home's messages about the catalog.
    """

    def __init__(
        self,
        sockets: Sequence[str],
        partitions: Mapping[int, Partition],
        partition_count: int,
        poll: select.epoll,
        touch: Callable[[Partition], None],
        copies: Copies,
    ) -> None:
        self.inbox: list[Forward | Forwarded | Remove | Unused] = []  # for partitions of this worker, for the next turn
        self._sockets = sockets
        self._partitions = partitions
        self._partition_count = partition_count
        self._poll = poll
        self._touch = touch
        self._links: dict[int, Peer] = {}  # by worker
        self._workers: dict[int, int] = {}  # file descriptor of a link -> worker
        self._unreachable: set[int] = set()  # workers, so that it is logged once
        self._copies = copies
        self._catalog: Catalog | None = None  # the home's, until the rules come that it lacks
        self._replies: list[Followed | Answer] = []  # to the home, which are to leave after the commit
        self._home = HOME % len(sockets)
        self.dial_home_ms: int | None = None if HOME in partitions else 0  # None: it is connected, or here

    def send(self, forwards: Iterable[Forward], answers: Iterable[Forwarded], now_ms: int) -> None:
        """Send batches, and answers to partitions of this worker; to be called after the commit of their turn."""
        self.inbox += answers
        used: dict[int, Peer] = {}
        for forward in forwards:
            if forward.partition in self._partitions:
                self.inbox.append(forward)
                continue
            worker = forward.partition % len(self._sockets)
            link = self._links.get(worker) or self._dial(worker, now_ms)
            if link is None:
                self._lost(worker, now_ms)
            else:
                link.answers.append(forward)
                used[worker] = link
        for worker, link in used.items():
            self._write(worker, link, now_ms)

    def serve(self, descriptor: int, event: int, now_ms: int) -> bool:
        """Read and write a link; False if no link has this descriptor."""
        worker = self._workers.get(descriptor)
        if worker is None:
            return False
        link = self._links[worker]
        if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            messages = link.read()
            if messages is None:
                self._drop(worker, now_ms)
                return True
            for message in messages:
                match message:
                    case Forwarded():
                        self.answered(message, now_ms)
                    case Ask(_, entity_id, number):
                        agrees = self._copies.agree(entity_id, now_ms)
                        self._replies.append(wire.answer(entity_id, number, agrees))
                    case Keep(_, entity_id):
                        self._copies.keep(entity_id, now_ms)
                    case Hello():
                        assert message.version == wire.VERSION
                    case Catalog() | Rules() | Changed() | Deleted() if not self._follow(message, link, now_ms):
                        log.warning(
                            "missed a version of the catalog; reconnecting for all of it", version=message.version
                        )
                        self._drop(worker, now_ms)  # after the next dial the home sends the whole catalog
                        return True
        if event & select.EPOLLOUT:
            self._write(worker, link, now_ms)
        return True

    def _follow(self, message: Catalog | Rules | Changed | Deleted, home: Peer, now_ms: int) -> bool:
        """The home sends its catalog, or a change of it. False if a change was missed."""
        match message:
            case Catalog():
                log.info("catalog received", version=message.version)
                self._catalog = message
                lacking = self._copies.lacking(message.version, _stored(message))
                home.answers.append(wire.join(self._copies.in_service(), lacking))
                self._write(self._home, home, now_ms)
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
                if not self._copies.change(message.version, message.changes, now_ms):
                    return False
        self._replies.append(wire.followed(message.version))
        return True

    def take_replies(self) -> Replies | None:
        """What the home is to be told, by `reply`, after the commit that begins now."""
        if not self._replies:
            return None
        replies, self._replies = self._replies, []
        return self._links[self._home], replies

    def reply(self, replies: Replies, now_ms: int) -> None:
        """Tell the home, unless the connection that these are for was lost."""
        link, messages = replies
        if self._links.get(self._home) is link:
            link.answers += messages
            self._write(self._home, link, now_ms)

    def dial_home(self, now_ms: int) -> None:
        if self._home not in self._links:
            self._dial(self._home, now_ms, quiet=True)

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
        elif (link := self._links.get(self._home)) is not None:
            link.answers += news
            self._write(self._home, link, now_ms)

    def answered(self, answer: Forwarded, now_ms: int) -> None:
        """Take an answer, from another worker or from a partition of this one."""
        partition = self._partitions[answer.source_partition]
        partition.taken_over(answer.source, answer.by, answer.up_to, answer.refused, answer.busy, now_ms)
        self._touch(partition)

    def _dial(self, worker: int, now_ms: int, quiet: bool = False) -> Peer | None:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link = Peer(connection)
            connection.connect(self._sockets[worker])
        except OSError as error:  # the worker is not running, its listen backlog is full, or there is no descriptor
            if connection is not None:
                connection.close()
            if worker == self._home:
                self.dial_home_ms = now_ms + REDIAL_MS
            if worker not in self._unreachable and not quiet:
                self._unreachable.add(worker)
                log.warning("cannot connect to worker; messages for it wait", worker=worker, error=str(error))
            return None
        if worker in self._unreachable:
            self._unreachable.discard(worker)
            log.info("connected to worker again", worker=worker)
        if worker == self._home:
            self.dial_home_ms = None
        self._links[worker] = link
        self._workers[connection.fileno()] = worker
        self._poll.register(connection, select.EPOLLIN)
        return link

    def _write(self, worker: int, link: Peer, now_ms: int) -> None:
        link.hold_answers()
        link.release()
        if not link.write():
            self._drop(worker, now_ms)
            return
        link.await_events(self._poll, select.EPOLLIN | select.EPOLLOUT if link.output else select.EPOLLIN)

    def _drop(self, worker: int, now_ms: int) -> None:
        link = self._links.pop(worker)
        del self._workers[link.socket.fileno()]
        self._poll.unregister(link.socket)
        link.socket.close()
        log.info("connection to worker lost", worker=worker)
        if worker == self._home:
            self.dial_home_ms = now_ms + REDIAL_MS
            self._catalog = None
            self._replies.clear()
        self._lost(worker, now_ms)

    def _lost(self, worker: int, now_ms: int) -> None:
        """Tell the partitions that no command to this worker will be answered any more."""
        there = range(worker, self._partition_count, len(self._sockets))
        for partition in self._partitions.values():
            partition.unreachable(there, now_ms)


def _stored(catalog: Catalog) -> dict[bytes, bytes]:
    """The definitions as ENTITIES holds them."""
    return {entity_key(document["entity_id"]): encode_document(document) for document in catalog.definitions}
