"""A family outside of Triptych masks each request in its own way, in all three attentions, as dense attention does."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from common.messages import InputLayout
from common.model_info import ModelInfo
from engine.encoders.text import BartEncoder
from engine.models.bart import BartDecoder
from engine.models.base import AttentionContext
from engine.models.registry import load_decoder, load_encoder
from engine.processors import ProcessedInput
from engine.state.bias import AttentionMask
from tests.engine.driving import Driver, Job, greedy, make_engine, text_tokens
from tests.engine.models.dense import logits_of
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.plain_recorder import PlainRecorder

CPU = torch.device("cpu")
SEPARATOR = 61
PAGE = (Path(__file__).parents[3] / "docs" / "design" / "attention.md").read_text()
example: dict[str, Any] = {}
exec(PAGE.partition("```python\n")[2].partition("```")[0], example)
SameDocument: type[AttentionMask] = example["SameDocument"]


class LaterRows(AttentionMask):
    """Tokens see the second half of the request's encoder rows."""

    by_request = True

    def seen(self, queries: Tensor, keys: Tensor, request: Any) -> Tensor:
        return (keys >= request.num_encoder_tokens // 2).expand(len(queries), -1)


class Masking:
    """An attention context whose layers pass the masks."""

    def __init__(self, inner: Any, own: AttentionMask, cross: AttentionMask) -> None:
        self.inner, self.own, self.cross = inner, own, cross

    def self_attention(self, *args: Any) -> Tensor:
        return self.inner.self_attention(*args, bias=self.own)

    def cross_attention(self, *args: Any) -> Tensor:
        return self.inner.cross_attention(*args, bias=self.cross)


class MaskedDecoder(BartDecoder):
    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.spec = replace(self.spec, biased=("self", "cross"))
        self.masks = SameDocument(SEPARATOR), LaterRows()  # type: ignore[call-arg]

    def forward(self, embeddings: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        return super().forward(embeddings, positions, Masking(attention, *self.masks))  # type: ignore[arg-type]


class MaskedEncoder(BartEncoder):
    """Its processor would say how far back each text looks, as `reach`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    @torch.inference_mode()
    def encode(self, items: Any) -> list[Tensor]:
        ids, masks = zip(*((item.arrays["input_ids"], mask_of(item)) for item in items), strict=True)
        hidden = self.module(input_ids=torch.tensor(ids), attention_mask=torch.stack(masks)).last_hidden_state
        return list(hidden)


def mask_of(item: ProcessedInput) -> Tensor:
    places = torch.arange(len(item.arrays["input_ids"]))
    return ((places[:, None] - places).abs() <= item.arrays["reach"])[None]


@pytest.fixture(scope="module")
def info(tiny_bart: ModelInfo) -> ModelInfo:
    family = replace(tiny_bart.family, decoder=f"{__name__}:MaskedDecoder", encoder=f"{__name__}:MaskedEncoder")
    return replace(tiny_bart, family=family)


def jobs() -> list[Job]:
    """Some begin alike, or read the same content."""
    prompts = [[*text_tokens(seed % 2, 4), SEPARATOR, *text_tokens(seed, 3 + seed)] for seed in range(5)]
    return [Job(str(seed), prompt, greedy(7), [(f"c{seed % 3}", 12)]) for seed, prompt in enumerate(prompts)]


def dense_tokens(info: ModelInfo, job: Job, model: Any = None) -> list[int]:
    model, (content, rows) = model or load_decoder(info, CPU, torch.float32)[0], job.media[0]
    output = torch.randn(rows, 64, generator=torch.Generator().manual_seed(zlib.crc32(content.encode())))
    request: Any = SimpleNamespace(prompt=job.token_ids, num_encoder_tokens=rows)
    ids = list(job.token_ids)
    for _ in range(7):
        ids.append(int(logits_of(model, torch.tensor(ids), None, output, request)[-1].argmax()))
    return ids[len(job.token_ids) :]


@pytest.mark.parametrize("backend", ["auto", "torch", "flashinfer"])
def test_each_request_is_masked_in_its_own_way(info: ModelInfo, backend: str) -> None:
    """With prompts in parts, cached prefixes and shared cross tables; recorded steps are refused, and run eagerly."""
    plans = Wrapper.num_plans
    with flashinfer_on_cpu((16,)) if backend == "flashinfer" else nullcontext(), capture_logs() as logs:
        engine = make_engine(info, attention_backend=backend, max_num_batched_tokens=8, dtype="float32")
        engine.runner.record_graphs(PlainRecorder())
        driver = Driver(engine)
        for job in jobs():
            driver.add(job)
            driver.step()
        got = driver.finish()
    assert got == {(job.name, 0): dense_tokens(info, job) for job in jobs()}
    assert (Wrapper.num_plans > plans) == (backend == "flashinfer")
    plain = load_decoder(info, CPU, torch.float32)[0]
    assert isinstance(plain, MaskedDecoder)
    plain.masks = SameDocument(-1), LaterRows()  # type: ignore[call-arg]
    assert got != {(job.name, 0): dense_tokens(info, job, plain) for job in jobs()}, "the masks matter"
    assert engine.runner.graphs is None
    if backend != "auto":
        assert "differs by request" in str([line for line in logs if line["event"] == "steps run eagerly"])


def test_each_text_is_masked_in_its_own_way(info: ModelInfo) -> None:
    items = [
        ProcessedInput({"input_ids": text_tokens(reach, 9), "reach": reach}, InputLayout(9, []), (9, 64), "float32", 0)  # type: ignore[dict-item]
        for reach in (0, 2, 8)
    ]
    encoder = load_encoder(info, CPU, torch.float32)[0]
    together = encoder.encode(items)
    encoder.module.config._attn_implementation = "eager"  # transformers' own, with addends
    for item, got in zip(items, together, strict=True):
        addends = torch.zeros(1, 1, 9, 9).masked_fill(~mask_of(item), float("-inf"))
        ids = torch.tensor([item.arrays["input_ids"]])
        with torch.inference_mode():
            expected = encoder.module(input_ids=ids, attention_mask=addends).last_hidden_state[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
