"""A proxy's end of the conversation with a worker, closed behind a test's block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from broker.cluster.rpc import WorkerClient


@asynccontextmanager
async def worker_client(*arguments: Any, **options: Any) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(*arguments, **options)
    try:
        yield client
    finally:
        client.close()
