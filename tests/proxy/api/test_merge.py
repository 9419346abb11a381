"""Items of several streams: as they come or in order, no further ahead of the reader than it takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from proxy.api.merge import MAX_AHEAD, merge_streams


async def counts(number: int, last: int, made: Counter[int], gate: asyncio.Event | None = None) -> AsyncGenerator[int]:
    """Yield 0 to `last` - 1, once the gate opens, and note how many were made."""
    if gate is not None:
        await gate.wait()
    for item in range(last):
        made[number] += 1
        yield item


async def test_in_order_the_items_of_later_streams_are_kept() -> None:
    gate, made = asyncio.Event(), Counter[int]()
    streams = [counts(0, 3, made, gate), counts(1, 0, made), counts(2, 2, made)]
    async with aclosing(merge_streams(streams, in_order=True)) as items:
        first = asyncio.ensure_future(anext(items))
        for _ in range(50):
            await asyncio.sleep(0)
        assert made[2] == 2
        assert not first.done()
        gate.set()
        found = [await first] + [item async for item in items]
    assert found == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


async def test_as_they_come_nobody_waits_for_a_slow_stream() -> None:
    gate, made = asyncio.Event(), Counter[int]()
    async with aclosing(merge_streams([counts(0, 1, made, gate), counts(1, 2, made)])) as items:
        assert [await anext(items), await anext(items)] == [(1, 0), (1, 1)]
        gate.set()
        assert [item async for item in items] == [(0, 0)]


@pytest.mark.parametrize("in_order", [False, True])
async def test_a_reader_that_does_not_read_stops_those_who_produce(in_order: bool) -> None:
    made = Counter[int]()
    streams = [counts(number, 10 * MAX_AHEAD, made) for number in range(3)]
    async with aclosing(merge_streams(streams, in_order=in_order)) as items:
        await anext(items)
        for _ in range(20 * MAX_AHEAD):
            await asyncio.sleep(0)
        assert made.total() <= 2 * MAX_AHEAD
    assert [stream.ag_frame for stream in streams] == [None] * 3, "all are closed"


@pytest.mark.parametrize("in_order", [False, True])
async def test_the_first_exception_ends_all_streams(in_order: bool) -> None:
    async def fails() -> AsyncGenerator[int]:
        raise ValueError("no")
        yield 0

    waits = counts(0, 1, Counter(), asyncio.Event())
    with pytest.raises(ValueError, match="no"):
        async with aclosing(merge_streams([waits, fails()], in_order=in_order)) as items:
            await anext(items)
    assert waits.ag_frame is None
