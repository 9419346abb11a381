"""Copies beside the stream that computes: what waits for what. Streams are stand-ins that note what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from engine.device import copy_stream
from engine.device.copy_stream import MAX_LEAVING, CopyStream

CPU = torch.device("cpu")


@dataclass
class Stream:
    """In the place of a CUDA stream: `log` is shared by all."""

    name: str
    log: list[str]
    num_events: int = 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Event:
        self.num_events += 1
        return Event(self.num_events, self.log)


@dataclass
class Event:
    """In the place of a CUDA event: it comes when somebody waits for it."""

    number: int
    log: list[str]
    has_come: bool = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True
        self.log.append(f"the host waits for copy {self.number}")


@dataclass
class Streams:
    """The stream that computes, the one that copies, and which is the current one."""

    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computing, self.copying = Stream("computing", self.log), Stream("copying", self.log)
        self.current = self.computing

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams, copy = Streams(), torch.Tensor.copy_

    def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        streams.log.append(f"copied on {streams.current.name}" if non_blocking else "copied by the host")
        return copy(self, other)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: streams.log.append(f"kept for {stream.name}"))
    monkeypatch.setattr(copy_stream, "pinned", torch.empty_like)
    return streams


def side_of(streams: Streams) -> CopyStream:
    return CopyStream(CPU, streams.copying)  # type: ignore[arg-type]


def test_what_leaves_is_copied_behind_what_computes_and_nobody_waits(streams: Streams) -> None:
    arriving = side_of(streams).fetch(torch.arange(3.0))
    assert streams.log == ["copying waits for computing", "copied on copying", "kept for copying"]
    assert not arriving.is_here
    assert arriving.nbytes == 12
    assert arriving.wait().tolist() == [0, 1, 2]
    assert streams.log[3:] == ["the host waits for copy 1"]
    assert arriving.is_here


def test_only_so_many_tensors_are_on_their_way_to_the_host(streams: Streams) -> None:
    side = side_of(streams)
    for _ in range(MAX_LEAVING):
        side.fetch(torch.zeros(1))
    assert not any("host waits" in line for line in streams.log)
    side.fetch(torch.zeros(1))
    side.fetch(torch.zeros(1))
    assert [line for line in streams.log if "host waits" in line] == [
        "the host waits for copy 1",
        "the host waits for copy 2",
    ]


def test_on_a_cpu_nothing_is_copied() -> None:
    side, tensor = CopyStream.beside(CPU), torch.arange(3.0)
    arriving = side.fetch(tensor)
    assert arriving.is_here
    assert arriving.wait() is tensor
