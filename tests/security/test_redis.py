"""The broker: a password, TLS, keys below one prefix, and no secret in what a person reads."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import trustme
from redis.exceptions import AuthenticationError, RedisError

from broker.cluster.redis_client import connect, wait_until_reachable, without_secrets
from common.config import Settings
from common.errors import TriptychError
from launch.cluster.configure import load_settings
from launch.cluster.plan import make_plan


def with_user(url: str, user: str) -> str:
    """The URL with another `user:password`."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.hostname}:{parts.port}"))


async def test_without_the_password_nothing_works(broker_url):
    parts = urlsplit(broker_url)
    assert len(parts.password) >= 32
    async with connect(f"redis://{parts.hostname}:{parts.port}", retries=0) as stranger:
        for command in ("GET x", "SET x 1", "KEYS *", "XADD s * a b", "CONFIG GET *"):
            with pytest.raises(AuthenticationError):
                await stranger.execute_command(*command.split())


@pytest.mark.parametrize("user", ["", ":wrong"])
async def test_a_wrong_password_is_told_at_once_and_not_shown(broker_url, user):
    async with connect(with_user(broker_url, user)) as stranger, asyncio.timeout(5):
        with pytest.raises(TriptychError, match="does not let us in") as caught:
            await wait_until_reachable(stranger, timeout_s=60)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://10.0.0.5:6379", "redis://10.0.0.5:6379"),
        ("redis://:word@10.0.0.5:6379/2", "redis://10.0.0.5:6379/2"),
        ("rediss://me:w@rd@broker:6380?ssl_ca_certs=/ca.pem", "rediss://broker:6380"),
        ("redis://:wo?rd@broker:6379?password=word", "redis://broker:6379"),
        ("redis://broker?password=word", "redis://broker"),
        ("unix://:word@/run/redis.sock", "unix:///run/redis.sock"),
        ("me:word@broker", "broker"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert without_secrets(url) == shown


def test_a_url_that_is_none_is_refused_without_its_password():
    with pytest.raises(TriptychError, match="broker URL") as caught:
        connect("http://:word@broker:6379")
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("flags", [{"broker": 5}, {"cluster_key": ["secret"]}, {"api_key": {"secret": 1}}])
def test_settings_that_are_wrong_are_named_without_their_values(flags):
    with pytest.raises(TriptychError) as caught:
        load_settings(flags)
    assert str(caught.value).startswith(f"{next(iter(flags))} = (secret): ")


def test_children_get_secrets_by_their_environment_alone(tmp_path):
    plan = make_plan(Settings(model="signpost", port=0, api_key="sk-user"))
    key = plan.settings.cluster_key.get_secret_value()
    for instance in plan.instances("redis://:word@127.0.0.1:1", tmp_path):
        command = " ".join(instance.command.argv)
        assert not any(secret in command for secret in ("word", "sk-user", key))
        environment = instance.command.environment
        assert environment["TRIPTYCH_BROKER"] == "redis://:word@127.0.0.1:1"
        assert environment["TRIPTYCH_CLUSTER_KEY"] == key
        assert environment["TRIPTYCH_API_KEY"] == "sk-user"


@asynccontextmanager
async def tls_in_front_of(broker_url: str, authority: trustme.CA, host: str) -> AsyncIterator[int]:
    """A port on which the broker answers by TLS, with a certificate for `host`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    target = urlsplit(broker_url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def tls_url(broker_url: str, port: int, ca_file: Path | None) -> str:
    options = "" if ca_file is None else f"?ssl_ca_certs={ca_file}"
    return f"rediss://:{urlsplit(broker_url).password}@127.0.0.1:{port}{options}"


async def test_tls_by_the_companys_own_authority(broker_url, tmp_path):
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    async with tls_in_front_of(broker_url, authority, "127.0.0.1") as port:
        async with connect(tls_url(broker_url, port, ca_file), retries=0) as client:
            assert await client.ping()
        async with connect(tls_url(broker_url, port, None), retries=0) as client:
            with pytest.raises(RedisError, match="certificate verify failed"):
                await client.ping()
            with pytest.raises(TriptychError, match=r"certificate is refused: .*or of ssl_ca_certs in the URL"):
                await wait_until_reachable(client, 1e6)  # not tried again: it would stay as it is
    async with (
        tls_in_front_of(broker_url, authority, "another.example") as port,
        connect(tls_url(broker_url, port, ca_file), retries=0) as client,
    ):
        with pytest.raises(RedisError, match="certificate"):
            await client.ping()
        with pytest.raises(TriptychError, match=r"IP address mismatch.* for the host of --broker"):
            await wait_until_reachable(client, 1e6)
