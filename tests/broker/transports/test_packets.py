"""The listener for processes of the same host and user."""

from __future__ import annotations

import errno
import socket

import pytest

from broker.transports.linked import packets
from tests.eventually import eventually


async def test_a_listener_without_descriptors_waits_a_while_before_it_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer stays in the queue, and the socket readable: a loop that asked at every turn would do nothing else."""
    monkeypatch.setattr(packets, "NO_DESCRIPTORS_S", 0.2)
    accept, failures = socket.socket.accept, 0

    def fail(self: socket.socket) -> None:
        nonlocal failures
        failures += 1
        raise OSError(errno.EMFILE, "Too many open files")

    peers: list[socket.socket] = []
    listener = packets.SameUserListener(peers.append, lambda: None)
    monkeypatch.setattr(socket.socket, "accept", fail)
    client = packets.connect(listener.name)
    try:
        await eventually(lambda: failures >= 2)  # again, but not at every turn
        assert failures < 10
        monkeypatch.setattr(socket.socket, "accept", accept)
        await eventually(lambda: len(peers) == 1)
    finally:
        listener.close()
        client.close()
        for peer in peers:
            peer.close()
    listener._begin()  # a pause that ends after the listener: there is nothing to ask
