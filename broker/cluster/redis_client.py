"""Connect to Redis: deadlines on every call, retries with back-off over a restart of the server.

The URL has all options: redis://user:password@host:port/db, rediss:// for TLS, and behind a question mark redis-py's
own, such as `ssl_ca_certs=/etc/triptych/ca.pem`. It may hold a password: messages show it by `without_secrets`.

Sentinels name the server that leads: redis+sentinel://user:password@sentinel1:26379,sentinel2:26379/name/db, or
rediss+sentinel:// with TLS to all. The user is the servers' own; `sentinel_username` and `sentinel_password` behind the
question mark are the sentinels'. Each new connection asks the sentinels and makes sure that the server leads.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import TriptychError, invalid

SOCKET_TIMEOUT_S = 5.0
"""Longest wait for one reply; blocking reads must ask for less."""
_CONNECT_S = 2.0
_NEXT_ADDRESS_S = 0.25
_SENTINEL_PORT = 26379
_SENTINEL_S = 1.0
"""Longest wait for one sentinel: the next is asked within the deadline of a connection."""
MAX_CONNECTIONS = 2**31
"""No cap: tensors through the broker used up redis-py's 100, and heartbeats got none."""
CONNECTION_ERRORS: tuple[type[RedisError], ...] = (RedisConnectionError, RedisTimeoutError, BusyLoadingError)
"""Errors of a client while the server restarts."""
REFUSALS: tuple[type[RedisError], ...] = (AuthenticationError, NoPermissionError)
"""Errors of a server that refuses the client; redis-py counts the first as a lost connection."""

_T = TypeVar("_T")


class _PatientRetry(Retry):
    """Retry errors explained by a restart of the server; raise refusals at once."""

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[_T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> _T:
        def may_pass(error: Exception) -> bool:
            return not isinstance(error, REFUSALS) and (is_retryable is None or is_retryable(error))

        return await super().call_with_retry(do, fail, may_pass, with_failure_count)


class _Connection(AbstractConnection):
    """A connection to the first address of a host to answer. Its commands can be cancelled at any moment.

    redis-py writes with asyncio.wait_for, which in Python 3.11 swallows a cancellation that comes when that has just
    ended (python/cpython#81839): the command would wait for its reply, and be repeated, against its caller's deadline.
    """

    def _connection_arguments(self) -> dict[str, Any]:
        """Return the TCP arguments. A silent address must not use up the time of the next (RFC 8305).

        Loops that are not asyncio's own, such as uvloop, try one address after the other.
        """
        given: dict[str, Any] = cast(Any, super())._connection_arguments()
        own = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
        return {**given, "happy_eyeballs_delay": _NEXT_ADDRESS_S} if own else given

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        num_before = task.cancelling() if task else 0
        try:
            await super().send_packed_command(command, check_health)
        finally:  # an error is no reason to go on, either
            if task is not None and task.cancelling() > num_before:
                await self.disconnect(nowait=True)  # nobody is going to read the reply
                raise asyncio.CancelledError

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Read a reply. A server that stops to lead ends blocking reads with UNBLOCKED: that is a lost connection."""
        try:
            return await super().read_response(*args, **kwargs)
        except ResponseError as error:
            if not str(error).startswith("UNBLOCKED"):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"the broker does not lead any more: {error}") from error


def connect(url: str, *, retries: int = 5) -> Redis:
    """A client of the broker at `url` (redis://, rediss://, unix:// or through sentinels). Connects at the first call.

    A TLS server must show a certificate for the host of the URL, by the system's authorities or `ssl_ca_certs`.
    A call that meets a lost connection is repeated `retries` times over about two seconds: every command must bear
    repetition. Raises TriptychError("invalid_request") where the URL is none.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": _CONNECT_S,
        "max_connections": MAX_CONNECTIONS,
        "health_check_interval": 15,
        "retry": _PatientRetry(
            ExponentialWithJitterBackoff(base=0.05, cap=0.8), retries, supported_errors=CONNECTION_ERRORS
        ),
        "retry_on_error": list(CONNECTION_ERRORS),
    }
    try:
        by_sentinels = url.startswith(("redis+sentinel://", "rediss+sentinel://"))
        redis = _leader(url, options) if by_sentinels else Redis.from_url(url, **options)
    except ValueError as error:
        raise invalid(f"broker URL {without_secrets(url)!r}: {error}; try redis://host:6379", "broker") from error
    pool, kind = redis.connection_pool, redis.connection_pool.connection_class
    pool.connection_class = type(f"_{kind.__name__}", (_Connection, kind), {})
    return redis


def own_host(url: str | None) -> str:
    """Return this host's address on the way to the broker at `url`, for others; its name where both are one host.

    ZMQ resolves names in the thread of all connections. A resolver that does not know a container yet may take half a
    minute: an address needs none.
    """
    place = urlsplit("//" + urlsplit(url or "").netloc.rpartition("@")[2].partition(",")[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.hostname or "localhost", 1))  # sends nothing
            address = str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
    return socket.gethostname() if ip_address(address).is_loopback else address


def _leader(url: str, options: dict[str, Any]) -> Redis:
    """A client of the server that the sentinels of `url` call the leader, asked anew for each connection.

    Raises ValueError where the URL names no sentinel or no group of servers.
    """
    parts = urlsplit(url)
    user, at, places = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not places or not name:
        raise ValueError("name sentinels and the servers' name: redis+sentinel://host:26379,host:26379/mymaster")
    scheme = parts.scheme.removesuffix("+sentinel")
    given = cast("dict[str, Any]", parse_url(f"{scheme}://{user}{at}leader/{database}?{parts.query}"))
    ours = {key.removeprefix("sentinel_"): given.pop(key) for key in list(given) if key.startswith("sentinel_")}
    tls = given.pop("connection_class", None) is not None
    own = {key: value for key, value in given.items() if key.startswith("ssl_")}
    hosts = [urlsplit(f"//{place}") for place in places.split(",")]
    if not all(host.hostname for host in hosts):
        raise ValueError(f"{places!r} names an empty host")
    sentinels = cast(Any, Sentinel)(
        [(host.hostname, host.port or _SENTINEL_PORT) for host in hosts],
        sentinel_kwargs={
            **own,
            **ours,
            "ssl": tls,
            "protocol": 2,
            "socket_timeout": _SENTINEL_S,
            "socket_connect_timeout": _SENTINEL_S,
            "retry": Retry(NoBackoff(), 0),  # the next sentinel is asked at once
        },
    )
    given.pop("host")
    kind = cast(Any, SentinelConnectionPool)
    pool = kind(name, sentinels, ssl=tls, redis_connect_func=_greet_leader, **{**options, **given})
    return Redis.from_pool(pool)


async def _greet_leader(connection: AbstractConnection) -> None:
    """Log in, and ask whether the server leads: a sentinel may not have heard yet that it stopped to.

    Raises ConnectionError, repeated like a lost connection, where the server is a replica.
    """
    await connection.on_connect()
    await connection.send_command("ROLE", check_health=False)
    role = await connection.read_response()
    if role[0] != b"master":
        raise RedisConnectionError("the broker that the sentinels name does not lead")


def without_secrets(url: str) -> str:
    """A broker's URL for people to read: scheme, host, port and database, neither user nor password nor options."""
    scheme, separator, rest = url.partition("://")
    place = (rest or scheme).rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{place}" if separator else place


def refused(error: RedisError) -> TriptychError:
    """Return the explanation and remedy for an answer among REFUSALS."""
    message = f"the broker does not let us in: {error}; does the broker's URL hold its password?"
    return TriptychError("unavailable", message, "broker")


def _certificate_fault(error: BaseException) -> TriptychError | None:
    """Return the explanation for an untrusted server certificate, an error beyond retries."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    why = f"{cause.verify_message}; it must be valid, for the host of --broker, and by an authority of the system or of"
    return TriptychError("unavailable", f"the broker's certificate is refused: {why} ssl_ca_certs in the URL", "broker")


async def wait_until_reachable(
    redis: Redis, timeout_s: float, call: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Return once the server answers: PING, or all that `call` asks, which must bear repetition.

    Raises TriptychError("unavailable"): after `timeout_s`, and at once for a refusal or an untrusted certificate.
    """
    last: object = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await (redis.ping() if call is None else call())
                    return
                except REFUSALS as error:
                    raise refused(error) from error
                except CONNECTION_ERRORS as error:
                    if (fault := _certificate_fault(error)) is not None:
                        raise fault from error
                    last = error
                    await asyncio.sleep(0.1)
    except (TimeoutError, RedisError) as error:
        cause = last if isinstance(error, TimeoutError) else error
        message = f"the broker did not answer within {timeout_s:g} s ({cause}); is --broker right and Redis running?"
        raise TriptychError("unavailable", message) from error
