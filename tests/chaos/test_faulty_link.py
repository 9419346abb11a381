"""A cut cable does what its mode says, to whom it says: otherwise the rounds would test nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.faulty_link import FaultyLink, Mode
from tests.chaos.owners import owner_of

SHORT_S = 0.3
"""Nothing may come in this time."""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        yield listening


@pytest.fixture
def cable(server: socket.socket) -> Iterator[FaultyLink]:
    with FaultyLink(server.getsockname()) as between:
        yield between


def connect(cable: FaultyLink, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection through the cable."""
    near = socket.create_connection(cable.address, timeout=5)
    far, _ = server.accept()
    far.settimeout(5)
    return near, far


def test_it_passes_both_ways_and_passes_on_the_end(cable: FaultyLink, server: socket.socket) -> None:
    near, far = connect(cable, server)
    near.sendall(b"there")
    assert far.recv(10) == b"there"
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    far.close()
    assert near.recv(10) == b""


def holds_back(cable: FaultyLink, mode: Mode, server: socket.socket) -> socket.socket:
    """Return the far end of a connection on which nothing has come while the cable was in a mode; it passes again."""
    near, far = connect(cable, server)
    cable.set(mode)
    near.sendall(b"late")
    far.settimeout(SHORT_S)
    with pytest.raises(TimeoutError):
        far.recv(10)
    cable.set("pass")
    far.settimeout(5)
    return far


def test_what_stalls_comes_later(cable: FaultyLink, server: socket.socket) -> None:
    assert holds_back(cable, "stall", server).recv(10) == b"late"


def test_what_is_dropped_never_comes_and_the_connection_is_broken_after(
    cable: FaultyLink, server: socket.socket
) -> None:
    far = holds_back(cable, "drop", server)
    with pytest.raises(ConnectionError):
        far.recv(10)


def test_a_reset_breaks_what_there_is_and_refuses_what_comes(cable: FaultyLink, server: socket.socket) -> None:
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


def test_a_cable_may_be_cut_for_one_and_not_for_another(server: socket.socket) -> None:
    names = iter(["e0", None, "e0", None])
    with FaultyLink(server.getsockname(), source=lambda near, far: next(names)) as cable:
        cut_off, far_of_cut_off = connect(cable, server)
        other, far_of_other = connect(cable, server)
        cable.set("drop", lambda who: who == "e0")
        cut_off.sendall(b"lost")
        other.sendall(b"there")
        assert far_of_other.recv(10) == b"there"
        far_of_cut_off.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            far_of_cut_off.recv(10)
        cable.set("reset", lambda who: who == "e0")
        with pytest.raises(ConnectionError):
            cut_off.recv(10)
        with pytest.raises(ConnectionError), socket.create_connection(cable.address, timeout=5) as another:
            another.recv(10)
        far_of_other.sendall(b"back")
        assert other.recv(10) == b"back"
        connect(cable, server)[0].sendall(b"new")


_CONNECT = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"


def test_whose_connection_it_is_can_be_seen(server: socket.socket) -> None:
    port = server.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", _CONNECT, str(port)], stdin=subprocess.PIPE) as process:
        server.settimeout(20)
        accepted, near = server.accept()
        assert owner_of(near, accepted.getsockname(), [os.getpid(), process.pid]) == process.pid
        assert owner_of(near, accepted.getsockname(), [os.getpid()]) is None
        assert owner_of(("127.0.0.1", 1), accepted.getsockname(), [process.pid]) is None
        process.communicate()
