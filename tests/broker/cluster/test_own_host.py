"""The address that a process tells others where it listens on all of its host's."""

from __future__ import annotations

import socket

import pytest

from broker.cluster.redis_client import own_host


def other_address() -> str:
    """An address of this machine beside its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this machine has a loopback only")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(
    "url",
    [
        "redis://{}:6379",
        "rediss://user:p%40ss@{}:6379/1?ssl_ca_certs=/ca.pem",
        "redis+sentinel://user:word@{}:26379,192.0.2.7:26379/name",
    ],
)
def test_the_address_is_the_one_on_the_way_to_the_broker(url: str) -> None:
    address = other_address()
    assert own_host(url.format(address)) == address


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379", "redis://localhost", "unix:///run/redis.sock", None])
def test_beside_the_broker_it_is_the_hosts_name(url: str | None) -> None:
    assert own_host(url) == socket.gethostname()


def test_a_broker_of_an_unknown_name_leaves_the_hosts_name() -> None:
    assert own_host("redis://no-such-host.invalid:6379") == socket.gethostname()
