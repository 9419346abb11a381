"""A cut cable does what its mode says: otherwise the rounds would test nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.chaos.cable import Cable

SHORT_S = 0.3
"""Nothing may come in this time."""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        yield listening


@pytest.fixture
def cable(server: socket.socket) -> Iterator[Cable]:
    with Cable(server.getsockname()) as between:
        yield between


def connect(cable: Cable, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection through the cable."""
    near = socket.create_connection(cable.address, timeout=5)
    far, _ = server.accept()
    far.settimeout(5)
    return near, far


def test_it_passes_both_ways_and_passes_on_the_end(cable: Cable, server: socket.socket) -> None:
    near, far = connect(cable, server)
    near.sendall(b"there")
    assert far.recv(10) == b"there"
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    far.close()
    assert near.recv(10) == b""


def test_what_stalls_comes_later(cable: Cable, server: socket.socket) -> None:
    near, far = connect(cable, server)
    cable.set("stall")
    near.sendall(b"late")
    far.settimeout(SHORT_S)
    with pytest.raises(TimeoutError):
        far.recv(10)
    cable.set("pass")
    far.settimeout(5)
    assert far.recv(10) == b"late"


def test_what_is_dropped_never_comes_and_the_connection_is_broken_after(cable: Cable, server: socket.socket) -> None:
    near, far = connect(cable, server)
    cable.set("drop")
    near.sendall(b"lost")
    far.settimeout(SHORT_S)
    with pytest.raises(TimeoutError):
        far.recv(10)
    cable.set("pass")
    far.settimeout(5)
    with pytest.raises(ConnectionError):
        far.recv(10)


def test_a_reset_breaks_what_there_is_and_refuses_what_comes(cable: Cable, server: socket.socket) -> None:
    near, _ = connect(cable, server)
    cable.set("reset")
    with pytest.raises(ConnectionError):
        near.recv(10)
    with pytest.raises(ConnectionError), socket.create_connection(cable.address, timeout=5) as another:
        another.recv(10)
    cable.set("pass")
    again, far = connect(cable, server)
    again.sendall(b"well")
    assert far.recv(10) == b"well"
