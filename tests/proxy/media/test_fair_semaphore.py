"""Slots that requests share: no request has all, the request with fewest is next, and every slot comes back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.media.fair_semaphore import FairSemaphore, Share, SlotTimeout

NUM_REQUESTS = 6


async def settle() -> None:
    """Whatever can go on without more time does so."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass
class Fetches:
    """Fetches of some requests: each waits for a place and stays there until it is told to end."""

    places: FairSemaphore
    shares: list[Share] = field(init=False)
    ends: dict[asyncio.Task[None], asyncio.Event] = field(default_factory=dict)
    left_behind: list[asyncio.Future[None]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # whose fetches have had a place, in order
    holding: list[asyncio.Task[None]] = field(default_factory=list)  # the same

    def __post_init__(self) -> None:
        self.shares = [Share(self.places) for _ in range(NUM_REQUESTS)]

    def begin(self, request: int) -> asyncio.Task[None]:
        """Of these, some fail in the end, and some leave work behind where they are cancelled."""
        end = asyncio.Event()
        task = asyncio.create_task(self._fetch(request, len(self.ends), end))
        self.ends[task] = end
        return task

    async def _fetch(self, request: int, number: int, end: asyncio.Event) -> None:
        share = self.shares[request]
        async with share.slot():
            task = asyncio.current_task()
            assert task is not None
            self.begun.append(request)
            self.holding.append(task)
            try:
                await end.wait()
            except asyncio.CancelledError:
                if number % 2:  # as a look-up that nobody can end
                    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self.left_behind.append(work)
                    share.keep_for(work)
                raise
            if number % 3 == 2:
                raise ValueError("it failed")

    @property
    def num_waiting(self) -> int:
        return sum(len(share.turns) for share in self.shares)

    def check(self) -> None:
        held = [share.num_held for share in self.shares]
        assert self.places.num_free + sum(held) == self.places.num_slots
        assert self.places.num_free >= 0
        for share, num_held in zip(self.shares, held, strict=True):
            if share.turns:  # nobody waits who may have another place
                assert num_held >= self.places.num_free / 4
        assert {id(share) for share in self.places.waiting} == {id(share) for share in self.shares if share.turns}


steps = st.tuples(
    st.sampled_from(["begin", "begin", "begin", "end", "cancel", "work ends", "settle"]), st.integers(0, 1000)
)


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(steps, max_size=60))
def test_every_place_comes_back_however_a_fetch_ends(num_slots: int, story: list[tuple[str, int]]) -> None:
    async def play() -> None:
        fetches = Fetches(FairSemaphore(num_slots, patience_s=60.0))
        for what, number in story:
            tasks = list(fetches.ends)
            if what == "begin":
                fetches.begin(number % NUM_REQUESTS)
            elif what == "settle":
                await settle()
                fetches.check()
            elif what == "work ends" and fetches.left_behind:
                fetches.left_behind.pop(number % len(fetches.left_behind)).set_result(None)
            elif what == "end" and tasks:
                fetches.ends[tasks[number % len(tasks)]].set()
            elif what == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
        for end in fetches.ends.values():
            end.set()
        await settle()
        fetches.check()
        for work in fetches.left_behind:
            work.set_result(None)
        await asyncio.wait_for(asyncio.gather(*fetches.ends, return_exceptions=True), 20.0)
        await settle()
        fetches.check()
        assert (fetches.places.num_free, fetches.num_waiting) == (num_slots, 0)

    asyncio.run(play())


async def test_one_request_has_many_places_but_never_all_of_them() -> None:
    fetches = Fetches(FairSemaphore(64, patience_s=60.0))
    tasks = [fetches.begin(0) for _ in range(100)]
    await settle()
    assert 8 <= fetches.shares[0].num_held <= 16
    for request in range(1, NUM_REQUESTS):
        tasks += [fetches.begin(request) for _ in range(100)]
        await settle()
        assert fetches.shares[request].num_held > 1
    assert fetches.places.num_free > 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert fetches.places.num_free == 64 - len(fetches.left_behind)
    assert fetches.left_behind
    for work in fetches.left_behind:
        work.set_result(None)
    await settle()
    assert fetches.places.num_free == 64


async def test_the_next_place_is_for_the_request_that_has_fewest_then_for_each_in_turn() -> None:
    fetches = Fetches(FairSemaphore(2, patience_s=60.0))
    for request in (0, 1, 0, 0, 2, 2, 3):
        fetches.begin(request)
    await settle()
    assert fetches.begun == [0, 1]
    for number in range(len(fetches.ends)):  # whoever has had a place for longest gives it back
        fetches.ends[fetches.holding[number]].set()
        await settle()
        fetches.check()
    assert fetches.begun == [0, 1, 0, 2, 3, 0, 2]
    await asyncio.gather(*fetches.ends, return_exceptions=True)


async def test_who_has_no_place_in_time_is_told_and_who_has_one_waits_for_more() -> None:
    fetches = Fetches(FairSemaphore(1, patience_s=0.2))
    holding = fetches.begin(0)
    await settle()
    another, stranger = fetches.begin(0), fetches.begin(1)
    with pytest.raises(SlotTimeout, match=r"none of these places has come free within 0\.2 s") as caught:
        await asyncio.wait_for(stranger, 20.0)
    assert (caught.value.info.code, caught.value.info.http_status) == ("overloaded", 429)
    await asyncio.sleep(0.5)
    assert not another.done()
    fetches.ends[holding].set()
    await settle()
    assert fetches.shares[0].num_held == 1
    fetches.ends[another].set()
    await asyncio.gather(*fetches.ends, return_exceptions=True)
    assert fetches.places.num_free == 1
