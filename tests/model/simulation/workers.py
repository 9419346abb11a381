"""Worker processes of a simulated cluster: the real shell's conversations, the real role, the real engine thread.

What is made up: sockets, Redis, the model's arithmetic (see symbols), and that an engine thread makes a turn when the
simulation says so.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

from broker.handoff.channels import Delivery
from broker.transports.tensors import TensorReceiver, TensorSender
from common.config import Settings
from common.messages import HandoffMessage, Role
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.runner.profile import load_runner
from services.encode.preprocess_pool import PreprocessPool
from services.membership import Membership, make_record
from services.process.drain import DrainState
from services.process.engine_thread import EngineThread
from services.process.handoff_trace import HandoffTrace
from services.process.metrics import WorkerMetrics
from services.process.request_owners import RequestOwners
from services.process.work import WorkMeter
from services.roles.factory import make_role
from services.worker_context import WorkerContext
from services.worker_process import WorkerProcess
from tests.model.simulation.network import (
    Letter,
    Network,
    SimulatedChannels,
    SimulatedReader,
    SimulatedRegistry,
    SimulatedServer,
    SimulatedTensorReceiver,
    SimulatedTensorSender,
)
from tests.model.simulation.simulated_loop import SimulatedLoop
from tests.model.simulation.symbols import TOKEN_BYTES, SymbolicEncoder, SymbolicPool, SymbolicRunner, model_info

HELD = {
    "encoder_items_open",
    "encoder_items_computing",
    "encoder_held_bytes",
    "preprocess_waiting",
    "handoffs_open",
    "prefills_open",
    "inputs_encoding_here",
    "inputs_landing",
}
"""Gauges of what a worker holds for somebody."""


class SteppedThread(EngineThread[Any, Any]):
    """An engine thread whose turns are made by the simulation."""

    engine: Any = None
    failure: BaseException | None = None

    def start(self) -> None:
        self.engine = self._build()
        self.loaded.set_result(None)

    def is_due(self) -> bool:
        """Whether the real thread would wake up now."""
        deadline_s = self._next_deadline_s(self.engine)
        late = deadline_s is not None and deadline_s <= time.monotonic()
        return late or self._inbound.qsize() > 0 or self.engine.has_work()

    def next_deadline_s(self) -> float | None:
        deadline_s: float | None = self._next_deadline_s(self.engine)
        return deadline_s

    def turn(self) -> None:
        self._turn(self.engine)


class SimulatedContext(WorkerContext):
    """Connections of a worker into the simulated network."""

    receiver: SimulatedTensorReceiver
    network: Network

    def tensor_sender(self) -> TensorSender:
        return cast(TensorSender, SimulatedTensorSender(self.network))

    def tensor_receiver(self, max_bytes: int) -> TensorReceiver:
        return cast(TensorReceiver, self.receiver)


class SimulatedWorker(WorkerProcess):
    """One life of one worker. Its conversations with proxies, registry and heartbeat are those of the real shell."""

    def __init__(self, network: Network, instance_id: str, role: Role, settings: Settings, epoch: int) -> None:
        self.network, self.instance_id, self.epoch = network, instance_id, epoch
        self.alive = True
        self._proxies, self._work = RequestOwners(), WorkMeter()
        self._drain = DrainState(lambda: len(self._proxies), settings.request_timeout_s)
        registry = cast(Any, SimulatedRegistry(network))
        self._membership = Membership(registry, self._proxies, self._drain, dict)
        self._reader = cast(Any, SimulatedReader(network))
        self.server = SimulatedServer(network, (instance_id, epoch))
        self._server = cast(Any, self.server)
        self.receiver = SimulatedTensorReceiver()
        self._context = SimulatedContext(
            settings=settings,
            info=model_info(),
            instance_id=instance_id,
            epoch=epoch,
            host="simulated",
            dtype="float32",
            zmq_context=cast(Any, None),
            redis=cast(Any, None),
            registry=registry,
            channels=cast(Any, SimulatedChannels(network, lambda: self.alive)),
            server=self._server,
            proxies=self._proxies,
            metrics=WorkerMetrics(),
            hops=HandoffTrace(),
        )
        object.__setattr__(self._context, "network", network)
        object.__setattr__(self._context, "receiver", self.receiver)
        self._role = self.role = make_role(role, self._context)
        self.record = make_record(self._context, self.role, http_port=0, drain=DrainState(lambda: 0, 0.0))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def threads(self) -> list[SteppedThread]:
        return [cast(SteppedThread, thread) for thread in self.role.threads]

    @property
    def engine(self) -> DecoderEngine | None:
        """The engine of a worker with a decoder."""
        return next((one.engine for one in self.threads if isinstance(one.engine, DecoderEngine)), None)

    async def begin(self) -> None:
        """As the real shell does once its sockets are open."""
        for thread in self.threads:
            thread.start()
        await self.role.start(self.record)
        self.network.epochs[self.instance_id] = self.epoch
        await self._membership.join(self.record)
        for coroutine in (*self.role.tasks(), self._receive_requests(), self._watch_proxies(), self._beat()):
            task = asyncio.get_running_loop().create_task(coroutine)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A part that ends by itself would end a real worker."""
        error = None if task.cancelled() else task.exception()
        if self.alive:
            cast(SimulatedLoop, asyncio.get_running_loop()).errors.append(
                error or RuntimeError("a worker's task ended")
            )

    def die(self) -> None:
        """No goodbye: nothing that it does from now on can be seen."""
        self.alive = False
        self.network.epochs.pop(self.instance_id, None)
        self.network.lose((self.instance_id, self.epoch))
        for task in self._tasks:
            task.cancel()
        self.role.close()

    def take(self, letter: Letter) -> None:
        if letter.channel is None:
            self.receiver.received.put_nowait(letter.tensor())
        elif letter.channel in self.role.channels:
            stale = letter.epoch is not None and letter.epoch != self.epoch
            self.role.handle_delivery(Delivery(b"", b"", cast(HandoffMessage, letter.read()), stale))

    def what_is_held(self) -> dict[str, float]:
        """What is not 0 though it should be in a worker that has nothing to do."""
        gauges = self._context.metrics.gauges
        held: dict[str, float] = {name: gauges[name]() for name in HELD & gauges.keys()}
        held["requests"] = len(self._proxies)
        receiver = getattr(self.role, "_receiver", None)
        if receiver is not None:
            held["offers"] = len(receiver._offers)
        held["engine"] = self.engine is not None and not self.engine.is_empty()
        held["engines at work"] = sum(thread.engine.has_work() for thread in self.threads)
        return {name: value for name, value in held.items() if value}


@contextmanager
def symbolic_workers() -> Iterator[None]:
    """Meanwhile workers are made with the stand-ins of this package, wherever the real ones are imported."""
    substitutes: dict[object, object] = {
        EngineThread: SteppedThread,
        load_runner: SymbolicRunner,
        EncoderEngine: SymbolicEncoder,
        PreprocessPool: SymbolicPool,
    }
    for role in ("encoder", "prefill", "decoder"):
        importlib.import_module(f"services.roles.{role}")
    with ExitStack() as stack:
        stack.enter_context(patch("services.handoff.kv_sender.PART_BYTES", 2 * TOKEN_BYTES))
        for module, name, value in _users_of(list(substitutes)):
            stack.enter_context(patch.object(module, name, substitutes[value]))
        yield


def _users_of(values: list[object]) -> Iterator[tuple[Any, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("services", "engine"):
            continue
        for name, value in list(vars(module).items()):
            if any(value is one for one in values):
                yield module, name, value
