"""Whose attention is measured: a figure of PyTorch's must not pass for one of FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from common.model_info import ModelInfo
from engine.attention.backend import AttentionBackend
from engine.attention.flashinfer.served import unserved
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.encoders.attention import FLASH_NAME, head_sizes
from engine.llm import LLM
from engine.models.registry import make_decoder, make_encoder
from engine.state.spec import HeadSpec
from launch.cluster.local_cluster import LocalCluster
from tools.bench.gpu.figures import Figure
from tools.bench.with_cluster import ask_workers

_FLASHINFER, _TORCH = "flashinfer", "torch"
_DECODER_FELL_BACK, _ENCODER_FELL_BACK = "triptych_attention_fallback", "triptych_encoder_attention_fallback"
_LAYERS_FELL_BACK, _RECORDED = "triptych_layers_fallback", "triptych_steps_recorded"
_NO_LAYERS: Final = "small layers by PyTorch"
_NO_GRAPHS: Final = "no step recorded"


@dataclass(frozen=True)
class Attention:
    """What computes it, and whether that stands in for kernels that do not run here."""

    name: str
    is_fallback: bool = False

    def with_steps_anew(self, count: int) -> Attention:
        """The same where so many of the measured steps were not the recorded ones."""
        return self if count == 0 else Attention(f"{self.name}, {count} steps launched anew", is_fallback=True)

    def of(self, figure: Figure) -> Figure:
        """The same figure with this beside it."""
        return replace(figure, attention=self.name, is_fallback=self.is_fallback)


THEIRS: Final = Attention("PyTorch's SDPA")
"""transformers' own, as it is asked for here."""


def of_decoder(engine: DecoderEngine) -> Attention:
    """With the small layers and the recorded steps, where these should have been and are not."""
    runner = engine.runner
    attention = of_backend(runner.backend, HeadSpec.of(runner.spec), runner.dtype)
    eager = runner.records_graphs and runner.graphs is None
    return _without(attention, layers=runner.layers_are_fallback, graphs=eager)


def _without(attention: Attention, *, layers: bool, graphs: bool) -> Attention:
    told = [attention.name, *[_NO_LAYERS] * layers, *[_NO_GRAPHS] * graphs]
    return Attention(", ".join(told), attention.is_fallback or layers or graphs)


def of_backend(backend: AttentionBackend, heads: HeadSpec, dtype: torch.dtype) -> Attention:
    """FlashInfer's gives away what it does not serve."""
    name = _name_for(heads, dtype) if backend.name == _FLASHINFER else backend.name
    return Attention(name, backend.is_fallback)


def of_encoder(engine: EncoderEngine) -> Attention:
    unmasked = engine.encoder.unmasked
    name = "" if unmasked is None else str(cast(Any, unmasked.config)._attn_implementation)
    if unmasked is not None and name.startswith(FLASH_NAME):
        return Attention(of_tower(unmasked, engine.dtype))
    return Attention(_TORCH, engine.attention_is_fallback)


def of_tower(module: nn.Module, dtype: torch.dtype) -> str:
    """Name the library that computes a module of transformers under `engine.encoders.attention`."""
    heads = [HeadSpec(num_heads, num_heads, head_dim) for num_heads, head_dim in head_sizes(module)]
    return _FLASHINFER if heads and all(_name_for(one, dtype) == _FLASHINFER for one in heads) else _TORCH


def of_both(llm: LLM) -> Attention:
    """Of the engines of one process."""
    decoder = of_decoder(llm.decoder)
    return decoder if llm.encoder is None else _together(decoder, of_encoder(llm.encoder))


def of_cluster(cluster: LocalCluster, info: ModelInfo, device: torch.device, dtype: torch.dtype) -> Attention:
    """Of workers that have the choice. They tell only whether they fell back: on a CPU, where it depends on more than
    heads and dtype, what else it is stays open."""
    numbers = list(_numbers(cluster))

    def attention(fell_back: str, served: Callable[[], str]) -> Attention:
        if any(name == fell_back and value for name, value in numbers):
            return Attention(_TORCH, is_fallback=True)
        return Attention(served() if device.type == "cuda" else "a CPU's choice")

    def name_of_encoder() -> str:
        unmasked = make_encoder(info).unmasked
        return _TORCH if unmasked is None else of_tower(unmasked, dtype)

    decoder = _without(
        attention(_DECODER_FELL_BACK, lambda: _name_for(HeadSpec.of(make_decoder(info).spec), dtype)),
        layers=any(name == _LAYERS_FELL_BACK and value for name, value in numbers),
        graphs=device.type == "cuda" and any(name == _RECORDED and not value for name, value in numbers),
    )
    return decoder if info.media_kind is None else _together(decoder, attention(_ENCODER_FELL_BACK, name_of_encoder))


def _together(decoder: Attention, encoder: Attention) -> Attention:
    name = f"{decoder.name}, of the encoder by {encoder.name}"
    return Attention(name, decoder.is_fallback or encoder.is_fallback)


def _numbers(cluster: LocalCluster) -> Iterator[tuple[str, float]]:
    """What all workers tell of themselves. Raises RuntimeError where one does not tell whether it fell back."""
    for instance, page in ask_workers(cluster, "/metrics").items():
        families = text_string_to_metric_families(page.text)
        numbers = [(sample.name, sample.value) for family in families for sample in family.samples]
        if not {name for name, _ in numbers} & {_DECODER_FELL_BACK, _ENCODER_FELL_BACK}:
            raise RuntimeError(f"{instance} does not tell whose attention it has")
        yield from numbers


def _name_for(heads: HeadSpec, dtype: torch.dtype) -> str:
    return _FLASHINFER if unserved(heads, dtype) is None else _TORCH
