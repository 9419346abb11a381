"""The sender's half of one handoff in a world where the receiver, the network and the clock may do anything.

The handoff is that of the encoder: offer, wait for the grant, compute, deliver. Futures cannot be copied, so a copy
of the world lives through the same actions again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, cast

from broker.channels import ChannelSender, Delivery
from broker.handoff import ABSENCE_S, HandoffSender, key_of
from broker.tensors import TensorSender
from common.errors import ErrorInfo, TriptychError
from common.messages import Grant, HandoffMessage, InputLayout, InstanceRecord, Offer, Receipt, Role, TensorHeader
from tests.model.explore import Action
from tests.model.simulated_loop import EPOCH_S, SimulatedLoop

DATA = memoryview(bytes(64))
TIMEOUT_S = 10.0
GRANTS = ("granted", "cached", "refused", "cancelled")
RECEIPTS = ("stored", "expired", "cancelled", "corrupt")
OFFER = Offer(
    "r", 0, 0, "hash", "image", [4, 8], "bfloat16", 64, InputLayout(4, [(7, 4)]), "e0", 1, EPOCH_S + 2 * TIMEOUT_S
)
REFUSAL = ErrorInfo("item_too_large", "needs 9 bytes, the whole budget is 8")


def record(instance_id: str, role: Role, epoch: int = 1) -> InstanceRecord:
    return InstanceRecord(instance_id, role, epoch, "m", "f", "bfloat16", "http", "requests", tensor_address="t")


class _Network:
    """Takes what the sender sends: messages for Redis and tensors for a transport that can be told to fail."""

    def __init__(self) -> None:
        self.offers = 0
        self.tensors: list[TensorHeader] = []
        self.broken = False

    def send_message(self, instance_id: str, channel: str, message: HandoffMessage) -> None:
        assert (instance_id, channel) == ("d0", "metadata")
        self.offers += 1

    async def send_tensor(self, receiver: object, header: TensorHeader, data: memoryview, timeout_s: float) -> None:
        self.tensors.append(header)
        if self.broken:
            await asyncio.sleep(timeout_s)
            raise TriptychError("unavailable", "took none")


class _Channels:
    def __init__(self, network: _Network) -> None:
        self.send = network.send_message


class _Tensors:
    def __init__(self, network: _Network) -> None:
        self.send = network.send_tensor

    def keep_only(self, receivers: object) -> None:
        """Connections are no subject here."""


class Sender:
    """One state of the world: the real `HandoffSender` and the actions that have led here."""

    def __init__(self) -> None:
        self.trace: list[Action] = []
        self.loop = SimulatedLoop()
        self.network = _Network()
        self.told: set[str] = set()
        channels, tensors = cast(ChannelSender, _Channels(self.network)), cast(TensorSender, _Tensors(self.network))
        self.handoffs = HandoffSender(channels, tensors, TIMEOUT_S)
        self.handoffs.own = record("e0", "encoder")
        self.computed = False
        self.computation_ended = asyncio.Event()
        self.outcome: str | None = None
        with self.loop.clocks():
            self.task = self.loop.create_task(self._hand_over())
            self.loop.settle()
        self.handoff = self.handoffs._handoffs[key_of(OFFER)]

    async def _hand_over(self) -> None:
        """What a worker does with an item."""
        try:
            handoff = await self.handoffs.offer(OFFER, record("d0", "prefill_decode"))
            if handoff.grant.result().status == "cached":
                self.outcome = "cached"
                return
            await self.computation_ended.wait()
            await self.handoffs.deliver(handoff, [4, 8], "bfloat16", DATA)
            self.outcome = "stored"
        except TriptychError as error:
            self.outcome = error.info.code
        except asyncio.CancelledError:
            self.outcome = "aborted"
            raise
        finally:
            self.handoffs.close(key_of(OFFER))

    # --- what can happen

    def actions(self) -> list[Action]:
        found = [("grant", status) for status in GRANTS] + [("receipt", status) for status in RECEIPTS]
        found += [("stale",), ("restarted",), ("gone",)]
        if not self.task.done():
            found += [("abort",), ("wait",)]
        if not self.computed:
            found += [("compute",), ("compute", "broken")]
        return found

    def apply(self, action: Action) -> None:
        self.trace.append(action)
        kind, *rest = action
        with self.loop.clocks():
            getattr(self, f"_{kind}")(*rest)
            self.loop.settle()
        self.check()

    def _grant(self, status: str) -> None:
        self.told.add(status)
        self._deliver(Grant("r", 0, 0, cast(Any, status), error=REFUSAL if status == "refused" else None))

    def _receipt(self, status: str) -> None:
        self._deliver(Receipt("r", 0, 0, cast(Any, status)))

    def _stale(self) -> None:
        """A message to a former life of this instance must not count."""
        self._deliver(Grant("r", 0, 0, "granted"), stale=True)

    def _deliver(self, message: HandoffMessage, *, stale: bool = False) -> None:
        self.handoffs.handle(Delivery(b"stream", b"1-0", message, stale))

    def _compute(self, network: str = "") -> None:
        self.computed = True
        self.network.broken = bool(network)
        self.computation_ended.set()

    def _restarted(self) -> None:
        self.handoffs.review({"d0": record("d0", "prefill_decode", epoch=2)})

    def _gone(self) -> None:
        self.loop.advance_to(self.loop.now_s + ABSENCE_S + 0.1)
        self.handoffs.review({})

    def _abort(self) -> None:
        self.task.cancel()

    def _wait(self) -> None:
        self.loop.advance_to(self.loop.now_s + TIMEOUT_S + 0.1)

    # --- what has to hold

    def check(self) -> None:
        if self.network.tensors:
            assert "granted" in self.told, "a tensor has been sent without a grant"
            assert self.computed
        assert self.handoffs.num_open == (not self.task.done()), "a handoff is open that nobody waits for"
        if self.task.done():
            assert self.outcome is not None
            assert self.handoff.grant.done(), "nobody can wait for this grant any more, yet it is open"
            assert self.handoff.receipt.done()

    def run_quietly(self) -> None:
        """Nothing more comes: time alone must end it."""
        if not self.computed:
            self.apply(("compute",))
        for _ in range(3):
            if not self.task.done():
                self.apply(("wait",))
        assert self.task.done(), "silence has no end"

    def fingerprint(self) -> Hashable:
        late = self.loop.now_s > EPOCH_S + TIMEOUT_S, self.loop.now_s > EPOCH_S + 2 * TIMEOUT_S
        return (
            self.handoff.state,
            _state(self.handoff.grant),
            _state(self.handoff.receipt),
            self.outcome,
            self.computed,
            self.network.broken,
            len(self.network.tensors),
            *late,
        )

    def copy(self) -> Sender:
        again = Sender()
        for action in self.trace:
            again.apply(action)
        return again


def _state(future: asyncio.Future[Any]) -> str:
    if not future.done():
        return "open"
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return future.result().status if error is None else type(error).__name__
