"""The attention that was measured: a figure of PyTorch's must not pass for one of FlashInfer's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.flashinfer.served import unserved
from engine.core.decoder_engine import DecoderEngine
from engine.state.spec import HeadSpec
from launch.cluster.local_cluster import LocalCluster
from tools.bench.gpu.figures import Figure
from tools.soak.leak_check import gauges

_FLASHINFER, _TORCH = "flashinfer", "torch"
_NO_LAYERS, _NO_GRAPHS = "small layers by PyTorch", "no step recorded"
_FALLBACKS: Final = {
    "attention_fallback": _TORCH,
    "encoder_attention_fallback": f"{_TORCH} in the encoder",
    "layers_fallback": _NO_LAYERS,
}
"""Gauges of a worker that say that something stands in for a kernel that does not run."""


@dataclass(frozen=True)
class Attention:
    """The library that computes it, and whether that stands in for kernels that do not run here."""

    name: str
    is_fallback: bool = False

    def beside(self, figure: Figure, steps_anew: int = 0) -> Figure:
        """Return the figure with this beside it; `steps_anew` of the measured steps were not the recorded ones."""
        name = f"{self.name}, {steps_anew} steps launched anew" if steps_anew else self.name
        return replace(figure, attention=name, is_fallback=self.is_fallback or steps_anew > 0)


def of_decoder(engine: DecoderEngine) -> Attention:
    """Name also the small layers and the recorded steps, where these should have been and are not."""
    runner = engine.runner
    attention = of_backend(runner.backend, HeadSpec.of(runner.spec), runner.dtype)
    layers, graphs = runner.layers_are_fallback, runner.records_graphs and runner.graphs is None
    told = [attention.name, *[_NO_LAYERS] * layers, *[_NO_GRAPHS] * graphs]
    return Attention(", ".join(told), attention.is_fallback or layers or graphs)


def of_backend(backend: AttentionBackend, heads: HeadSpec, dtype: torch.dtype) -> Attention:
    """Name PyTorch for heads that FlashInfer does not serve."""
    given_away = backend.name == _FLASHINFER and unserved(heads, dtype) is not None
    return Attention(_TORCH if given_away else backend.name, backend.is_fallback)


def of_cluster(cluster: LocalCluster, device: torch.device) -> Attention:
    """Name all that the workers tell of fallbacks; they do not tell what else they have chosen.

    Raises RuntimeError where one does not tell whether it fell back.
    """
    told: dict[str, None] = {}
    for worker in (instance for instance in cluster.instances.values() if instance.role != "proxy"):
        values = gauges(worker, cluster.supervisor.plan.settings)
        if not values.keys() & _FALLBACKS.keys():
            raise RuntimeError(f"{worker.id} does not tell whose attention it has")
        told |= dict.fromkeys(words for name, words in _FALLBACKS.items() if values.get(name))
        if device.type == "cuda" and values.get("steps_recorded") == 0:
            told[_NO_GRAPHS] = None
    return Attention(", ".join(told) or "the workers' choice", bool(told))
