"""Requests over the same audio hold its cross keys and values once, at the same time and one after another."""

import pytest
import torch

from common.config import EngineConfig
from common.messages import Generate, Grant, InputLayout, InputSlot, Tokens
from common.model_info import ModelInfo, load_model_info
from common.sampling_params import SamplingParams
from engine.core.decoder_engine import DecoderEngine
from tests import tiny_models
from tests.engine.driving import make_offer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("whisper")
    tiny_models.make_whisper(path)
    return load_model_info(str(path))


def add(engine: DecoderEngine, name: str, content: str, prompt: list[int]) -> None:
    info = engine.info
    rows, hidden = int(info.config["max_source_positions"]), int(info.config["d_model"])
    engine.add_request(Generate(name, prompt, [InputSlot(0, "audio", content)], GREEDY))
    engine.offer(make_offer((name, 0, 0), rows, hidden, InputLayout(rows, []), content))


def run(engine: DecoderEngine, contents: dict[str, str]) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and the most KV blocks that were in use."""
    start = int(engine.info.config["decoder_start_token_id"])
    for name, content in contents.items():
        add(engine, name, content, [start, 20 + len(name)])
    tokens: dict[str, list[int]] = {}
    peak = 0
    while not engine.is_empty():
        for event in engine.step():
            engine.check_integrity()
            if isinstance(event, Grant) and event.status == "granted":
                content = contents[event.request_id]
                generator = torch.Generator().manual_seed(len(content))
                shape = int(engine.info.config["max_source_positions"]), int(engine.info.config["d_model"])
                engine.deliver(event.request_id, 0, event.attempt, torch.randn(shape, generator=generator))
            elif isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        peak = max(peak, int(engine.stats()["kv_blocks_used"]))
    return tokens, peak


def engine_for(info: ModelInfo) -> DecoderEngine:
    return DecoderEngine(info, EngineConfig(max_num_seqs=8))


def test_eight_requests_over_one_clip_share_its_blocks(whisper: ModelInfo) -> None:
    names = [f"r{number}" for number in range(8)]
    same, same_peak = run(engine_for(whisper), dict.fromkeys(names, "clip"))
    different, different_peak = run(engine_for(whisper), {name: "clip"[:3] + name for name in names})
    one, one_peak = run(engine_for(whisper), {"r0": "clip"})
    assert same == dict.fromkeys(names, one["r0"])
    assert set(different) == set(names)
    cross = -(-int(whisper.config["max_source_positions"]) // 16)
    assert same_peak <= cross + 8
    assert different_peak >= 8 * cross
    assert one_peak > cross


def test_the_next_request_over_a_clip_finds_it_projected(whisper: ModelInfo) -> None:
    engine = engine_for(whisper)
    first, _ = run(engine, {"a1": "clip"})
    assert engine.stats()["kv_blocks_used"] == 0
    assert engine.stats()["kv_blocks_cached"] > 0
    second, _ = run(engine, {"b1": "clip"})
    assert second["b1"] == first["a1"]
    assert engine.stats()["cross_table_hits_total"] == 1
