"""The sender's half of one handoff in a world where the receiver, the network and the clock may do anything.

What is handed over is an encoder's output (offer, wait for the grant, compute, deliver) or keys and values (the same,
but part after part). Futures cannot be copied, so a copy of the world lives through the same actions again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, cast

from broker.cluster.registry import ABSENCE_S
from broker.handoff.channels import ChannelSender, Delivery
from broker.handoff.sender import MAX_SENDS, HandoffSender, Part, key_of
from broker.transports.tensors import TensorSender
from common.errors import ErrorInfo, TriptychError
from common.messages import (
    REPEAT_S,
    Grant,
    HandoffMessage,
    InputLayout,
    InstanceRecord,
    KvOffer,
    Offer,
    Receipt,
    Role,
    TensorHeader,
    Withdraw,
)
from tests.model.explore import Action
from tests.model.simulation.simulated_loop import EPOCH_S, SimulatedLoop

DATA = memoryview(bytes(64))
TIMEOUT_S = 10.0
GRANTS = ("granted", "cached", "refused", "cancelled")
RECEIPTS = ("stored", "expired", "cancelled", "corrupt")
DEADLINE_S = EPOCH_S + 2 * TIMEOUT_S
INPUT = Offer("r", 0, 0, "hash", "image", [4, 8], "bfloat16", 64, InputLayout(4, [(7, 4)]), "e0", DEADLINE_S)
KEYS_AND_VALUES = KvOffer("r", 0, 8, 0, [1, 2, 1, 2], [], "bfloat16", [], 0, 0, "p0", DEADLINE_S)
REFUSAL = ErrorInfo("item_too_large", "needs 9 bytes, the whole budget is 8")


def record(instance_id: str, role: Role, epoch: int = 1) -> InstanceRecord:
    return InstanceRecord(instance_id, role, epoch, "m", "f", "bfloat16", "http", "requests", tensor_address="t")


class _Network:
    """Takes what the sender sends: messages for Redis and tensors for a transport that can be told to fail."""

    def __init__(self) -> None:
        self.tensors: list[TensorHeader] = []
        self.withdrawn: list[Withdraw] = []
        self.broken = False

    def send_message(self, instance_id: str, channel: str, message: HandoffMessage) -> None:
        assert (instance_id, channel) == ("d0", "metadata")
        if isinstance(message, Withdraw):
            self.withdrawn.append(message)
        else:
            assert not self.withdrawn, "offered again after it was withdrawn"

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

    def __init__(self, offer: Offer | KvOffer = INPUT, num_parts: int = 1) -> None:
        self.offer, self.num_parts = offer, num_parts
        self.trace: list[Action] = []
        self.loop = SimulatedLoop()
        self.network = _Network()
        self.told: set[str] = set()
        channels, tensors = cast(ChannelSender, _Channels(self.network)), cast(TensorSender, _Tensors(self.network))
        self.handoffs = HandoffSender(channels, tensors, TIMEOUT_S)
        self.handoffs.own = record("e0", "encoder")
        self.computation_ended = asyncio.Event()
        self.outcome: str | None = None
        with self.loop.clocks():
            self.task = self.loop.create_task(self._hand_over())
            self.loop.settle()
        self.handoff = self.handoffs._handoffs[key_of(offer)]

    async def _hand_over(self) -> None:
        """What a worker does with an item, or with a prompt."""
        try:
            handoff = await self.handoffs.offer(self.offer, record("d0", "prefill_decode"))
            if handoff.grant.result().status == "cached":
                self.outcome = "cached"
                return
            await self.computation_ended.wait()
            if isinstance(self.offer, Offer):
                await self.handoffs.deliver(handoff, [4, 8], "bfloat16", DATA)
            else:
                for number in range(self.num_parts):
                    await self.handoffs.send(handoff, Part([4, 1, 2, 1, 2], "bfloat16", DATA, "self", 4 * number))
                self.handoffs.complete(handoff)
            self.outcome = "stored"
        except TriptychError as error:
            self.outcome = error.info.code
        except asyncio.CancelledError:
            self.outcome = "aborted"
            raise
        finally:
            self.handoffs.close(key_of(self.offer))

    # --- what can happen

    def actions(self) -> list[Action]:
        found: list[Action] = [("grant", status) for status in GRANTS]
        found += [("receipt", status, str(part)) for status in RECEIPTS for part in range(self.num_parts)]
        found += [("stale",), ("restarted",), ("gone",)]
        if not self.task.done():
            found += [("abort",), ("wait", "repeat"), ("wait", "timeout")]
        if not self.computation_ended.is_set():
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
        error = REFUSAL if status == "refused" else None
        self._deliver(Grant("r", self.offer.input_id, 0, cast(Any, status), error=error))

    def _receipt(self, status: str, part: str) -> None:
        self.told.add(f"{status} {part}")
        self._deliver(Receipt("r", self.offer.input_id, 0, cast(Any, status), int(part)))

    def _stale(self) -> None:
        """A message to a former life of this instance must not count."""
        self._deliver(Grant("r", self.offer.input_id, 0, "granted"), stale=True)

    def _deliver(self, message: HandoffMessage, *, stale: bool = False) -> None:
        self.handoffs.handle(Delivery(b"stream", b"1-0", message, stale))

    def _compute(self, network: str = "") -> None:
        self.network.broken = bool(network)
        self.computation_ended.set()

    def _restarted(self) -> None:
        self.handoffs.review({"d0": record("d0", "prefill_decode", epoch=2)})

    def _gone(self) -> None:
        for _ in range(2):  # in between nobody could look
            self.loop.advance_to(self.loop.now_s + ABSENCE_S + 0.1)
            self.handoffs.review({})

    def _abort(self) -> None:
        self.task.cancel()

    def _wait(self, until: str) -> None:
        self.loop.advance_to(self.loop.now_s + (REPEAT_S if until == "repeat" else TIMEOUT_S) + 0.1)

    # --- what has to hold

    def check(self) -> None:
        parts = [header.part for header in self.network.tensors]
        if parts:
            assert "granted" in self.told, "a tensor has been sent without a grant"
            assert self.computation_ended.is_set()
        assert parts == sorted(parts), "parts are not sent in order"
        assert all(parts.count(part) <= MAX_SENDS for part in parts)
        for part in set(parts) - {0}:
            assert self.told & {f"stored {part - 1}", "cached"}, "the next part is sent before the last one's receipt"
        assert self.handoffs.num_open == (not self.task.done()), "a handoff is open that nobody waits for"
        assert len(self.network.withdrawn) <= self.task.done()
        if self.task.done():
            assert self.outcome is not None
            done = self.outcome in ("stored", "cached") or self._is_answered_for_good()
            assert bool(self.network.withdrawn) != done, "what may still be kept for it is withdrawn, nothing else"
            assert self.handoff.grant.done(), "nobody can wait for this grant any more, yet it is open"
            assert self.handoff.receipt.done()

    def _is_answered_for_good(self) -> bool:
        grant = self.handoff.grant
        answered = grant.done() and not grant.cancelled() and grant.exception() is None
        return answered and grant.result().status != "granted"

    def run_quietly(self) -> None:
        """Nothing more comes: time alone must end it."""
        if not self.computation_ended.is_set():
            self.apply(("compute",))
        for _ in range(3):
            if not self.task.done():
                self.apply(("wait", "timeout"))
        assert self.task.done(), "silence has no end"

    def fingerprint(self) -> Hashable:
        return (
            self.handoff.state,
            self.handoff.part,
            self.handoff.asked_again,
            max(-1, round((self.handoff.patience_s - self.loop.now_s) / REPEAT_S)),
            _state(self.handoff.grant),
            _state(self.handoff.receipt),
            self.outcome,
            self.computation_ended.is_set(),
            self.network.broken,
            len(self.network.tensors),
            min(int((self.loop.now_s - EPOCH_S) / TIMEOUT_S), 2),
        )

    def copy(self) -> Sender:
        again = Sender(self.offer, self.num_parts)
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
