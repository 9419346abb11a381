"""Adapters of tiny models, and requests with each and with none: answers by transformers with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.equality.cases import MAX_TOKENS, Case, make_cases
from tests.equality.media import text_prompts
from tests.equality.references import Reference
from tests.tiny.lora import ALL_LINEAR, ATTENTION, make_adapter, merged

KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "whole": (ALL_LINEAR, {"lora_alpha": 6, "rank_pattern": {"o_proj": 3, "layers.1.mlp.up_proj": 6}}),
    "scaled": (
        ("q_proj", "v_proj"),
        {"use_rslora": True, "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 2}},
    ),
    "inner": (("k_proj", "down_proj", "gate_proj"), {"rank": 9}),
    "attention": (ATTENTION, {"rank": 1, "lora_alpha": 1.5}),
}
"""Target layers and configuration; together they reach every layer, alone and beside others in a fused one."""


def make_adapters(reference: Reference, folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Path]:
    """Write adapters of a tiny model; return their folders by name."""
    chosen = {kind: KINDS[kind] for kind in kinds}
    model = reference.model
    return {
        kind: make_adapter(folder / kind, model, targets, seed=len(kind), **config)
        for kind, (targets, config) in chosen.items()
    }


def with_adapter(reference: Reference, kind: str, folder: Path) -> Reference:
    """Return transformers with an adapter merged into the weights."""
    other = copy.copy(reference)
    other.model = merged(reference.model, folder, KINDS[kind][1])
    return other


def mixed_cases(name: str, reference: Reference, adapters: dict[str, Path], limit: int = 6) -> list[Case]:
    """The usual cases of a tiny family, each once without an adapter and once with each, side by side.

    Of text models the first `limit` alone, which are of all lengths.
    """

    def make(answering: Reference) -> list[Case]:
        if reference.info.media_kind:
            return make_cases(name, answering)
        return [
            Case(ids, answering.generate(ids, MAX_TOKENS[name]), http={"prompt": ids}) for ids in text_prompts(limit)
        ]

    columns = [make(reference)]
    for kind, folder in adapters.items():
        model = f"{reference.info.name}:{kind}"
        columns.append(
            [
                replace(case, rules={**case.rules, "adapter": kind}, http={**case.http, "model": model})
                for case in make(with_adapter(reference, kind, folder))
            ]
        )
    for base, *others in zip(*columns, strict=True):
        assert len({tuple(case.expected) for case in (base, *others)}) > 1 or not base.expected, "adapters do nothing"
    return [case for row in zip(*columns, strict=True) for case in row]
