"""How workers on several machines reach each other."""

import select
import socket
import time

import pytest

from broker.settings.addresses import Address, parse_address
from broker.worker.dialling import TcpDialler
from tests.patience import PATIENCE_S


def test_a_name_with_several_addresses_is_dialled_at_each_in_turn(monkeypatch):
    """As `localhost` where it is ::1 first, and the worker listens on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as nobody, select.epoll() as poll:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (nobody, listener)]
        monkeypatch.setattr("broker.worker.dialling.socket.getaddrinfo", lambda *_, **__: found)
        dialler = TcpDialler(["several.example:5680"], None, poll)
        refused, connection, until = 0, None, time.monotonic() + PATIENCE_S
        while connection is None and time.monotonic() < until:
            try:
                connection = dialler.dial(0, int(time.monotonic() * 1000))
            except ConnectionRefusedError:
                refused += 1
            poll.poll(0.01)
        assert refused == 1
        assert connection is not None
        assert connection.getpeername() == listener.getsockname()
        connection.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [("a:1", Address("a", 1)), ("[::1]:5680", Address("::1", 5680)), (" host.example:0 ", Address("host.example", 0))],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "a", ":1", "a:", "a:65536", "a:-1", "a b:1", "::1:5680", "a" * 64 + ":1", "a..b:1"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_address(text)
