"""A cluster under steady load, its undisturbed answers, and rounds in which something breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import EngineConfig, Settings, Transport
from engine.handoff.early_offers import KEEP_S
from launch.cluster.instance import Reporter
from launch.cluster.local_cluster import LocalCluster
from tests.chaos.asks import salted
from tests.chaos.faults import CUTS, Breaker, Fault, allowed_endings, irreplaceable
from tests.chaos.network import Network, cabled
from tests.chaos.remains import Remains
from tests.eventually import eventually
from tools.soak.asking import Ending, Reply, send
from tools.soak.asks import Ask
from tools.soak.leak_check import EARLY_OFFERS, held
from tools.soak.run import TORCH_CACHE

IN_FLIGHT = 16
START_TIMEOUT_S = 150.0
ANSWER_TIMEOUT_S = 100.0
SLOW_S = 60.0
"""After so long without an answer all that everybody can tell is printed, while it can still be seen."""
RETURN_S = 100.0
"""How long a killed process may take to be ready again: cores may be busy with something else, too."""
SETTLE_S = 4.0
"""How soon after the last answer nothing may be held: what a lost connection tells is known within a second, on cores
that are busy with something else in two or three; silence alone says it after ten."""
ORPHANS_S = 15.0
"""How soon after a worker was killed, and started again, none of its processes and shared memory may be left: those
are asked to end first, and a supervisor's cores may be busy."""
PAUSE_S = 0.3


@dataclass
class Round:
    """What came of one round."""

    faults: Sequence[Fault]
    replies: list[tuple[Ask, Reply]] = field(default_factory=list)
    in_flight_at_fault: list[int] = field(default_factory=list)
    """At the moment of each."""

    @property
    def endings(self) -> Counter[str]:
        return Counter(reply.ending for _, reply in self.replies)


class ChaosHarness:
    """Asks, and what they are answered with when nothing breaks."""

    def __init__(self, cluster: LocalCluster, asks: list[Ask], network: Network) -> None:
        self.cluster, self.asks = cluster, asks
        self.breaker = Breaker(cluster, network)
        self._expected: dict[str, Reply] = {}
        self._salts = itertools.count()
        self.remains = Remains(cluster)

    def client(self) -> httpx.AsyncClient:
        """Of the proxy, without any limit on connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=5.0)
        return httpx.AsyncClient(base_url=self.cluster.base_url, timeout=timeout, limits=limits, trust_env=False)

    async def learn(self) -> None:
        """Get the undisturbed answers, all at once."""
        async with self.client() as http:
            replies = await asyncio.gather(*(send(http, ask) for ask in self.asks))
        for ask, reply in zip(self.asks, replies, strict=True):
            assert reply.ending == "whole", f"{ask.name} without any fault: {reply.ending} {reply.error}"
            self._expected[ask.name] = reply

    async def endure(self, *faults: Fault) -> Round:
        """Load the cluster, break it, judge every answer, and wait until it is whole and holds nothing.

        The load goes on until every fault has passed and the API says that it is ready, and then for one more request
        of each of the IN_FLIGHT.
        """
        await self.wait_until_nothing_is_held(RETURN_S)  # of the round before, should that have failed
        done, passed, may_ask_again = Round(faults), asyncio.Event(), asyncio.Event()
        self.remains.rest()
        allowed = allowed_endings(faults, self.cluster)
        under_way = Counter[str]()
        async with self.client() as http:
            slots = [self._slot(http, n, done, passed, may_ask_again, under_way) for n in range(IN_FLIGHT)]
            asking = asyncio.gather(*slots)

            def note() -> None:
                self.remains.look()
                done.in_flight_at_fault.append(under_way.total())

            proxy_dies = {(fault.kind, fault.target) for fault in faults} == {("kill", "proxy")}
            if not proxy_dies:
                may_ask_again.set()
            await self.breaker.run(faults, note)
            if proxy_dies:
                await self._settle(SETTLE_S, also_absent=False)  # nobody asks again before that
                may_ask_again.set()
            await self._wait_until_ready(*irreplaceable(faults, self.cluster))
            await eventually(lambda: self._api_is_ready(http), RETURN_S)
            passed.set()
            await asking
        self._judge(done, allowed)
        kinds = {fault.kind for fault in faults}
        unsaid = "kill" in kinds and bool(kinds & set(CUTS))
        await self.wait_until_nothing_is_held(unsaid=unsaid)
        return done

    async def _slot(
        self,
        http: httpx.AsyncClient,
        number: int,
        done: Round,
        passed: asyncio.Event,
        may_ask_again: asyncio.Event,
        under_way: Counter[str],
    ) -> None:
        """One request after the other: three of four with media that no cache knows.

        After one that was not answered whole the next one waits until asking again is allowed.
        """
        last = False
        for turn in itertools.count():
            last = passed.is_set()
            ask = self.asks[(number + turn * IN_FLIGHT) % len(self.asks)]
            asked = ask if turn % 4 == 3 else salted(ask, f"salt {next(self._salts)}")
            under_way["requests"] += 1
            slow = asyncio.get_running_loop().call_later(SLOW_S, self._tell_of, asked)
            reply = await send(http, asked)
            slow.cancel()
            under_way["requests"] -= 1
            done.replies.append((ask, reply))
            if reply.ending == "broken":
                reply.error += f"; held then: {await asyncio.to_thread(held, self.cluster)}"
            if last:
                return
            if reply.ending != "whole":
                await asyncio.sleep(PAUSE_S)
                await may_ask_again.wait()

    def fault_of(self, ask: Ask, reply: Reply, allowed: Collection[Ending] = ("whole",)) -> str | None:
        """What is wrong with a reply, compared with the undisturbed one; None if nothing is."""
        expected = self._expected[ask.name]
        right = reply.equals(expected) if reply.ending == "whole" else reply.begins(expected)
        if not right:
            return f"{ask.name}, {reply.ending}: {_difference(reply, expected)}"
        return None if reply.ending in allowed else f"{ask.name}: {reply.ending}: {reply.error}"

    def _judge(self, done: Round, allowed: Collection[Ending]) -> None:
        wrong = list(filter(None, (self.fault_of(ask, reply, allowed) for ask, reply in done.replies)))
        what = "; ".join(map(str, done.faults))
        assert not wrong, "\n".join([f"{what}; {dict(done.endings)}:", *wrong, *self._logs()])
        errors = Counter(reply.error for _, reply in done.replies if reply.error)
        assert done.endings["whole"] >= IN_FLIGHT, f"{what}: hardly anything was answered: {errors}"

    async def wait_until_nothing_is_held(self, settle_s: float = SETTLE_S, *, unsaid: bool = False) -> None:
        """Those that live let go within `settle_s`; then those that died come back, and hold nothing, either.

        With `unsaid`, offers of what was to be sent may be known for KEEP_S more: their senders were killed, their
        requests cut off, so that nobody withdraws them. Nothing is reserved for them.
        """
        for also_absent in (False, True):
            if also_absent:
                await self._wait_until_ready(*self.cluster.instances)
            await self._settle(settle_s, also_absent=also_absent, but_unsaid=unsaid)
            if unsaid:
                await self._settle(KEEP_S, also_absent=also_absent)
        deadline_s = time.monotonic() + ORPHANS_S
        while found := self.remains.found():
            assert time.monotonic() < deadline_s, f"left behind after {ORPHANS_S:g} s: {found}"
            await asyncio.sleep(0.05)

    async def _wait_until_ready(self, *instance_ids: str) -> None:
        deadline_s = time.monotonic() + RETURN_S
        while absent := [i for i in instance_ids if self.cluster.instances[i].state != "ready"]:
            assert time.monotonic() < deadline_s, f"not back after {RETURN_S:g} s: {absent}"
            await asyncio.sleep(0.1)

    async def _api_is_ready(self, http: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await http.get("/ready")).is_success
        return False

    async def _settle(self, settle_s: float, *, also_absent: bool, but_unsaid: bool = False) -> None:
        """Wait until nothing is held. With `but_unsaid`, offers of what never came are passed over."""
        deadline_s = time.monotonic() + settle_s
        while True:
            found = await asyncio.to_thread(held, self.cluster)
            if not also_absent:
                absent = {i.id for i in self.cluster.instances.values() if i.state != "ready"}
                found = {what: count for what, count in found.items() if not _is_of(absent, what)}
            if but_unsaid:
                found = _without_early_offers(found)
            if not found:
                return
            assert time.monotonic() < deadline_s, f"still held after {settle_s:g} s: {found}"
            await asyncio.sleep(0.05)

    def _tell_of(self, ask: Ask) -> None:
        print(f"{ask.name} has had no answer for {SLOW_S:g} s; held: {held(self.cluster)}", *self._logs(), sep="\n")

    def _logs(self) -> list[str]:
        """The last lines of everybody's log."""
        return [f"{i.id}: {i.child.log_tail()}" for i in self.cluster.instances.values() if i.child is not None]


def _is_of(instance_ids: set[str], what: str) -> bool:
    """Whether one of these will see to it when it is back. A tensor that one was sending through the broker waits for
    nobody."""
    return ":tensors:" not in what and not instance_ids.isdisjoint(re.split("[ :]", what))


def _without_early_offers(found: Mapping[str, float]) -> dict[str, float]:
    """A worker's early offers are among its open ones, too."""
    early = {what.removesuffix(EARLY_OFFERS): count for what, count in found.items() if what.endswith(EARLY_OFFERS)}
    notes = {f"{name}{kind}": count for name, count in early.items() for kind in (EARLY_OFFERS, "offers_open")}
    return {what: count for what, count in found.items() if count > notes.get(what, 0)}


def _difference(reply: Reply, expected: Reply) -> str:
    """Where tokens or text part."""
    for index in sorted(expected.tokens.keys() | reply.tokens.keys()):
        got, wanted = reply.tokens.get(index, []), expected.tokens.get(index, [])
        if got != wanted:
            at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), len(got))
            return (
                f"choice {index} differs at token {at} of {len(wanted)}: {got[at : at + 5]} for {wanted[at : at + 5]}"
            )
    return f"{dict(reply.text)!r} for {dict(expected.text)!r}, {reply.finish} for {expected.finish}"


class _LastWord(Reporter):
    """Keeps what a supervisor says at its end. It keeps logs of processes that were being started again, or that it had
    to end by force: on a busy machine not all are gone within three seconds."""

    kept_logs: str | None = None

    def stopped(self, killed: Sequence[str], kept_logs: str | None) -> None:
        self.kept_logs = kept_logs


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """This process's and those of the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@contextmanager
def arena(
    folder: Path,
    model: str,
    topology: str,
    make_asks: Callable[[str, int], list[Ask]],
    *,
    count: int = 24,
    transport: Transport = "auto",
    settings: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Iterator[ChaosHarness]:
    """A running cluster that has given its undisturbed answers; afterwards nothing of it is left.

    Its caches are small, so that what was there in one round is not in the next. `folder` is for its temporary files,
    `settings` for others than here.
    """
    small = {"kv_cache_bytes": 48 * 2**20, "encoder_cache_bytes": 2**20, "encoder_output_cache_bytes": 2**20}
    chosen = Settings(
        model=model,
        port=0,
        cluster="chaos",
        topology=topology,
        log_level="warning",
        transport=transport,
        max_queue_s=600.0,  # however slow the machine is: overload is not what breaks here
        engine=EngineConfig(num_threads=1, **{**small, **engine}),
        **settings or {},
    )
    told = _LastWord()
    cluster = LocalCluster(chosen, reporter=told, start_timeout_s=START_TIMEOUT_S)
    network = Network(chosen.cluster)
    cluster.supervisor.plan = cabled(cluster.supervisor.plan, network)
    try:
        with _temporary_files_in(folder), cluster:
            ready = ChaosHarness(cluster, make_asks(cluster.supervisor.plan.info.name, count), network)
            asyncio.run(ready.learn())
            yield ready
            ready.remains.look()
        assert ready.remains.found() == []
        left = {str(path) for path in folder.iterdir() if not path.name.startswith(TORCH_CACHE)}
        assert left <= {told.kept_logs}, left
    finally:
        network.close()
