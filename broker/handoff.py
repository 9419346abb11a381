"""The sender's side of a handoff, one small state machine per input:

    offer() -> OFFERED -> grant -> GRANTED -> deliver() -> SENT -> receipt -> done
                  |          |                                 |
                  +----------+----- error, cancel, deadline ---+--> done

It is known by (request id, input id, attempt). Messages that fit no handoff in the right state are duplicates or
strangers: counted and ignored. The receiver's decisions are made by its engine; see DecoderEngine.offer/deliver.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar

from broker.channels import ChannelSender, Delivery
from broker.registry import incompatibility
from broker.tensors import TensorSender
from common.errors import TriptychError
from common.messages import Grant, HandoffMessage, InstanceRecord, Offer, Receipt, TensorHeader

Key: TypeAlias = tuple[str, int, int]
"""(request id, input id, attempt)"""
State = Literal["offered", "granted", "sent", "done"]
ABSENCE_S: Final = 3.0
_T = TypeVar("_T")


def key_of(message: HandoffMessage | TensorHeader) -> Key:
    return message.request_id, message.input_id, message.attempt


@dataclass
class Handoff:
    """One input on its way to `receiver`. `times_s` holds the Unix time of each hop that has happened."""

    offer: Offer
    receiver: InstanceRecord
    state: State = "offered"
    grant: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    receipt: asyncio.Future[Receipt] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    times_s: dict[str, float] = field(default_factory=dict)

    def mark(self, hop: str) -> None:
        self.times_s[hop] = time.time()

    def fail(self, error: TriptychError) -> None:
        """Whatever is waited for, now or next, ends with `error`."""
        for future in (self.grant, self.receipt):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: at most one of the two is ever waited for


class HandoffSender:
    """All handoffs that start at this instance."""

    def __init__(self, channels: ChannelSender, tensors: TensorSender, timeout_s: float) -> None:
        """`timeout_s` bounds each single wait; an offer's own deadline bounds them all. Set `own` before the first."""
        self.own: InstanceRecord | None = None
        self._channels = channels
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._handoffs: dict[Key, Handoff] = {}
        self._seen: dict[str, tuple[InstanceRecord, float]] = {}
        self.outcomes: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    async def offer(self, offer: Offer, receiver: InstanceRecord | None) -> Handoff:
        """Offer an input to an instance and wait for the grant, which is `handoff.grant.result()`.

        A granted handoff stays open until `deliver` or `close`. A cached one is done: there is nothing to send.
        Raises TriptychError: "unavailable" where the receiver is gone, does not fit, or has cancelled; "timeout"
        where it did not answer in time; and whatever the receiver says where it refuses.
        """
        if self.own is None:
            raise TriptychError("internal_error", "an offer before this instance knows its own record")
        if receiver is None or not receiver.tensor_address:
            raise self._ended("unavailable", TriptychError("unavailable", "the receiving instance is not registered"))
        if (why := incompatibility(self.own, receiver)) is not None:
            raise self._ended("incompatible", TriptychError("unavailable", f"cannot hand over: {why}"))
        key = key_of(offer)
        if key in self._handoffs:
            raise TriptychError("internal_error", f"handoff {key} is open already")
        handoff = self._handoffs[key] = Handoff(offer, receiver)
        self._seen[receiver.instance_id] = receiver, time.monotonic()
        try:
            handoff.mark("offer_sent")
            self._channels.send(receiver.instance_id, "metadata", offer)
            grant = await self._wait(handoff.grant, "grant", handoff)
            if grant.status == "granted":
                return handoff
            if grant.status == "cached":
                self.outcomes["cached"] += 1
                self.close(key)
                return handoff
            if grant.status == "refused" and grant.error is not None:
                raise self._ended("refused", TriptychError(grant.error.code, grant.error.message, grant.error.param))
            raise self._ended("cancelled", TriptychError("unavailable", f"{receiver.instance_id} cancelled the offer"))
        except BaseException:
            self.close(key)
            raise

    async def deliver(self, handoff: Handoff, shape: list[int], dtype: str, data: memoryview) -> None:
        """Send the tensor of a granted handoff and wait for the receipt; the handoff is done afterwards.

        Raises TriptychError: "internal_error" where the tensor is not what was offered; "unavailable" where the
        receiver is gone or did not store it; "timeout" where no receipt came in time.
        """
        offer, receiver = handoff.offer, handoff.receiver
        try:
            if handoff.state != "granted":
                raise TriptychError("internal_error", f"deliver in state {handoff.state!r}: no tensor without a grant")
            if handoff.receipt.done():  # settled while it was being computed: there is nothing to send
                self._conclude(handoff, handoff.receipt.result())
                return
            if (shape, dtype, data.nbytes) != (offer.shape, offer.dtype, offer.size_bytes):
                what = f"made {shape} {dtype}, {data.nbytes} bytes; offered {offer.shape} {offer.dtype}"
                raise self._ended("mismatch", TriptychError("internal_error", f"the encoder {what}"))
            header = TensorHeader(*key_of(offer), offer.sender, receiver.epoch, shape, dtype, size_bytes=data.nbytes)
            handoff.state = "sent"
            handoff.mark("tensor_sent")
            await self._tensors.send(receiver, header, data, self._timeout_s)
            receipt = await self._wait(handoff.receipt, "receipt", handoff)
            self._conclude(handoff, receipt)
        finally:
            self.close(key_of(offer))

    def handle(self, delivery: Delivery) -> None:
        """A grant or receipt has come. Never raises."""
        message = delivery.message
        handoff = self._handoffs.get(key_of(message))
        if isinstance(message, Offer) or handoff is None or delivery.stale:
            self.outcomes["stray"] += 1
        elif isinstance(message, Grant) and handoff.state == "offered" and not handoff.grant.done():
            handoff.state = "granted" if message.status == "granted" else "done"
            handoff.mark("grant_received")
            handoff.grant.set_result(message)
        elif isinstance(message, Grant) and message.status == "cancelled" and not handoff.receipt.done():
            error = TriptychError("unavailable", f"{handoff.receiver.instance_id} took its grant back")
            handoff.fail(self._ended("cancelled", error))
        elif isinstance(message, Receipt) and handoff.state in ("granted", "sent") and not handoff.receipt.done():
            handoff.mark("receipt_received")
            handoff.receipt.set_result(message)
        else:
            self.outcomes["duplicate"] += 1

    def close(self, key: Key) -> None:
        """Forget a handoff; its answers, should they still come, are strays. Unknown keys are fine."""
        handoff = self._handoffs.pop(key, None)
        if handoff is not None:
            handoff.state = "done"
            handoff.grant.cancel()
            handoff.receipt.cancel()

    def lately_seen(self, instance_id: str) -> InstanceRecord | None:
        """An instance that was in the registry within the last ABSENCE_S seconds, as `review` saw it."""
        record, seen_s = self._seen.get(instance_id, (None, 0.0))
        return record if time.monotonic() - seen_s < ABSENCE_S else None

    def review(self, instances: dict[str, InstanceRecord]) -> None:
        """Compare with the registry: end the handoffs whose receiver has gone or has started anew.

        Called with the heartbeat. A receiver counts as gone after ABSENCE_S without an entry, so that a restart of
        Redis, which empties the registry for a moment, ends nothing.
        """
        now_s = time.monotonic()
        self._seen.update({instance_id: (record, now_s) for instance_id, record in instances.items()})
        self._seen = {i: seen for i, seen in self._seen.items() if now_s - seen[1] < ABSENCE_S}
        live = {i: record for i, (record, _) in self._seen.items()}
        self._tensors.keep_only(live.values())
        for handoff in list(self._handoffs.values()):
            current = live.get(handoff.receiver.instance_id)
            if current is None or current.epoch > handoff.receiver.epoch:
                what = "has left the registry" if current is None else "has started anew"
                error = TriptychError("unavailable", f"{handoff.receiver.instance_id} {what}")
                handoff.fail(self._ended("gone", error))

    async def _wait(self, future: asyncio.Future[_T], what: str, handoff: Handoff) -> _T:
        remaining_s = min(self._timeout_s, handoff.offer.deadline_s - time.time())
        try:
            async with asyncio.timeout(max(0.0, remaining_s)):
                return await future
        except TimeoutError as error:
            message = f"{handoff.receiver.instance_id} sent no {what} within {remaining_s:.1f} s"
            raise self._ended("timeout", TriptychError("timeout", message)) from error

    def _conclude(self, handoff: Handoff, receipt: Receipt) -> None:
        if receipt.status != "stored":
            message = f"{handoff.receiver.instance_id} did not store the input: {receipt.status}"
            raise self._ended(receipt.status, TriptychError("unavailable", message))
        self.outcomes["stored"] += 1

    def _ended(self, outcome: str, error: TriptychError) -> TriptychError:
        self.outcomes[outcome] += 1
        return error
