"""How many tokens a second pass one proxy: python -m tests.churn.flood --help.

A fake worker of its own process gives every stream its next token, all in one message, as a GPU with so many requests
would. A proxy that cannot keep up joins the tokens of a stream that wait, so events grow instead of their queue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from broker.cluster.curve import ClusterContext
from broker.cluster.redis_client import connect
from common.keys import ClusterKey
from common.messages import Abort, Generate, Tokens, ToWorker
from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tests.churn.cell import MODEL, Cell, CrowdSettings, cell
from tests.eventually import eventually
from tests.proxy.fake_cluster import FakeCluster
from tests.proxy.fake_workers import FakeWorker

WARM_UP_S: Final = 3.0
NUM_TOKENS: Final = 1500
"""Of an answer; the next one follows."""
IDS: Final = re.compile(rb'"token_ids":\[([^\]]+)\]')


class SteppingWorker(FakeWorker):
    """Gives all requests their next tokens, step after step."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster, "prefill_decode", "stepping")
        self._running: dict[str, tuple[bytes, Generate, int]] = {}
        self._words = cluster.text.encode("red blue green sign says one two three", add_special_tokens=False)

    async def handle(self, proxy: bytes, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self._running[message.request_id] = proxy, message, 0
        elif isinstance(message, Abort):
            self._running.pop(message.request_id, None)

    def step(self) -> None:
        tokens: dict[bytes, list[Tokens]] = {}
        for request_id, (proxy, message, have) in list(self._running.items()):
            done = have + 1 == message.sampling.max_tokens
            word = self._words[have % len(self._words)]
            token = Tokens(request_id, have, [word], "length" if done else None, done=done, attempt=message.attempt)
            tokens.setdefault(proxy, []).append(token)
            self._running[request_id] = proxy, message, have + 1
            if done:
                del self._running[request_id]
        for proxy, of_proxy in tokens.items():
            self.server.send(proxy, *of_proxy)


async def work(fakes: CrowdSettings, step_s: float) -> None:
    """Be the worker, until killed."""
    info, key = load_model_info(fakes.model), ClusterKey(fakes.cluster_key)
    cluster = FakeCluster(connect(fakes.broker), info, TextProcessor(info), fakes.cluster, ClusterContext(key))
    worker = SteppingWorker(cluster)
    await worker.start(key_id=key.key_id)
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + step_s, time.monotonic() - step_s)
        await asyncio.sleep(due_s - time.monotonic())
        worker.step()


async def read(port: int, counts: list[int]) -> None:
    """Ask for one answer after the other; count the tokens and the events that come."""
    message = {"role": "user", "content": "Go on."}
    body = {"model": MODEL, "messages": [message], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        while piece := await reader.read(2**16):
            for ids in IDS.findall(piece):  # an event that two pieces share is missed, one in many
                counts[0] += ids.count(b",") + 1
                counts[1] += 1
        writer.close()


async def flood(one: Cell, streams: int, seconds: float) -> str:
    """Return what passed the proxy, as a line."""
    counts = [0, 0]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(int(one.url.rpartition(":")[2]), counts)) for _ in range(streams)]
        await asyncio.sleep(WARM_UP_S)
        before, (tokens, events) = one.usage(), counts
        await asyncio.sleep(seconds)
        after, tokens, events = one.usage(), counts[0] - tokens, counts[1] - events
        for task in tasks:
            task.cancel()
    elapsed_s, cpu_s = after.time_s - before.time_s, after.proxy_s - before.proxy_s
    load = f"{streams} streams: {tokens / elapsed_s:.0f} tokens/s, {tokens / events:.2f} an event"
    return f"{load}; the proxy took {100 * cpu_s / elapsed_s:.0f} % of a core, {1e6 * cpu_s / tokens:.0f} us a token"


async def main(streams: list[int], step_s: float, seconds: float) -> None:
    for number in streams:
        with tempfile.TemporaryDirectory() as logs, cell(Path(logs), processes=0, max_inflight=2 * number) as one:
            await one.ready()
            order = msgspec.json.encode(one.fakes).decode()
            command = ["-m", "tests.churn.flood", "--work", order, "--step-s", f"{step_s}"]
            worker = await asyncio.create_subprocess_exec(sys.executable, *command)
            try:
                await eventually(lambda one=one: one.in_use() == 1, 60.0)
                print(await flood(one, number, seconds), flush=True)
            finally:
                worker.kill()
                await worker.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.churn.flood", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 640])
    parser.add_argument("--step-s", type=float, default=0.02, help="of the worker")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        asyncio.run(work(msgspec.json.decode(given.work, type=CrowdSettings), given.step_s))
    else:
        asyncio.run(main(given.streams, given.step_s, given.seconds))
