"""Memory for preprocessed media: turns are kept, sizes add up, and nobody who gives up takes a place along."""

from __future__ import annotations

import asyncio

from services.encode.memory_gate import MemoryGate, MemoryTicket


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_find_no_room_come_in_one_after_another_as_others_leave() -> None:
    room = MemoryGate(limit_bytes=100, max_unweighed=2)
    order: list[int] = []

    async def enter(number: int) -> MemoryTicket:
        place = await room.enter()
        order.append(number)
        place.weigh(60)
        return place

    tasks = [asyncio.create_task(enter(number)) for number in range(5)]
    await settled()
    assert (order, room.held_bytes, room.num_waiting) == ([0, 1], 120, 3)
    (await tasks[0]).leave()
    await settled()
    assert (order, room.held_bytes) == ([0, 1, 2, 3], 180), "60 left room for the one, and for one unweighed beside it"
    for task in tasks:
        (await task).leave()
    assert (order, room.held_bytes, room.num_waiting) == ([0, 1, 2, 3, 4], 0, 0)


async def test_one_that_is_bigger_than_the_room_comes_in_alone() -> None:
    room = MemoryGate(limit_bytes=10, max_unweighed=1)
    place = await room.enter()
    place.weigh(1000)
    other = asyncio.create_task(room.enter())
    await settled()
    assert not other.done()
    place.leave()
    place.leave()
    (await other).leave()
    assert room.held_bytes == 0


async def test_a_cancelled_wait_takes_no_place_even_if_its_turn_had_just_come() -> None:
    room = MemoryGate(limit_bytes=10, max_unweighed=1)
    place = await room.enter()
    waiting, called, last = (asyncio.create_task(room.enter()) for _ in range(3))
    await settled()
    waiting.cancel()
    place.leave()  # the first in the queue is cancelled already: the second is called
    called.cancel()  # before it has noticed
    await settled()
    assert waiting.cancelled()
    assert called.cancelled()
    (await last).leave()
    assert (room.num_waiting, room.held_bytes) == (0, 0)
