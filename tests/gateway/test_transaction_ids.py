"""Ids of transactions: a partition sees by the first half whose they are."""

from broker.gateway.transactions import ID_BYTES, Transactions
from broker.wire import TRANSACTION_OWNER_BYTES


def test_the_ids_of_one_connection_begin_alike_and_those_of_another_do_not():
    one, other = Transactions(), Transactions()
    ids = [one.new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert {len(each) for each in ids} == {ID_BYTES}
    assert len({each[:TRANSACTION_OWNER_BYTES] for each in ids}) == 1
    assert ids[0][:TRANSACTION_OWNER_BYTES] != other.new_id()[:TRANSACTION_OWNER_BYTES]
