"""The one way to a Redis connection: deadlines on every call, retries with back-off over a restart of the server."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import TriptychError

SOCKET_TIMEOUT_S = 5.0
"""Longest wait for one reply; blocking reads must ask for less."""
CONNECTION_ERRORS: tuple[type[RedisError], ...] = (RedisConnectionError, RedisTimeoutError, BusyLoadingError)
"""What a restart of the server looks like from here."""


def connect(url: str, *, retries: int = 5) -> Redis:
    """A client of the broker at `url` (redis://, rediss:// or unix://). Connects at the first call, not here.

    A call that meets a lost connection is repeated `retries` times over about two seconds. Everything sent through
    it must therefore bear repetition. Raises TriptychError("invalid_request") where the URL is none.
    """
    try:
        return Redis.from_url(
            url,
            protocol=2,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=2.0,
            health_check_interval=15,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.8), retries, supported_errors=CONNECTION_ERRORS),
            retry_on_error=list(CONNECTION_ERRORS),
        )
    except ValueError as error:
        raise TriptychError(
            "invalid_request", f"broker URL {url!r}: {error}; try redis://host:6379", "broker"
        ) from error


def pass_on_cancellation() -> None:
    """Raise CancelledError if the running task has been cancelled. Belongs after Redis calls in tasks that are.

    redis-py sends commands with asyncio.wait_for, which in Python 3.11 swallows a cancellation that comes just when
    the sending is done (python/cpython#81839).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def wait_until_reachable(redis: Redis, timeout_s: float) -> None:
    """Return once the server answers.

    Raises TriptychError("unavailable") with the last error after `timeout_s` seconds.
    """
    last: object = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await redis.ping()
                    pass_on_cancellation()
                    return
                except CONNECTION_ERRORS as error:
                    last = error
                    await asyncio.sleep(0.1)
    except (TimeoutError, RedisError) as error:
        cause = last if isinstance(error, TimeoutError) else error
        message = f"the broker did not answer within {timeout_s:g} s ({cause}); is --broker right and Redis running?"
        raise TriptychError("unavailable", message) from error
