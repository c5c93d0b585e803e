"""Transactions: sends, settlements, cancellations and states of sessions that are done all at once, or not at all.

Operations of a transaction are checked when they arrive, so that the client hears at once what cannot be done, and kept
in memory. They change nothing yet, except that nobody else can settle a message that the transaction settles; the time
of its lock continues, and so do the lock of a session whose state it sets, and the time of a scheduled message that it
cancels. The discharge checks all operations once more and then does them in order, in one turn, so in one commit of the
store. If an operation cannot be done then (a lock was lost, a message is not scheduled any more, an entity is full or
deleted), the whole transaction is rolled back.

After a rollback messages stay locked as before, so that their receivers can settle them again. If the client has
settled a delivery for good, it cannot do that. Such a message is available again at once, and counts as a failed
delivery.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from broker import requests
from broker.errors import (
    BrokerError,
    InvalidArgument,
    MessageNotFound,
    NotAllowed,
    QuotaExceeded,
    TransactionRollback,
    TransactionTimeout,
)
from broker.partition import sending
from broker.partition.messages import cancelling, settlement
from broker.partition.messages.admission import check, check_sizes
from broker.partition.messages.entering import reserve
from broker.partition.messages.moves import Properties, put_back_failed
from broker.partition.requests import outcome_of
from broker.partition.sessions import locks as session_locks
from broker.partition.sessions import states as session_states
from broker.partition.state.bodies import STAGED
from broker.partition.state.core import Core
from broker.partition.state.idleness import use
from broker.partition.state.open_transactions import Cancel, Send, SendRun, SetState, Settle, Transaction
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.runs import SIZE_BYTES, messages_of, sizes_of
from broker.wire import (
    TRANSACTION_TIME_OUT_MS,
    Extra,
    Operation,
    Outcome,
    SendOperation,
    SendRunOperation,
    SettleOperation,
)
from storage.journal.events import Op
from storage.records import MESSAGE_HEADER_BYTES, NEVER, encode_message

MAX_MESSAGES = 100  # sent in one transaction
_TIMED_OUT = "The transaction has timed out and was rolled back."  # the gateway has the client's text

Errors = list[list[str] | None]


def transact(
    core: Core, key: Hashable, begins: bool, operations: Sequence[Operation], now_ms: int, owner: Hashable
) -> list[Errors | None]:
    """Add sends and settlements to the transaction: see `broker.wire` for their items.

    Returns for each operation None, or a list with None or [error name, text] for each delivery. Raises
    TransactionRollback, TransactionTimeout if nothing can be added any more.
    """
    transaction = _find(core, key, begins, now_ms, owner)
    results: list[Errors | None] = []
    for operation in operations:
        errors: list[BrokerError | None]
        if isinstance(operation, SendOperation):
            errors = [_send(core, transaction, operation.queue, messages, now_ms) for messages in operation.deliveries]
        elif isinstance(operation, SendRunOperation):
            errors = _send_run(core, transaction, operation, now_ms)
        else:
            errors = _settle(core, transaction, operation, now_ms)
        failed = next((error for error in errors if error is not None), None)
        if failed is not None and operation.quiet and transaction.failure is None:
            # The client hears of no error of a quiet operation, so the whole transaction must fail.
            transaction.failure = TransactionRollback(f"An operation of the transaction failed: {failed}")
        results.append(
            None if failed is None else [None if each is None else [type(each).__name__, str(each)] for each in errors]
        )
    return results


def request_in(
    core: Core,
    key: Hashable,
    begins: bool,
    queue_id: int,
    asked: requests.InTransaction,
    now_ms: int,
    owner: Hashable,
) -> list[int] | None:
    """Add a request, wholly or not at all. Raises BrokerError."""
    transaction = _find(core, key, begins, now_ms, owner)
    queue = core.access(queue_id, now_ms)
    match asked:
        case requests.Schedule(messages):
            return _schedule(core, transaction, queue, messages)
        case requests.Settle():
            _settle_all(core, transaction, queue, asked, now_ms)
        case requests.CancelScheduled(numbers):
            _cancel(core, transaction, queue, list(dict.fromkeys(numbers)))
        case requests.SetSessionState(receiver, session_id, state):
            _set_state(core, transaction, queue, SetState(queue.id, session_id, state, receiver), now_ms)
    return None


def _settle_all(core: Core, transaction: Transaction, queue: Queue, asked: requests.Settle, now_ms: int) -> None:
    tokens, outcome, properties = [*asked.tokens], outcome_of(asked), asked.properties
    if len(set(tokens)) < len(tokens):
        raise InvalidArgument("The request names a lock token twice.")
    _check_settlements(core, transaction, queue, tokens, outcome, properties)
    names_receiver = queue.sessions is not None and asked.receiver != requests.ANYONE
    if names_receiver:
        session_locks.require_holder(queue, asked.receiver, tokens, now_ms)
    for token in tokens:
        error = settlement.refusal(core, queue, token, outcome, properties, now_ms)
        if error is not None:
            if names_receiver:
                [error] = session_locks.named(core, asked.receiver, [error], now_ms)
            assert error is not None
            raise error
    _stage(core, transaction, queue, tokens, outcome, properties, quiet=False)


def _cancel(core: Core, transaction: Transaction, queue: Queue, numbers: list[int]) -> None:
    """The messages stay scheduled until the commit, so their time may come before it. Then nothing is committed."""
    if queue.transfers is not None:
        raise NotAllowed("Messages of a transfer queue cannot be cancelled.")
    for number in numbers:
        if (queue.id, number) in transaction.cancelled:
            raise MessageNotFound(f"The scheduled message {number} is cancelled in this transaction already.")
    read_bytes = 0

    def check(size_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes = size_bytes
        _check_limits(core, transaction, len(numbers), size_bytes)

    cancelling.cancellable(core, queue, numbers, check)
    core.changing()
    transaction.settled_count += len(numbers)
    transaction.settled_bytes += read_bytes
    transaction.cancelled.update((queue.id, number) for number in numbers)
    transaction.operations.append(Cancel(queue.id, numbers))


def _set_state(core: Core, transaction: Transaction, queue: Queue, staged: SetState, now_ms: int) -> None:
    """The state is seen with the commit. If the transaction sets it again, the last one counts."""
    session_locks.held(queue, staged.receiver, staged.session_id, now_ms)
    size_bytes = len(staged.state or b"")
    _check_limits(core, transaction, 1, size_bytes)
    growth = session_states.growth_by(core, queue, staged.session_id, staged.state)
    session_states.check_growth(core, session_states.counted_for(core, queue), growth)
    _count(core, transaction, 0, size_bytes)
    transaction.settled_count += 1
    transaction.settled_bytes += size_bytes
    for index, operation in enumerate(transaction.operations):
        if isinstance(operation, SetState) and operation[:2] == staged[:2]:
            transaction.operations[index] = staged
            return
    transaction.operations.append(staged)


def _check_limits(core: Core, transaction: Transaction, count: int, size_bytes: int) -> None:
    """Check, as `_check_settlements` does, cancellations and states. One alone may have any size.

    Raises QuotaExceeded.
    """
    most, most_bytes = core.settings.request_items, core.settings.request_bytes
    if transaction.settled_count + count > most:
        raise QuotaExceeded(f"Cannot settle or cancel more than {most} messages in a single transaction.")
    if transaction.settled_bytes + size_bytes > most_bytes and transaction.settled_count + count > 1:
        raise QuotaExceeded(
            f"The messages cancelled, and the properties and states set, in a single transaction cannot exceed "
            f"{most_bytes} bytes."
        )


def _find(core: Core, key: Hashable, begins: bool, now_ms: int, owner: Hashable) -> Transaction:
    """Find the open transaction. Raises TransactionRollback, TransactionTimeout."""
    transactions = core.transactions
    transaction = transactions.open.get(key)
    if transaction is None:
        _check_known(core, key)
        if not begins:
            raise TransactionRollback("The transaction was rolled back: its partition was restarted.")
        deadline_ms = now_ms + TRANSACTION_TIME_OUT_MS
        transaction = transactions.open[key] = Transaction(deadline_ms, owner)
        core.timers.arm(deadline_ms, (0, Due.TRANSACTIONS))
    return transaction


def _check_known(core: Core, key: Hashable) -> None:
    if key in core.transactions.timed_out:
        raise TransactionTimeout(_TIMED_OUT)


def _send(
    core: Core, transaction: Transaction, queue_id: int, messages: Sequence[Any], now_ms: int
) -> BrokerError | None:
    try:
        queue = core.access(queue_id, now_ms)
        _admit(core, transaction, queue, messages)
    except BrokerError as error:
        return error.with_traceback(None)
    messages = _with_records_stored(core, transaction, queue.id, messages, now_ms)
    last = transaction.operations[-1] if transaction.operations else None
    if isinstance(last, Send) and last.queue_id == queue_id and last.reserved is None:
        assert isinstance(last.messages, list)
        last.messages.extend(messages)
    else:
        transaction.operations.append(Send(queue_id, list(messages), None))
    return None


def _send_run(
    core: Core, transaction: Transaction, operation: SendRunOperation, now_ms: int
) -> list[BrokerError | None]:
    queue_id, _, count, run = operation
    try:
        queue = core.access(queue_id, now_ms)
        is_usual = sending.takes_runs(queue) and transaction.unstaged_bytes + len(run) <= core.settings.commit_bytes
        if is_usual:
            check_sizes(core, queue, sizes_of(run))
            _count(core, transaction, count, len(run) - count * (SIZE_BYTES + MESSAGE_HEADER_BYTES))
    except BrokerError:
        is_usual = False  # some of the messages may be taken
    if not is_usual:
        messages = messages_of(run, with_extra=True)
        return [_send(core, transaction, queue_id, [message], now_ms) for message in messages]
    transaction.unstaged_bytes += len(run)
    last = transaction.operations[-1] if transaction.operations else None
    if isinstance(last, SendRun) and last.queue_id == queue_id:
        transaction.operations[-1] = SendRun(queue_id, last.run + run)
    else:
        transaction.operations.append(SendRun(queue_id, run))
    return [None] * count


def _schedule(core: Core, transaction: Transaction, queue: Queue, messages: Sequence[Any]) -> list[int]:
    """Reserve the sequence numbers, because the client is told them now. After a rollback they stay unused."""
    _admit(core, transaction, queue, messages)
    messages = _with_records_stored(core, transaction, queue.id, messages, 0)
    first = reserve(queue, len(messages))
    transaction.operations.append(Send(queue.id, messages, first))
    return list(range(first, queue.next_number))


def _admit(core: Core, transaction: Transaction, queue: Queue, messages: Sequence[Any]) -> None:
    """Check messages and count them as a part of the transaction. Raises BrokerError."""
    check(core, [(queue, messages)])
    key = transaction.key
    for _, _, _, extra in messages:
        # On an entity that is not partitioned a session id is no key: one transaction may send to several sessions.
        if not extra or Extra.DESTINATION in extra:
            continue  # the destination checks the key
        if Extra.PARTITION_KEY in extra and Extra.SESSION_ID not in extra:
            if key is not None and key != extra[Extra.PARTITION_KEY]:
                raise NotAllowed("All messages of a transaction must have the same partition key.")
            key = extra[Extra.PARTITION_KEY]
    _count(core, transaction, len(messages), sum(len(body) for _, body, _, _ in messages))
    transaction.key = key


def _count(core: Core, transaction: Transaction, count: int, added_bytes: int) -> None:
    """Count messages as a part of the transaction. Raises QuotaExceeded."""
    if transaction.message_count + count > MAX_MESSAGES:
        raise QuotaExceeded(f"Cannot send more than {MAX_MESSAGES} messages in a single transaction.")
    owner_bytes = core.transactions.owner_bytes[transaction.owner] + added_bytes
    if owner_bytes > core.settings.connection_transaction_bytes:
        limit = core.settings.connection_transaction_bytes
        raise QuotaExceeded(f"The messages of the connection's open transactions exceed {limit} bytes.")
    if core.transactions.message_bytes + added_bytes > core.settings.transaction_bytes:
        limit = core.settings.transaction_bytes
        raise QuotaExceeded(f"The messages of all open transactions exceed {limit} bytes; wait until some have ended.")
    core.changing()
    transaction.message_count += count
    core.transactions.grow(transaction, added_bytes)


def _with_records_stored(
    core: Core, transaction: Transaction, queue_id: int, messages: Sequence[Any], otherwise_ms: int
) -> list[Any]:
    """Admitted messages. Those beyond `commit_bytes` are stored now; the commit writes their entries.

    A record has the scheduled time of its message, or `otherwise_ms`; its entry gets the time when it is enqueued.
    """
    found: list[Any] = []
    for layout, body, ttl_ms, extra in messages:
        extra = extra or {}
        if extra.get(Extra.PING) or transaction.unstaged_bytes + len(body) <= core.settings.commit_bytes:
            transaction.unstaged_bytes += len(body)
        else:
            record = encode_message(extra.get(Extra.SCHEDULED_MS) or otherwise_ms, NEVER, layout, body)
            message_id = core.bodies.stage(record)
            core.journal.staged(queue_id, message_id)
            core.worked(len(record))
            transaction.staged.append(message_id)
            extra = {**extra, STAGED: message_id}
        found.append((layout, body, ttl_ms, extra))
    return found


def _settle(core: Core, transaction: Transaction, operation: SettleOperation, now_ms: int) -> list[BrokerError | None]:
    queue_id, quiet, tokens, outcome, properties, receiver = operation
    try:
        queue = core.access(queue_id, now_ms)
    except BrokerError as error:
        return [error] * len(tokens)
    outcome = Outcome(outcome)
    is_usual = outcome == Outcome.ACCEPTED and not properties and len(set(tokens)) == len(tokens)
    if is_usual and queue.locks.have(tokens, now_ms):
        try:
            _check_settlements(core, transaction, queue, tokens, outcome, None)
        except QuotaExceeded:
            pass  # some of them may be settled
        else:
            _stage(core, transaction, queue, tokens, outcome, properties, quiet)
            return [None] * len(tokens)
    results: list[BrokerError | None] = []
    for token in tokens:
        refused = settlement.refusal(core, queue, token, outcome, properties, now_ms)
        if refused is None:
            try:
                _check_settlements(core, transaction, queue, [token], outcome, properties)
            except QuotaExceeded as error:
                refused = error.with_traceback(None)  # which refers to this call
        results.append(refused)
        if refused is None:
            _stage(core, transaction, queue, [token], outcome, properties, quiet)
    if queue.sessions is not None and receiver is not None:
        return session_locks.named(core, receiver, results, now_ms)
    return results


def _check_settlements(
    core: Core,
    transaction: Transaction,
    queue: Queue,
    tokens: list[bytes],
    outcome: Outcome,
    properties: Properties | None,
) -> None:
    """Check the limits of settlements, because the discharge does all of them in one turn. Raises QuotaExceeded."""
    count, size_bytes = core.settings.request_items, core.settings.request_bytes
    if transaction.settled_count + len(tokens) > count:
        raise QuotaExceeded(f"Cannot settle more than {count} messages in a single transaction.")
    if transaction.settled_bytes + _settled_bytes(queue, tokens, outcome, properties) > size_bytes:
        raise QuotaExceeded(f"The properties set in a single transaction cannot exceed {size_bytes} bytes.")


def _settled_bytes(queue: Queue, tokens: list[bytes], outcome: Outcome, properties: Properties | None) -> int:
    return 0 if outcome == Outcome.ACCEPTED else settlement.written_bytes(queue, tokens, properties)


def _stage(
    core: Core,
    transaction: Transaction,
    queue: Queue,
    tokens: list[bytes],
    outcome: Outcome,
    properties: Properties | None,
    quiet: bool,
) -> None:
    core.changing()
    transaction.settled_count += len(tokens)
    transaction.settled_bytes += _settled_bytes(queue, tokens, outcome, properties)
    queue.locks.staged.update(tokens)
    settled = Settle(queue.id, list(tokens), outcome, properties, quiet)
    last = transaction.operations[-1] if transaction.operations else None
    if isinstance(last, Settle) and not properties and last == settled._replace(tokens=last.tokens):
        last.tokens.extend(tokens)
    else:
        transaction.operations.append(settled)


# -- the end


def discharge(core: Core, key: Hashable, commit: bool, now_ms: int) -> None:
    """Commit or roll back. Raises TransactionRollback, TransactionTimeout if a commit did nothing."""
    transactions = core.transactions
    core.changing()
    transaction = transactions.open.pop(key, None)
    if transaction is None:
        try:
            if commit:
                _check_known(core, key)
                raise TransactionRollback("The transaction was rolled back: its partition was restarted.")
        finally:
            transactions.timed_out.discard(key)
        return
    failure: BrokerError | None = None
    if commit:
        failure = transaction.failure
        if failure is None and transaction.deadline_ms <= now_ms:
            failure = TransactionTimeout(_TIMED_OUT)
        if failure is None:
            _unstage(core, transaction)
            failure = _obstacle(core, transaction, now_ms)
        if failure is None:
            _apply(core, transaction, now_ms)
            _end(core, transaction, now_ms)
            transactions.committed += 1
            return
    _roll_back(core, transaction, now_ms)
    if failure is not None:
        raise failure


def _obstacle(core: Core, transaction: Transaction, now_ms: int) -> TransactionRollback | None:
    """The reason why the transaction cannot be committed now; None if it can."""
    sends = [each for each in transaction.operations if isinstance(each, Send | SendRun)]
    grown: Counter[int] = Counter()
    try:
        for operation in transaction.operations:
            queue = core.queue(operation.queue_id)
            if isinstance(operation, Settle):
                _check_settled(core, queue, operation, now_ms)
            elif isinstance(operation, Cancel):
                cancelling.cancellable(core, queue, operation.numbers, lambda read_bytes: None)
            elif isinstance(operation, SetState):
                session_locks.held(queue, operation.receiver, operation.session_id, now_ms)
                growth = session_states.growth_by(core, queue, operation.session_id, operation.state)
                grown[session_states.counted_for(core, queue).id] += max(0, growth)
        for counted, growth in grown.items():
            session_states.check_growth(core, core.queue(counted), growth)
        if (
            len(sends) == 1
            and not grown
            and isinstance(sends[0], SendRun)
            and sending.takes_runs(core.queue(sends[0].queue_id))
        ):
            check_sizes(core, core.queue(sends[0].queue_id), sizes_of(sends[0].run))
        else:
            messages: dict[int, list[Any]] = {}
            for send in sends:
                found = messages_of(send.run, with_extra=True) if isinstance(send, SendRun) else send.messages
                messages.setdefault(send.queue_id, []).extend(found)
            check(core, [(core.queue(queue_id), sent) for queue_id, sent in messages.items()], grown)
    except BrokerError as error:
        return TransactionRollback(f"The transaction was rolled back. {error}")
    return None


def _check_settled(core: Core, queue: Queue, settled: Settle, now_ms: int) -> None:
    """Refuse if one of these settlements is not possible now. Raises BrokerError."""
    if settled.outcome == Outcome.ACCEPTED and not settled.properties and queue.locks.have(settled.tokens, now_ms):
        return
    for token in settled.tokens:
        error = settlement.refusal(core, queue, token, settled.outcome, settled.properties, now_ms)
        if error is not None:
            raise error


def _apply(core: Core, transaction: Transaction, now_ms: int) -> None:
    for operation in transaction.operations:
        if core.idle_times.kept:
            use(core, operation.queue_id, now_ms)
        queue = core.queue(operation.queue_id)
        if isinstance(operation, SendRun):
            sending.store_run(core, queue, operation.run, now_ms)
        elif isinstance(operation, Send):
            sending.store(core, queue, operation.messages, now_ms, operation.reserved)
        elif isinstance(operation, Cancel):
            found = cancelling.cancellable(core, queue, operation.numbers, lambda read_bytes: None)
            cancelling.cancel(core, queue, found)
        elif isinstance(operation, SetState):
            session_states.write_state(core, queue, operation.session_id, operation.state, now_ms)
        else:
            results = settlement.settle(core, queue, operation.tokens, operation.outcome, operation.properties, now_ms)
            assert not any(results), f"a settlement that was checked fails: {results}"


def _unstage(core: Core, transaction: Transaction) -> None:
    for operation in transaction.operations:
        if isinstance(operation, Settle):
            queue = core.queues.get(operation.queue_id)
            if queue is not None:
                queue.locks.staged.difference_update(operation.tokens)


def _roll_back(core: Core, transaction: Transaction, now_ms: int) -> None:
    _unstage(core, transaction)
    for operation in transaction.operations:
        if not isinstance(operation, Settle) or not operation.quiet:
            continue
        queue = core.queues.get(operation.queue_id)
        if queue is None:
            continue
        tokens = queue.locks.not_lost(operation.tokens)
        if queue.sessions is None:
            settlement.fail_locks(core, queue, tokens, now_ms)
            continue
        queue.tally.locks_lost += len(tokens)  # now at the latest, to keep the order of the session
        for token in tokens:
            put_back_failed(core, queue, queue.locks.remove(token), None, Op.LOCK_LOST, now_ms)
    _end(core, transaction, now_ms)
    core.transactions.rolled_back += 1


def _end(core: Core, transaction: Transaction, now_ms: int) -> None:
    core.transactions.release(transaction)
    core.bodies.drop(transaction.staged)  # after a commit: duplicates, and messages that no subscription takes
    free_records(core, now_ms)


def free_records(core: Core, now_ms: int) -> None:
    """Delete records that transactions have staged and not used; the next turns continue if they are many."""
    while core.bodies.has_dropped and (not core.turn.work or core.work_left() > 0):
        core.turn.work += 2 * core.bodies.free_some(core.step())
    if core.bodies.has_dropped:
        core.timers.arm(now_ms, (0, Due.TRANSACTIONS))


def time_out(core: Core, now_ms: int) -> None:
    """The timer: roll back transactions that took too long. A later operation of one gets the error."""
    transactions = core.transactions
    free_records(core, now_ms)
    while transactions.open:
        key, transaction = next(iter(transactions.open.items()))
        if transaction.deadline_ms > now_ms:
            core.timers.arm(transaction.deadline_ms, (0, Due.TRANSACTIONS))
            return
        if core.turn.work and core.work_left() <= 0:
            core.timers.arm(now_ms, (0, Due.TRANSACTIONS))
            return
        del transactions.open[key]
        transactions.timed_out.add(key)
        _roll_back(core, transaction, now_ms)
