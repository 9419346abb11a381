"""The encoder engine: batches across requests, within its budgets, one bad item never failing another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from common.config import EngineConfig
from common.errors import ErrorInfo
from common.messages import InputLayout
from common.model_info import load_model_info
from engine.core.encoder_engine import EncoderEngine, EncoderKey
from engine.processors import ProcessedInput
from tests import tiny_models
from tests.engine.models.encoders import PATCHES_ATOL

HIDDEN_SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen2_5_vl(tmp_path_factory.mktemp("models") / "qwen2_5_vl")


def picture(height: int = 2, width: int = 2, seed: int = 0) -> ProcessedInput:
    """A preprocessed picture of height x width merged patches."""
    num_tokens, rng = height * width, np.random.default_rng(seed)
    arrays = {
        "pixel_values": rng.standard_normal((4 * num_tokens, 1176), dtype=np.float32),
        "image_grid_thw": np.array([1, 2 * height, 2 * width]),
    }
    layout = InputLayout(num_tokens, [(261, num_tokens)], (1, height, width))
    return ProcessedInput(arrays, layout, (num_tokens, HIDDEN_SIZE), "float32", num_tokens * HIDDEN_SIZE * 4)


def broken_picture() -> ProcessedInput:
    item = picture()
    item.arrays["pixel_values"] = item.arrays["pixel_values"][:-1]  # one patch is missing
    return item


def key(number: int) -> EncoderKey:
    return (f"request-{number}", 0, 0)


def engine_of(folder: Path, **options: Any) -> EncoderEngine:
    return EncoderEngine(load_model_info(str(folder)), EngineConfig(device="cpu", **options), "test")


def test_one_step_encodes_items_of_several_requests(folder: Path) -> None:
    engine = engine_of(folder)
    items = {key(number): picture(1 + number, 3, seed=number) for number in range(4)}
    for one, item in items.items():
        engine.submit(one, item)
    assert engine.has_work()
    results = engine.step()
    assert [result.key for result in results] == list(items)
    assert not engine.has_work()
    for result in results:
        assert result.error is None
        assert result.tensor is not None
        assert result.tensor.is_contiguous()
        assert result.tensor.untyped_storage().nbytes() == result.tensor.nbytes  # no output keeps its batch alive
        alone = engine.encoder.encode([items[result.key]])[0]
        torch.testing.assert_close(result.tensor, alone, rtol=0, atol=PATCHES_ATOL)
        assert result.start_s <= result.end_s
    stats = engine.stats()
    assert stats.pop("encoder_computations") >= 4
    assert {name: value for name, value in stats.items() if not name.startswith("memory_")} == {
        "encoder_queue_items": 0,
        "encoder_batches_total": 1,
        "encoder_items_total": 4,
        "encoder_failures_total": 0,
        "encoder_batch_items_last": 4,
        "encoder_attention_fallback": 0,
        "encoder_seconds_total": pytest.approx(results[0].end_s - results[0].start_s),
    }


def test_the_seconds_in_the_encoder_grow_though_the_wall_clock_is_set_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: 10_000.0, monotonic=itertools.count(5.0).__next__)
    monkeypatch.setattr("engine.core.encoder_engine.time", clock)
    engine = engine_of(folder)
    for now_s in (10_000.0, 6_400.0):
        clock.time = lambda now_s=now_s: now_s
        engine.submit(key(0), picture())
        (result,) = engine.step()
        assert (result.start_s, result.end_s) == (now_s - 1.0, now_s)
    assert engine.stats()["encoder_seconds_total"] == 2.0


def test_a_step_without_items_does_nothing(folder: Path) -> None:
    engine = engine_of(folder)
    assert engine.step() == []
    assert engine.stats()["encoder_batches_total"] == 0


def test_batches_end_at_the_item_budget_first_come_first_served(folder: Path) -> None:
    engine = engine_of(folder, encoder_batch_items=2)
    for number in range(5):
        engine.submit(key(number), picture())
    batches = [[result.key for result in engine.step()] for _ in range(3)]
    assert batches == [[key(0), key(1)], [key(2), key(3)], [key(4)]]


def test_batches_end_at_the_byte_budget_and_a_larger_item_goes_alone(folder: Path) -> None:
    small, large = picture(1, 1), picture(10, 10)
    engine = engine_of(folder, encoder_batch_bytes=3 * small.size_bytes)
    for number, item in enumerate([small, large, small, small, small, small]):
        engine.submit(key(number), item)
    batches = [[result.key for result in engine.step()] for _ in range(5)]
    assert batches == [[key(0)], [key(1)], [key(2), key(3), key(4)], [key(5)], []]


def test_cancelled_items_are_not_encoded(folder: Path) -> None:
    engine = engine_of(folder)
    for number in range(3):
        engine.submit(key(number), picture())
    engine.cancel(key(1))
    engine.cancel(("unknown", 0, 0))
    assert [result.key for result in engine.step()] == [key(0), key(2)]
    engine.submit(key(3), picture())
    engine.cancel(key(3))
    assert not engine.has_work()


def test_an_item_submitted_twice_is_encoded_once(folder: Path) -> None:
    engine = engine_of(folder)
    engine.submit(key(0), picture())
    engine.submit(key(0), picture())
    assert len(engine.step()) == 1


def test_a_bad_item_fails_alone(folder: Path) -> None:
    engine = engine_of(folder)
    for number, item in enumerate([picture(seed=1), broken_picture(), picture(seed=2)]):
        engine.submit(key(number), item)
    with capture_logs() as logs:
        first, bad, last = engine.step()
    assert [entry["event"] for entry in logs][-1] == "encoder failed"
    for result in (first, last):
        assert result.error is None
        assert result.tensor is not None
    assert bad.tensor is None
    assert bad.error is not None
    assert bad.error.code == "internal_error"
    assert bad.error.message.startswith("the encoder failed on this item: ")
    assert engine.stats()["encoder_failures_total"] == 1


def test_an_item_that_fails_without_words_is_told_by_the_name_of_the_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)

    def fail(items: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine.encoder, "encode", fail)
    engine.submit(key(0), picture())
    [result] = engine.step()
    assert result.error == ErrorInfo("internal_error", "the encoder failed on this item: MemoryError")


def test_an_output_that_is_not_as_announced_is_an_error(folder: Path) -> None:
    engine = engine_of(folder)
    item = picture()
    item.shape, item.dtype = (5, HIDDEN_SIZE), "bfloat16"
    engine.submit(key(0), item)
    with capture_logs():
        [result] = engine.step()
    assert result.error is not None
    assert "its output is (4, 64) float32, the preprocessor had announced (5, 64) bfloat16" in result.error.message


# --- a batch ahead


@dataclass
class Order:
    """What was launched and what was waited for, in turn; `broken` batches make the device fail."""

    events: list[str]
    broken: frozenset[int] = frozenset()

    def event_behind(self, device: torch.device) -> Done:
        self.events.append(f"launch {self.count('launch')}")
        return Done(self, self.count("launch") - 1)

    def count(self, kind: str) -> int:
        return sum(event.startswith(kind) for event in self.events)


@dataclass(frozen=True)
class Done:
    """In the place of a CUDA event."""

    order: Order
    number: int

    def synchronize(self) -> None:
        self.order.events.append(f"wait {self.number}")
        if self.number in self.order.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    order = Order([])
    monkeypatch.setattr("engine.core.encoder_engine.event_behind", order.event_behind)
    return order


def ahead_of(folder: Path, *items: ProcessedInput) -> EncoderEngine:
    """An engine that encodes one item at a time, a batch ahead, with these to do."""
    engine = engine_of(folder, encoder_batch_items=1, async_scheduling=True)
    for number, item in enumerate(items):
        engine.submit(key(number), item)
    return engine


def steps(engine: EncoderEngine) -> list[list[EncoderKey]]:
    """The keys that each step tells of, until nothing is left to do."""
    told = []
    while engine.has_work():
        told.append([result.key for result in engine.step()])
    return told


def test_the_next_batch_is_launched_before_the_one_in_flight_is_waited_for(folder: Path, order: Order) -> None:
    engine = ahead_of(folder, *(picture(seed=seed) for seed in range(3)))
    assert steps(engine) == [[], [key(0)], [key(1)], [key(2)]]
    assert order.events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]


def test_outputs_are_the_same_a_batch_ahead(folder: Path) -> None:
    items = [picture(2, 3, seed) for seed in range(3)]
    plain, ahead = engine_of(folder, encoder_batch_items=1), ahead_of(folder, *items)
    for number, item in enumerate(items):
        plain.submit(key(number), item)
    for _ in items:
        [expected] = plain.step()
        got = [result for result in ahead.step() or ahead.step() if result.key == expected.key]
        assert torch.equal(got[0].tensor, expected.tensor)  # type: ignore[arg-type]
    stats = ahead.stats()
    assert stats["encoder_items_total"] == stats["encoder_batches_total"] == 3


def test_an_item_that_is_cancelled_in_flight_has_no_result(folder: Path) -> None:
    engine = ahead_of(folder, picture(seed=1), picture(seed=2))
    assert engine.step() == []
    engine.cancel(key(0))
    assert steps(engine) == [[], [key(1)]]


def test_a_bad_item_in_flight_fails_alone_and_in_its_turn(folder: Path, order: Order) -> None:
    engine = engine_of(folder, encoder_batch_items=2, async_scheduling=True)
    for number, item in enumerate([picture(seed=1), broken_picture(), picture(seed=2)]):
        engine.submit(key(number), item)
    with capture_logs():
        assert engine.step() == []
        good, bad = engine.step()
        [last] = engine.step()
    assert [good.key, bad.key, last.key] == [key(0), key(1), key(2)]
    assert (good.error, last.error) == (None, None)
    assert bad.error is not None


def test_what_the_device_finds_wrong_ends_the_engine(folder: Path, order: Order) -> None:
    """No item is to blame, and nothing can be computed any more."""
    order.broken = frozenset({1})
    engine = ahead_of(folder, *(picture(seed=seed) for seed in range(3)))
    assert [result.key for _ in range(2) for result in engine.step()] == [key(0)]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
