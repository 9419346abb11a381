"""Memory for preprocessed media: turns are kept, sizes add up, and a wait that is given up takes no memory."""

from __future__ import annotations

import asyncio

from services.encode.preprocess_pool import MemoryGate


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_that_find_no_memory_are_admitted_in_turn_as_others_release_theirs() -> None:
    gate = MemoryGate(limit_bytes=100, max_unweighed=2)
    order: list[int] = []

    async def acquire(number: int) -> None:
        await gate.acquire()
        order.append(number)
        gate.weigh(60)

    tasks = [asyncio.create_task(acquire(number)) for number in range(5)]
    await settled()
    assert (order, gate.held_bytes, gate.num_waiting) == ([0, 1], 120, 3)
    gate.release(60)
    await settled()
    assert (order, gate.held_bytes) == ([0, 1, 2, 3], 180), "60 left memory for one, and for one unweighed beside it"
    for _ in range(4):
        gate.release(60)
        await settled()
    assert all(task.done() for task in tasks)
    assert (order, gate.held_bytes, gate.num_waiting) == ([0, 1, 2, 3, 4], 0, 0)


async def test_an_item_that_is_larger_than_the_limit_is_admitted_alone() -> None:
    gate = MemoryGate(limit_bytes=10, max_unweighed=1)
    await gate.acquire()
    gate.weigh(1000)
    other = asyncio.create_task(gate.acquire())
    await settled()
    assert not other.done()
    gate.release(1000)
    await other
    gate.weigh(0)
    assert gate.held_bytes == 0


async def test_a_cancelled_wait_takes_no_memory_even_if_its_turn_had_just_come() -> None:
    gate = MemoryGate(limit_bytes=10, max_unweighed=1)
    await gate.acquire()
    waiting, called, last = (asyncio.create_task(gate.acquire()) for _ in range(3))
    await settled()
    waiting.cancel()
    gate.weigh(0)  # the first in the queue is cancelled already: the second is called
    called.cancel()  # before it has noticed
    await settled()
    assert waiting.cancelled()
    assert called.cancelled()
    await last
    gate.weigh(0)
    assert (gate.num_waiting, gate.held_bytes) == (0, 0)
