"""Ports to listen on: free now, and still free when a server starts, or starts again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.errors import TriptychError
from common.process import ports
from common.process.ports import free_port, reserve_port


def test_a_free_port_is_none_that_an_outgoing_connection_might_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "range"
    monkeypatch.setattr(ports, "_EPHEMERAL", given)
    given.write_text("11000\t60999\n")
    free = [free_port("127.0.0.1") for _ in range(20)] + [reserve_port("127.0.0.1", 0)]
    assert all(10_000 <= port < 11_000 for port in free)
    with socket.create_server(("127.0.0.1", free[0])), monkeypatch.context() as patched:
        patched.setattr(ports, "_LOWEST_PORT", free[0])
        given.write_text(f"{free[0] + 1} 60999")
        assert free_port("127.0.0.1") != free[0]
    for text in ("1024 65535", "", "no number"):  # all are given, or nothing is known
        given.write_text(text)
        assert free_port("127.0.0.1") > 0
    given.unlink()
    assert free_port("127.0.0.1") > 0


def test_a_port_that_cannot_be_bound_is_refused_with_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TriptychError, match=f"127.0.0.1:{port}: address already in use; choose another --port"):
            reserve_port("127.0.0.1", port)
    assert reserve_port("127.0.0.1", port) == port
    with pytest.raises(TriptychError, match=r"choose another --http-port"), socket.create_server(("127.0.0.1", port)):
        reserve_port("127.0.0.1", port, "--http-port")
    with pytest.raises(
        TriptychError, match=r"cannot listen on 192\.0\.2\.1:0.*give an address of this machine"
    ) as foreign:
        reserve_port("192.0.2.1", 0)
    assert foreign.value.info.param == "host"
