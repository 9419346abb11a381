"""What `triptych drain` and `triptych switch` make of what the registry says meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from common.config import Settings
from common.errors import TriptychError
from common.messages import InstanceRecord
from launch.cli.members import Members
from tests.broker.conftest import make_record

BEFORE = make_record("e1", "encoder", epoch=1)
DRAINING = make_record("e1", "encoder", epoch=1, draining=True, outstanding=2)
AGAIN = make_record("e1", "encoder", epoch=2)
SWITCHED = make_record("e1", "prefill_decode", epoch=2)

Script = list[tuple[InstanceRecord | None, set[int]]]
"""Of one look after the other: the worker's record, and the epochs that answer."""
Command = Callable[..., Awaitable[None]]


def members(monkeypatch: pytest.MonkeyPatch, script: Script) -> Members:
    """Those of a cluster that has gone this way when it is looked at; the last look is repeated."""
    cluster, answering = Members(Settings(broker="redis://127.0.0.1:1")), set[int]()

    async def records() -> dict[str, InstanceRecord]:
        record, answers = script.pop(0) if len(script) > 1 else script[0]
        answering.clear()
        answering.update(answers)
        return {} if record is None else {"e1": record}

    async def answers(record: InstanceRecord) -> bool:
        return record.epoch in answering

    async def ask(*_: object) -> None: ...

    for name, stand_in in (("records", records), ("_answers", answers), ("_ask", ask)):
        monkeypatch.setattr(cluster, name, stand_in)
    return cluster


def drain(cluster: Members, told: list[str], timeout_s: float = 20.0) -> Awaitable[None]:
    return cluster.drain("e1", timeout_s, told.append)


def switch(cluster: Members, told: list[str], timeout_s: float = 20.0) -> Awaitable[None]:
    return cluster.switch("e1", "prefill_decode", timeout_s, told.append)


async def test_a_drained_worker_has_left_once_it_is_neither_in_the_registry_nor_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    await drain(members(monkeypatch, [(BEFORE, {1}), (DRAINING, {1}), (None, {1}), (None, set())]), told)
    assert told == ["e1 is draining: 2 requests left", "e1 has left"]


async def test_a_switched_worker_is_back_once_it_answers_in_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    script: Script = [(BEFORE, {1}), (DRAINING, {1}), (None, set()), (SWITCHED, set()), (SWITCHED, {2})]
    await switch(members(monkeypatch, script), told)
    assert told[-1] == "e1 has the role prefill_decode now"


@pytest.mark.parametrize("command", [drain, switch])
async def test_a_worker_that_has_died_and_is_there_again_as_it_was_is_no_success(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    told: list[str] = []
    cluster = members(monkeypatch, [(BEFORE, {1}), (DRAINING, {1}), (DRAINING, set()), (AGAIN, {2})])
    with pytest.raises(TriptychError, match=r"e1 died before it was done, and .* again as encoder") as caught:
        await command(cluster, told)
    assert command.__name__ in caught.value.info.message
    assert told == ["e1 is draining: 2 requests left"]


@pytest.mark.parametrize("command", [drain, switch])
async def test_the_wait_for_a_worker_ends(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    cluster = members(monkeypatch, [(BEFORE, {1}), (DRAINING, {1})])
    with pytest.raises(TriptychError, match="still has 2 requests") as caught:
        await command(cluster, [], 0.2)
    assert caught.value.info.code == "timeout"
