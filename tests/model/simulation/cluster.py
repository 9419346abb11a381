"""A whole cluster in one process: the real proxy, workers and engines over a network that may do anything.

Every step is one thing that happens: a message arrives, an engine makes a turn, time goes on, something dies. After
each one the promises are checked; `run_quietly` then lets everything come to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

from common.config import Settings
from common.errors import ErrorInfo, TriptychError
from common.messages import Generate, InstanceRecord, Role, decode_to_worker
from common.sampling_params import SamplingParams
from proxy.dispatch.dispatcher import Dispatcher
from proxy.dispatch.jobs import Job, MediaItem, make_slots
from proxy.dispatch.worker_pool import WorkerPool
from proxy.server.metrics import ProxyMetrics, Timelines
from tests.model.simulation.network import Connection, Letter, Network, SimulatedClient, SimulatedRegistry
from tests.model.simulation.simulated_loop import SimulatedLoop
from tests.model.simulation.symbols import expected_tokens, media, model_info, placeholder, rows_of, tiny_config
from tests.model.simulation.workers import SimulatedWorker, SteppedThread, symbolic_workers

HANDOFF_TIMEOUT_S = 4.0
REQUEST_TIMEOUT_S = 5000.0
"""Far more than all other waits together: a request that ends by this one has been forgotten by somebody."""
QUIET_S = 120.0
"""However the faults were, so long after the last one everything has ended."""


@dataclass
class Client:
    """One request, and what has come of it."""

    job: Job
    expected: list[int]
    task: asyncio.Task[None] | None = None
    tokens: list[int] = field(default_factory=list)
    error: ErrorInfo | None = None
    left: bool = False

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()


class Cluster:
    """`topology` names the workers: {"e0": "encoder", "d0": "prefill_decode"}.

    With `encoder_fallback` those that prefill encode where no encoder is.
    """

    def __init__(self, topology: Mapping[str, Role], *, encoder_fallback: bool = False, **engine: Any) -> None:
        self.stack = ExitStack()
        self.loop = SimulatedLoop()
        self.stack.enter_context(self.loop.clocks())
        self.stack.enter_context(symbolic_workers())
        self.network = Network()
        self.stack.enter_context(
            patch(
                "proxy.dispatch.worker_pool.WorkerClient",
                lambda _, where, name, __, life: SimulatedClient(self.network, where, name, life),
            )
        )
        config = tiny_config(**({"block_size": 2, "num_blocks": 12, "cache_rows": 3} | engine))
        self.settings = Settings(handoff_timeout_s=HANDOFF_TIMEOUT_S, encoder_fallback=encoder_fallback, engine=config)
        self.topology = dict(topology)
        self.workers: dict[str, SimulatedWorker] = {}
        self.clients: list[Client] = []
        self.faulty = False
        self.way_s = 0.0
        """What everything takes from the proxy to a worker."""
        self._epoch = 0
        for name in self.topology:
            self.start(name)
        self.start_proxy()
        self.pass_time(1.0)
        assert len(self.pool._workers) == len(self.topology), "the proxy has not found the workers"

    def start_proxy(self) -> None:
        """The first one, or another one in its place."""
        self._epoch += 1
        self.dispatcher = Dispatcher(self.settings, ProxyMetrics(), Timelines())
        fingerprint = model_info().fingerprint
        own = InstanceRecord("proxy", "proxy", self._epoch, "signpost", fingerprint, "", "http://simulated", "")
        registry = cast(Any, SimulatedRegistry(self.network))
        self.pool = WorkerPool(registry, own, self.dispatcher, self._proxy_failed, cast(Any, None))
        self.run(self._start_pool())

    def _proxy_failed(self) -> None:
        self.loop.errors.append(RuntimeError(f"the proxy cannot go on: {self.pool.failure}"))

    def _stop_pool(self) -> None:
        for task in list(self.pool._tasks):
            task.cancel()
        self.loop.settle()

    async def _start_pool(self) -> None:
        self.pool.start()

    def run(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self.loop.settle()
        if task.done():
            task.result()

    # --- what people and fate do

    def start(self, name: str) -> None:
        """Start a worker, for the first time or again."""
        self._epoch += 1
        self.run(self._start_worker(name, self._epoch))

    async def _start_worker(self, name: str, epoch: int) -> None:
        worker = SimulatedWorker(self.network, name, self.topology[name], self.settings, epoch)
        self.workers[name] = worker
        await worker.begin()

    def kill(self, name: str) -> None:
        self.faulty = True
        self.workers.pop(name).die()
        self.loop.settle()

    def kill_proxy(self) -> None:
        """Its clients see a closed connection; another one takes its place."""
        self.faulty = True
        self.network.cut_off("proxy")
        for client in self.clients:
            if not client.ended:
                self.leave(client)
        self._stop_pool()
        self.start_proxy()

    def lose_broker(self, *, emptied: bool, away_s: float, silent: bool = False) -> None:
        """It is away for a while, or empty when it comes back, or both. A `silent` one is there and says nothing."""
        self.faulty = True
        if emptied:
            self.network.empty_broker()
        if silent:
            self.network.broker_answers.clear()
        else:
            self.network.broker_is_away = away_s > 0
        self.pass_time(away_s)
        self.network.broker_is_away = False
        self.network.broker_answers.set()
        self.loop.settle()

    def ask(self, *pictures: tuple[str, int], num_tokens: int = 3) -> Client:
        """A request with a text token before and after each picture, (name, rows)."""
        number = len(self.clients)
        prompt, expanded, contents = [5], [5], [""]
        indices, items = [], []
        for name, rows in pictures:
            item = MediaItem.of("image", media(name, rows), "messages")
            items.append(item)
            indices.append(len(prompt))
            prompt += [placeholder(), 7]
            expanded += [*[placeholder()] * rows_of(item.data), 7]
            contents += [*[item.content_hash] * rows, ""]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        job = Job(f"r{number}", prompt, sampling, make_slots(items, indices), items)
        client = Client(job, expected_tokens(expanded, contents, num_tokens))
        self.clients.append(client)
        client.task = self.loop.create_task(self._converse(client))
        self.loop.settle()
        return client

    async def _converse(self, client: Client) -> None:
        try:
            async with aclosing(
                self.dispatcher.run(self.pool, client.job, self.loop.now_s + REQUEST_TIMEOUT_S)
            ) as batches:
                async for batch in batches:
                    client.tokens += batch.token_ids
        except TriptychError as error:
            client.error = error.info

    def leave(self, client: Client) -> None:
        """The client goes away."""
        assert client.task is not None
        client.left = True
        client.task.cancel()
        self.loop.settle()

    def preempt(self, name: str) -> None:
        """The youngest running request of a worker loses its blocks, as if somebody else needed them."""
        engine = self.workers[name].engine
        if engine is not None and engine.scheduler.running:
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda request: request.order))
            engine.state.has_changed = True

    # --- what happens by itself, in any order

    def threads_due(self) -> list[tuple[str, SteppedThread]]:
        workers = sorted(self.workers.items())
        return [(name, thread) for name, worker in workers for thread in worker.threads if thread.is_due()]

    def turn(self, thread: SteppedThread) -> None:
        thread.turn()
        self.loop.settle()

    def arrive(self, letter: Letter, *, keep: bool = False) -> None:
        """A loose message arrives, if there is somebody; with `keep` it will come again."""
        if not keep:
            self.network.loose.remove(letter)
        worker = self.workers.get(letter.target)
        if worker is not None:
            worker.take(letter)
            self.loop.settle()

    def lines(self) -> list[tuple[Connection, bool]]:
        """Connections with something under way; True: to the worker."""
        connections = self.network.connections.values()
        latest_s = self.loop.now_s - self.way_s
        found = [(one, True) for one in connections if one.to_worker and one.to_worker[0][0] <= latest_s]
        return found + [(one, False) for one in connections if one.to_proxy and not one.closed]

    def requests_under_way(self) -> list[tuple[Connection, tuple[float, bytes]]]:
        """Those to generate, as they are on their connection."""
        return [
            (one, sent)
            for one in self.network.connections.values()
            for sent in one.to_worker
            if isinstance(decode_to_worker(sent[1]), Generate)
        ]

    def move(self, connection: Connection, to_worker: bool) -> None:
        """The next message of a line arrives."""
        if to_worker:
            message = decode_to_worker(connection.to_worker.popleft()[1])
            worker = self.workers.get(connection.worker[0])
            if worker is not None and worker.epoch == connection.worker[1]:
                worker.server.received.put_nowait((connection.identity, message))
        else:
            answer = connection.to_proxy.popleft()
            if answer is None:
                connection.lost.set()
            else:
                connection.received.put_nowait(answer)
        self.loop.settle()

    def go_on(self, number: int) -> None:
        """One of the things that can happen without a fault, by number."""
        lines, letters, threads = self.lines(), self.network.loose, self.threads_due()
        things = len(lines) + len(letters) + len(threads)
        if not things:
            return
        number %= things
        if number < len(lines):
            self.move(*lines[number])
        elif number < len(lines) + len(letters):
            self.arrive(letters[number - len(lines)])
        else:
            self.turn(threads[number - len(lines) - len(letters)][1])

    def pass_time(self, seconds: float) -> None:
        self.loop.advance_to(self.loop.now_s + seconds)

    # --- what has to hold, always

    def check(self) -> None:
        for worker in self.workers.values():
            if worker.engine is not None:
                worker.engine.check_integrity()
                cache = worker.engine.cache
                assert cache.used_bytes <= cache.capacity_bytes
        for client in self.clients:
            assert client.tokens == client.expected[: len(client.tokens)], f"{client.job.request_id} got other tokens"

    # --- and in the end

    def run_quietly(self, *, without: Set[str] = frozenset()) -> None:
        """Let everything happen, in order, until nothing is left to do; who is away comes back, but for `without`."""
        self.network.loose = [letter for letter in self.network.loose if not letter.damaged]
        for name in sorted(self.topology.keys() - self.workers.keys() - without):
            self.start(name)
        end_s = self.loop.now_s + QUIET_S
        while self.loop.now_s < end_s:
            self._drain()
            if all(client.ended for client in self.clients) and self._is_quiet():
                break
            self.pass_time(self._next_moment_s() - self.loop.now_s)
        for client in self.clients:
            self._check_end(client)
        for name, worker in self.workers.items():
            assert not worker.what_is_held(), f"{name} still holds {worker.what_is_held()}"
        assert len(self.dispatcher.runners) == 0
        loads = {name: vars(worker.load) for name, worker in self.pool._workers.items()}
        assert not any(value for load in loads.values() for value in load.values()), f"the proxy counts {loads}"

    def _check_end(self, client: Client) -> None:
        name = client.job.request_id
        assert client.ended, f"{name} has not ended"
        if client.left:
            return
        if client.error is None:
            assert client.tokens == client.expected, f"{name} ended with {client.tokens} of {client.expected}"
        else:
            assert self.faulty, f"{name} failed though nothing went wrong: {client.error}"
            assert client.error.retryable, f"{name} did not end cleanly: {client.error}"

    def _drain(self) -> None:
        """Everything that can happen without time going on."""
        for _ in range(10_000):
            if self.lines():
                self.move(*self.lines()[0])
            elif self.network.loose:
                self.arrive(self.network.loose[0])
            elif due := self.threads_due():
                self.turn(due[0][1])
            else:
                return
            self.check()
        raise AssertionError("an engine runs in circles")

    def _is_quiet(self) -> bool:
        return not any(worker.what_is_held() for worker in self.workers.values())

    def _next_moment_s(self) -> float:
        times = [self.loop.next_timer_s()]
        times += [thread.next_deadline_s() for worker in self.workers.values() for thread in worker.threads]
        return max(self.loop.now_s, min(time for time in times if time is not None)) + 1e-6

    def close(self) -> None:
        for client in self.clients:
            if client.task is not None:
                client.task.cancel()
        for worker in self.workers.values():
            worker.die()
        self._stop_pool()
        self.stack.close()
