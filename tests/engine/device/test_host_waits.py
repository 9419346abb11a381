"""No step of the overlapped loop has the host wait for the device: neither its launch nor the choice of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model_info import ModelInfo, load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.sampling.sampler import Sampler, choose_on_device
from tests import tiny_models
from tests.engine.device.host_waits import ROOT, HostWaits
from tests.engine.driving import Driver, Job, greedy, make_engine, sampled, text_tokens
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.plain_recorder import PlainRecorder

FRAMES = 8
HEADS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen2_5_vl": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    },
    "whisper": {
        "d_model": 128,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_source_positions": FRAMES,
    },
}
"""Of 64 columns, which FlashInfer serves."""
PLACES = {
    "x.tolist()": "tolist",
    "x[0, 0].item()": "item",
    "bool(x.any())": "__bool__",
    "if x.sum() > 3: pass": "__bool__",
    "x.cpu()": "cpu",
    "x[[0, 1]]": "index from the host",
    "x[:, [0]]": "index from the host",
    "x[np.array([1])]": "index from the host",
    "x[[0]] = 1": "index from the host",
    "x[x > 0]": "mask",
    "x[x > 0] = 1": "mask",
    "torch.nonzero(x)": "nonzero",
    "torch.where(x > 0)": "where",
    "torch.tensor([1], device=x.device)": "pageable",
    "x.to(x.device)": "to copies",
    "torch.repeat_interleave(x[0], x[0].long())": "counts",
}
HARMLESS = (
    "x[0]",
    "x[:, 1:]",
    "x[x.long()[0]]",
    "x.to(torch.bfloat16)",
    "torch.where(x > 0, x, 0.0)",
    "x.masked_fill_(x > 0, 1.0)",
)


@pytest.mark.parametrize("code", [*PLACES, *HARMLESS])
def test_what_waits_is_found_by_its_place(code: str) -> None:
    program = compile(code, str(ROOT / "engine/somewhere.py"), "exec")
    with HostWaits() as waits:
        exec(program, {"x": torch.ones(2, 2), "torch": torch, "np": np})
    if code in HARMLESS:
        assert not waits.found
    else:
        [found] = waits.found
        assert found.startswith("engine/somewhere.py:1 ")
        assert PLACES[code] in found


@pytest.fixture(params=HEADS)
def info(request: pytest.FixtureRequest, tmp_path: Path) -> ModelInfo:
    make = getattr(tiny_models, f"make_{request.param}")
    return load_model_info(str(make(tmp_path, **HEADS[request.param])))


def jobs_of(info: ModelInfo) -> list[Job]:
    """Every rule under which a step may run ahead; forks, and media where the model takes them."""
    rules = [
        greedy(6),
        sampled(5, n=3, top_p=0.9),
        sampled(5, top_k=4, min_p=0.05),
        greedy(5, logit_bias={7: 2.0}, min_tokens=2),
        greedy(5, allowed_token_ids=(5, 6, 9), suppress_tokens=(6,)),
        greedy(5, prefix_allowed=((5, 6), (7,))),
    ]
    jobs = []
    for number, params in enumerate(rules):
        tokens, media = text_tokens(number, 3 + number), []
        if info.is_encoder_decoder:
            media = [(f"content {number % 2}", FRAMES)]
        elif info.media_kind:
            tokens, media = [*tokens, info.placeholder_token_id or 0, 9], [(f"content {number}", 4)]
        jobs.append(Job(f"job {number}", tokens, params, media))
    return jobs


def watch(engine: DecoderEngine, waits: HostWaits) -> None:
    """From now on `waits` is on guard while a step is launched and while its tokens are chosen."""
    run, launch = engine.runner.run, engine.decoding.launch

    def run_guarded(*args: Any) -> Any:
        with waits:
            return run(*args)

    def launch_guarded(*args: Any) -> Any:
        with waits:
            return launch(*args)

    engine.runner.run = run_guarded  # type: ignore[method-assign]
    engine.decoding.launch = launch_guarded  # type: ignore[method-assign]


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_no_step_waits_for_the_device(info: ModelInfo, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU chooses by looking, which is quicker there.
    monkeypatch.setattr(Sampler, "_choose", lambda _, scores, sequences: choose_on_device(scores, sequences))
    waits = HostWaits()
    with flashinfer_on_cpu():
        engine = make_engine(info, num_blocks=80, attention_backend="flashinfer", async_scheduling=True)
        if replayed:
            engine.runner.record_graphs(PlainRecorder())
        watch(engine, waits)
        driver = Driver(engine)
        for job in jobs_of(info):
            driver.add(job)
            driver.step()
        driver.finish()
    assert not driver.failures
    assert engine.stats()["steps_ahead_total"] > 3
    assert (engine.stats()["steps_replayed_total"] > 3) == replayed
    assert sorted(waits.found) == []
