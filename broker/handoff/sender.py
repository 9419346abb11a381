"""The sender's side of a handoff, a small state machine per encoder output, or per request's KV:

                                      +---- receipt, the next part ----+
                                      v                                |
    offer() -> OFFERED -> grant -> GRANTED -> send() ---------------> SENT -> last receipt, complete() -> done
                  |                   |                                |
                  +-------------------+-- error, cancel, deadline -----+--> done

Its key is (request id, input id, attempt). Messages that fit no handoff in the right state are duplicates or strays:
counted and ignored. The receiver's engine decides on offers; see DecoderEngine.offer.

Redis may lose messages. So an offer is repeated, with the same attempt, until its grant and then each receipt has come:
a receiver that knows the offer answers again. A receiver that still waits for the tensor gets it again, as after a
corrupt one. But the way may only be slow: each time the wait doubles, or repeated tensors would fill a full line.

A handoff closed before its end is withdrawn, so that the receiver need not wait until the lease expires.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar

from broker.cluster.registry import Presence, incompatibility
from broker.handoff.channels import ChannelSender, Delivery
from broker.transports.payload import Payload
from broker.transports.shm.push_buffer import PushBuffer
from broker.transports.tensors import TensorSender
from common.errors import TriptychError
from common.messages import (
    REPEAT_S,
    Encode,
    Grant,
    HandoffMessage,
    InstanceRecord,
    KvOffer,
    Offer,
    Receipt,
    TensorHeader,
    Withdraw,
)

Key: TypeAlias = tuple[str, int, int]
"""(request id, input id, attempt)"""
State = Literal["offered", "granted", "sent", "done"]
Table = Literal["", "self", "cross"]
MAX_SENDS: Final = 4
"""Of one part: the first time, and three more."""
SIGNS_PER_LEASE: Final = 3
_T = TypeVar("_T")


def key_of(message: HandoffMessage | TensorHeader | Encode) -> Key:
    return message.request_id, message.input_id, message.attempt


@dataclass(frozen=True)
class Part:
    """One tensor of a handoff. A part of KV names its table and first token; an encoder output is a single part."""

    shape: list[int]
    dtype: str
    data: Payload
    table: Table = ""
    first: int = 0


@dataclass
class Handoff:
    """A handoff to `receiver`, waiting for `grant` or the `receipt` of `part`; `times_s` has the Unix time of hops."""

    offer: Offer | KvOffer
    receiver: InstanceRecord
    grant: asyncio.Future[Grant]
    receipt: asyncio.Future[Receipt]
    state: State = "offered"
    part: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    asked_again: bool = False  # whether the tensor has come, since it was sent
    patience_s: float = 0.0  # until then (monotonic) it is taken to be on its way
    last_sign_s: float = 0.0  # of life of the sender (monotonic)
    early: PushBuffer | None = None  # discarded with the end of the handoff

    def mark(self, hop: str) -> None:
        self.times_s[hop] = time.time()

    def fail(self, error: TriptychError) -> None:
        """End the present or next wait with `error`."""
        for future in (self.grant, self.receipt):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: at most one of the two is ever waited for


class HandoffSender:
    """All handoffs started by this instance."""

    def __init__(self, channels: ChannelSender, tensors: TensorSender, timeout_s: float) -> None:
        """`timeout_s` bounds each wait for a receipt, an offer's own deadline all waits. Set `own` before the first."""
        self.own: InstanceRecord | None = None
        self._channels = channels
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._handoffs: dict[Key, Handoff] = {}
        self.presence = Presence()
        self.outcomes: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    async def offer(self, offer: Offer | KvOffer, receiver: InstanceRecord | None) -> Handoff:
        """Offer a tensor to an instance and wait for the grant, `handoff.grant.result()`.

        A granted handoff stays open until `deliver` or `close`. A cached one is done: there is nothing to send.
        Raises TriptychError: "unavailable" if the receiver is gone, unfit, or has cancelled; "timeout" without an
        answer in time; and the receiver's own error for a refusal.
        """
        handoff = self._open(offer, receiver)
        try:
            handoff.mark("offer_sent")
            self._send_offer(handoff)
            grant = await self._wait(handoff, handoff.grant, "grant", offer.deadline_s)
            if grant.status == "granted":
                return handoff
            if grant.status == "cached":
                self.outcomes["cached"] += 1
                self.close(key_of(offer))
                return handoff
            if grant.status == "refused" and grant.error is not None:
                raise self._ended("refused", TriptychError(grant.error.code, grant.error.message, grant.error.param))
            name = handoff.receiver.instance_id
            raise self._ended("cancelled", TriptychError("unavailable", f"{name} cancelled the offer"))
        except BaseException:
            self.close(key_of(offer))
            raise

    def reserve_early(self, handoff: Handoff) -> PushBuffer | None:
        """Return a path for the computing thread to send the only tensor at once; None without a path."""
        offer = handoff.offer
        if not isinstance(offer, Offer) or handoff.state != "granted":
            return None
        header = self._header(handoff, offer.shape, offer.dtype, offer.size_bytes)
        handoff.early = self._tensors.reserve_early(handoff.receiver, header)
        return handoff.early

    async def deliver(self, handoff: Handoff, shape: list[int], dtype: str, data: Payload) -> None:
        """Send the only tensor of a granted handoff, unless sent early already, and complete the handoff.

        Raises as `send` does, and "internal_error" where the tensor is not what was offered.
        """
        offer = handoff.offer
        try:
            if isinstance(offer, Offer) and (shape, dtype, data.nbytes) != (offer.shape, offer.dtype, offer.size_bytes):
                what = f"made {shape} {dtype}, {data.nbytes} bytes; offered {offer.shape} {offer.dtype}"
                raise self._ended("mismatch", TriptychError("internal_error", f"the encoder {what}"))
            await self.send(handoff, Part(shape, dtype, data))
            self.complete(handoff)
        finally:
            self.close(key_of(offer))

    async def send(self, handoff: Handoff, part: Part) -> None:
        """Send the next part of a granted handoff, if not sent early, and wait for its receipt.

        Raises TriptychError: "internal_error" without a grant; "unavailable" if the receiver is gone, did not store the
        part, or found it damaged too often; "timeout" if no receipt came in time.
        """
        if handoff.state != "granted":
            raise TriptychError("internal_error", f"send in state {handoff.state!r}: no tensor without a grant")
        loop = asyncio.get_running_loop()
        deadline_s = min(handoff.offer.deadline_s, time.monotonic() + self._timeout_s)
        early = handoff.early
        sent_s = None if early is None else early.sent_s
        if early is not None and sent_s is not None:
            self._note_sent(handoff, sent_s)
            self._tensors.num_sent[early.scheme] += 1
            self.outcomes["left_early"] += 1
        for number in range(MAX_SENDS):
            if not handoff.receipt.done():  # else the receiver settled it during the computation
                if number:
                    self.outcomes["sent_again"] += 1
                if number or sent_s is None:
                    self._note_sent(handoff, time.time())
                    header = self._header(handoff, part.shape, part.dtype, part.data.nbytes, part.table, part.first)
                    await self._tensors.send(handoff.receiver, header, part.data, self._timeout_s)
                # the 1st, 2nd, 4th and 8th repetition of the offer are answered with the tensor
                handoff.patience_s = time.monotonic() + REPEAT_S * (2**number - 0.5)
            receipt = await self._wait(handoff, handoff.receipt, "receipt", deadline_s)
            if receipt.status == "stored":
                handoff.state, handoff.part, handoff.receipt = "granted", handoff.part + 1, loop.create_future()
                return
            if receipt.status != "corrupt":
                message = f"{handoff.receiver.instance_id} did not store it: {receipt.status}"
                raise self._ended(receipt.status, TriptychError("unavailable", message))
            handoff.receipt = loop.create_future()
        message = f"{handoff.receiver.instance_id} did not get it undamaged in {MAX_SENDS} attempts"
        raise self._ended("corrupt", TriptychError("unavailable", message))

    def handle(self, delivery: Delivery) -> None:
        """Handle a received grant or receipt. Never raises."""
        message = delivery.message
        handoff = self._handoffs.get(key_of(message))
        if isinstance(message, Offer | KvOffer | Withdraw) or handoff is None or delivery.stale:
            self.outcomes["stray"] += 1
        elif isinstance(message, Grant):
            self._handle_grant(handoff, message)
        elif handoff.state in ("granted", "sent") and message.part == handoff.part and not handoff.receipt.done():
            handoff.mark("receipt_received")
            handoff.receipt.set_result(message)
        else:
            self.outcomes["duplicate"] += 1

    def _handle_grant(self, handoff: Handoff, grant: Grant) -> None:
        if handoff.state == "offered" and not handoff.grant.done():
            handoff.state = "granted" if grant.status == "granted" else "done"
            handoff.mark("grant_received")
            handoff.grant.set_result(grant)
        elif grant.status == "cancelled" and not handoff.receipt.done():
            error = TriptychError("unavailable", f"{handoff.receiver.instance_id} took its grant back")
            handoff.fail(self._ended("cancelled", error))
        elif (handoff.state, handoff.asked_again, handoff.receipt.done()) == ("sent", True, False) and grant.status in (
            "granted",
            "cached",
        ):
            self._handle_answer(handoff, grant)
        else:
            self.outcomes["duplicate"] += 1

    def _handle_answer(self, handoff: Handoff, grant: Grant) -> None:
        """Handle the answer to an offer repeated after sending: the receipt is lost, or the tensor is lost or slow."""
        stored = grant.status == "cached" or grant.num_parts > handoff.part
        if not stored and time.monotonic() < handoff.patience_s:
            return
        handoff.asked_again = False
        status: Literal["stored", "corrupt"] = "stored" if stored else "corrupt"
        handoff.receipt.set_result(Receipt(*key_of(grant), status, handoff.part))

    def complete(self, handoff: Handoff) -> None:
        """Complete a handoff after all parts are stored."""
        self.outcomes["stored"] += 1
        handoff.state = "done"
        self.close(key_of(handoff.offer))

    def keep_alive(self, handoff: Handoff) -> None:
        """Send a sign of life after a silence: the receiver renews the lease."""
        if time.monotonic() - handoff.last_sign_s > self._timeout_s / SIGNS_PER_LEASE:
            self._send_offer(handoff)

    def _send_offer(self, handoff: Handoff) -> None:
        handoff.last_sign_s = time.monotonic()
        self._channels.send(handoff.receiver.instance_id, "metadata", handoff.offer)

    def fail(self, key: Key, error: TriptychError) -> None:
        """End a handoff from this side: all waits end with `error`. Unknown keys are ignored."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            handoff.fail(error)

    def close(self, key: Key) -> None:
        """Forget a handoff, and withdraw it if unfinished. Late answers are strays; unknown keys are ignored."""
        handoff = self._handoffs.pop(key, None)
        if handoff is not None:
            if handoff.state != "done":
                self._channels.send(handoff.receiver.instance_id, "metadata", Withdraw(*key, handoff.offer.sender))
            handoff.state = "done"
            handoff.grant.cancel()
            handoff.receipt.cancel()
            if handoff.early is not None:
                handoff.early.discard()

    def review(self, instances: dict[str, InstanceRecord]) -> None:
        """End handoffs to a receiver that is gone or has restarted. Called with the heartbeat."""
        live = self.presence.look(instances)
        self._tensors.keep_only(live.values())
        for handoff in list(self._handoffs.values()):
            current = live.get(handoff.receiver.instance_id)
            if current is None or current.epoch > handoff.receiver.epoch:
                what = "has left the registry" if current is None else "has started anew"
                error = TriptychError("unavailable", f"{handoff.receiver.instance_id} {what}")
                handoff.fail(self._ended("gone", error))

    def _open(self, offer: Offer | KvOffer, receiver: InstanceRecord | None) -> Handoff:
        if self.own is None:
            raise TriptychError("internal_error", "an offer before this instance knows its own record")
        if receiver is None or not receiver.tensor_address:
            raise self._ended("unavailable", TriptychError("unavailable", "the receiving instance is not registered"))
        if (why := incompatibility(self.own, receiver)) is not None:
            raise self._ended("incompatible", TriptychError("unavailable", f"cannot hand over: {why}"))
        key = key_of(offer)
        if key in self._handoffs:
            raise TriptychError("internal_error", f"handoff {key} is open already")
        loop = asyncio.get_running_loop()
        handoff = self._handoffs[key] = Handoff(offer, receiver, loop.create_future(), loop.create_future())
        if self.presence.get(receiver.instance_id) is not receiver:  # else it was seen before, not now
            self.presence.note(receiver)
        return handoff

    def _note_sent(self, handoff: Handoff, at_s: float) -> None:
        handoff.state, handoff.asked_again, handoff.last_sign_s = "sent", False, time.monotonic()
        handoff.times_s["tensor_sent"] = at_s

    def _header(
        self, handoff: Handoff, shape: list[int], dtype: str, size_bytes: int, table: Table = "", first: int = 0
    ) -> TensorHeader:
        """Make the header of the next part; the transport adds the checksum."""
        key, sender, epoch = key_of(handoff.offer), handoff.offer.sender, handoff.receiver.epoch
        return TensorHeader(*key, sender, epoch, shape, dtype, size_bytes, part=handoff.part, table=table, first=first)

    async def _wait(self, handoff: Handoff, answer: asyncio.Future[_T], what: str, deadline_s: float) -> _T:
        """Wait for the answer and repeat the offer meanwhile. Raises TriptychError("timeout")."""
        name, began_s = handoff.receiver.instance_id, time.monotonic()
        while True:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 and not answer.done():
                message = f"{name} sent no {what} within {max(0.0, deadline_s - began_s):.1f} s"
                raise self._ended("timeout", TriptychError("timeout", message))
            done, _ = await asyncio.wait({answer}, timeout=min(REPEAT_S, remaining_s))
            if done:
                return answer.result()
            if time.monotonic() < deadline_s:
                self.outcomes["offer_repeated"] += 1
                handoff.asked_again = handoff.state == "sent"
                self._send_offer(handoff)

    def _ended(self, outcome: str, error: TriptychError) -> TriptychError:
        self.outcomes[outcome] += 1
        return error
