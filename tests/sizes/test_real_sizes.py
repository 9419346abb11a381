"""Models of their full sizes with random weights: the tokens of transformers in float32 wherever that is sure,
log-probabilities no further from it than those of transformers in bfloat16, and memory as it was planned.

On a CPU the models are toys, unless REAL_SIZES is set: two cores then take two hours.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
)

from common.model_info import load_model_info
from common.text import whisper_prompt
from common.text.processor import TextProcessor
from engine.device.memory_profiler import PeakMemory
from engine.llm import LLM
from tests import tiny_models
from tests.equality.cases import Case
from tests.equality.media import SAMPLE_RATE, sound
from tests.equality.references import Reference
from tests.equality.runs import answer_all
from tests.equality.served import Answer, Served, serve
from tests.gpu.test_engine import logprobs
from tests.media_files import encoded
from tests.proxy.sample_media import data_url
from tests.sizes.known import DEVICE, MAX_TOKENS, TOY, Ask, Known, begun, draw_weights, known, model_folder, release
from tests.tools.gpu_check.whisper_shape import whisper_large_v3
from tools.gpu_check.shapes import filled, qwen2_5_vl_3b
from tools.soak.asks import WITHOUT_RULES

FULL_HD, FOUR_K = ((84, 56), (140, 84)) if TOY else ((1920, 1080), (3840, 2160))
TEXT_TOKENS, MODEL_LEN = (100, 1024) if TOY else (8192, 32768)
SECONDS = 60 if TOY else 600
ON_CPU: dict[str, Any] = {"kv_cache_bytes": 5 * 2**28, "encoder_cache_bytes": 2**27, "num_threads": os.cpu_count()}
"""The cache has room for all requests at once, and fills up."""
ON_GPU: dict[str, Any] = {"attention_backend": "flashinfer", "memory_fraction": 0.3, "swap_bytes": 0}
ENGINE: dict[str, Any] = {"device": DEVICE, "dtype": "bfloat16", **(ON_CPU if DEVICE == "cpu" else ON_GPU)}
TIMEOUT_S = 120.0 if TOY or DEVICE != "cpu" else 7200.0
pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.timeout(5 * TIMEOUT_S)]
POOLS = ("kv_cache_bytes", "encoder_cache_bytes", "swap_bytes", "encoder_output_cache_bytes", "encoder_staging_bytes")
PROCESS_BYTES = 330_000_000
"""Python, PyTorch and the service around the engine: docs/how-to/memory.md#measurements."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Pictures of 1920 x 1080 and of 3840 x 2160, four in one request, and a long text."""
    folder = qwen2_5_vl_3b(toy=TOY).write(model_folder("qwen2.5-vl-3b", tmp_path_factory.mktemp("qwen")))
    draw_weights(folder, AutoModelForImageTextToText)
    reference = Reference(folder)

    def inputs(model: Any, case: Case) -> dict[str, Any]:
        pictures = [Image.open(io.BytesIO(one)) for one in case.media]
        of_case = reference.inputs(case.prompt, pictures)
        return {name: value.to(DEVICE) for name, value in of_case.items()}

    sizes = [[FULL_HD], [FOUR_K], [FULL_HD] * 4, []]
    text = TextProcessor(load_model_info(str(folder)))
    rng, cases = np.random.default_rng(0), []
    for of_request in sizes:
        pictures = [photo(rng, *size) for size in of_request]
        words = "What is on it?" if pictures else text.decode([*range(33, 83)] * (TEXT_TOKENS // 50))
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": words}]
        prompt = text.render_chat([{"role": "user", "content": parts}])
        shown = [{"type": "image_url", "image_url": {"url": data_url(one, "image/jpeg")}} for one in pictures]
        http = {"messages": [{"role": "user", "content": [*shown, parts[-1]]}]}
        cases.append(Case(prompt, [], pictures, http=http))
    # Of bfloat16 a CPU uses the largest error alone: with the first request's the check is no looser, and two cores are
    # done half an hour sooner.
    again = [0] if DEVICE == "cpu" and not TOY else None
    return known(folder, AutoModelForImageTextToText, inputs, cases, again)


def test_a_vision_language_model_answers_as_transformers(qwen: Known) -> None:
    llm = LLM(qwen.folder, max_model_len=MODEL_LEN, **ENGINE)
    with as_planned(llm):  # before anything is in a cache
        check_tokens(qwen, lambda cases: answer_all(llm, cases, MAX_TOKENS, timeout_s=TIMEOUT_S))
    if TOY or DEVICE != "cpu":  # as long again
        qwen.check_logprobs(logprobs(llm, qwen.cases))


async def test_its_cluster_answers_as_transformers(qwen: Known, broker_url: str) -> None:
    release()  # what the last test had
    options = {**ENGINE, "max_model_len": MODEL_LEN, "timeout_s": TIMEOUT_S}
    with serve(qwen.folder, broker_url, "real-sizes", topology="1e1pd", **options) as served:
        answers = await check_served(qwen, served)
        await print_stages(served, answers)
        check_memory(served)
        await served.wait_until_nothing_is_held()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Clips of 30 s, with the tokenizer of the tiny model and made-up words."""
    small = tiny_models.make_whisper(tmp_path_factory.mktemp("whisper"))
    folder = model_folder("whisper-large-v3", tmp_path_factory.mktemp("large"))
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(small, folder, ignore=ignore, dirs_exist_ok=True)
    shape = whisper_large_v3(toy=TOY)
    sizes = {name: value for name, value in shape.config.items() if not name.endswith("_token_id")}
    config = json.loads((folder / "config.json").read_text())
    sizes["vocab_size"] = max(config["vocab_size"], shape.config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config | sizes))
    (folder / "preprocessor_config.json").write_text(json.dumps(shape.preprocessor))
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(filled(tokenizer, sizes["vocab_size"])))
    draw_weights(folder, AutoModelForSpeechSeq2Seq)
    info = load_model_info(str(folder))
    prompt, rules = whisper_prompt.build(info, TextProcessor(info), language="en")
    listen = AutoFeatureExtractor.from_pretrained(folder)

    def inputs(model: Any, case: Case) -> dict[str, Any]:
        samples, _ = soundfile.read(io.BytesIO(case.media[0]), dtype="float32")
        features = listen(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        ids = torch.tensor([case.prompt], device=DEVICE)
        return {"input_features": features.to(DEVICE, model.dtype), "decoder_input_ids": ids}

    files = [recorded(one) for one in clips()]
    asks = [{"file": ("clip.wav", one, "audio/wav"), "language": "en"} for one in files]
    cases = [Case(prompt, [], [one], rules, ask) for one, ask in zip(files, asks, strict=True)]
    return known(folder, AutoModelForSpeechSeq2Seq, inputs, cases)


def test_a_speech_model_answers_as_transformers(whisper: Known) -> None:
    llm = LLM(whisper.folder, **ENGINE)
    with as_planned(llm):
        check_tokens(whisper, lambda cases: answer_all(llm, cases, MAX_TOKENS, timeout_s=TIMEOUT_S))
    whisper.check_logprobs(logprobs(llm, whisper.cases))


async def test_its_cluster_transcribes_a_long_recording(whisper: Known, broker_url: str) -> None:
    """Its clips have the tokens of transformers. Random weights say nothing in all: every window is asked for, and the
    same recording has the same text again. A toy has the same tokens; of the large model's 50,000 some timestamps are
    alike within rounding, as windows share batches."""
    samples = np.concatenate(clips())
    recording = ("long.wav", recorded(samples), "audio/wav")
    release()
    options = {**ENGINE, "timeout_s": TIMEOUT_S}
    limit = {} if DEVICE == "cuda" else {"max_completion_tokens": MAX_TOKENS, **WITHOUT_RULES}
    with serve(whisper.folder, broker_url, "long-recording", topology="1e1pd", **options) as served:
        answers = await check_served(whisper, served)
        async with served.client() as client:
            texts, readings = [], []
            for _ in range(2):
                before = windows_asked(served)
                create: Any = client.audio.transcriptions.create
                ask = {"file": recording, "language": "en", "response_format": "verbose_json", "extra_body": limit}
                told = await create(model=served.info.name, **ask)
                assert told.duration == pytest.approx(len(samples) / SAMPLE_RATE)
                texts.append(told.text)
                readings.append([segment.tokens for segment in told.segments])
                assert windows_asked(served) - before >= len(clips())
            assert texts[0] == texts[1]
            assert all(map(any, readings))
            assert readings[0] == readings[1] or not TOY
        await print_stages(served, answers)
        check_memory(served)
        await served.wait_until_nothing_is_held()


def check_tokens(known: Known, ask: Ask) -> None:
    """Against transformers; and an answer begins as it is told: a toy may have no tie that asks for that."""
    known.check_all_tokens(ask)
    beginning = [40, known.scores[-1].shape[-1] - 1]  # not transformers'
    [answer] = ask([begun(known.cases[-1], beginning)])
    assert answer[: len(beginning)] == beginning
    assert len(answer) == MAX_TOKENS


async def check_served(known: Known, served: Served) -> list[Answer]:
    """Return all answers, the first to requests at once."""
    answers: list[Answer] = []

    def ask(cases: Sequence[Case]) -> list[list[int]]:
        answers.extend(told := asyncio.run(served.answer_all(cases, MAX_TOKENS)))
        return [answer.token_ids or [] for answer in told]

    await asyncio.to_thread(check_tokens, known, ask)
    return answers


def windows_asked(served: Served) -> float:
    """Return how many items the encoder has looked up: it computed them, or had kept their outputs."""
    return sum(served.total("encoder", f"encoder_output_cache_{kind}_total") for kind in ("hits", "misses"))


def clips() -> list[npt.NDArray[np.float32]]:
    """Of 30 s each."""
    return [np.resize(sound(number), SAMPLE_RATE * 30) for number in range(SECONDS // 30)]


def recorded(samples: npt.NDArray[np.float32]) -> bytes:
    """A WAV file of 16 bits, as recorders write them. In float32 ten minutes are over --max-media-bytes, and the file
    has the time at which it was written."""
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def photo(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A gradient under noise, as a JPEG file: megabytes, as photographs have."""
    ramp = np.linspace(0, 160, width)[None, :, None] * rng.random(3)
    pixels = (ramp + rng.integers(0, 96, (height, width, 3))).astype(np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=80)


@contextmanager
def as_planned(llm: LLM) -> Iterator[None]:
    """Beside weights nothing takes more than was measured at start; on a CPU pools grow, and Python does."""
    parts = [part.stats() for part in (llm.encoder, llm.decoder) if part is not None]
    planned = sum(part["memory_activation_bytes"] for part in parts)
    if DEVICE == "cpu":
        planned += sum(part.get(pool, 0) for part in parts for pool in POOLS) + PROCESS_BYTES
    with PeakMemory(torch.device(DEVICE)) as peak:
        yield
    if peak.size_bytes is not None:
        print(f"{peak.size_bytes / 2**20:.0f} MiB of {planned / 2**20:.0f} planned")
        assert peak.size_bytes <= planned
        assert TOY or DEVICE != "cpu" or planned <= 3 * peak.size_bytes, "so large a guess leaves nothing for caches"


def check_memory(served: Served) -> None:
    """Each worker's own memory, shared libraries apart, at its peak."""
    if DEVICE != "cpu":
        return
    for instance in served.cluster.instances.values():
        if instance.role == "proxy":
            continue
        lines = Path(f"/proc/{instance.pid}/status").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        stats, peak = served.gauges(instance.id), 1024 * (kib["VmHWM"] - kib["RssFile"])
        parts = {name: int(stats.get(name, 0)) for name in ("memory_weights_bytes", "memory_activation_bytes", *POOLS)}
        planned = sum(parts.values()) + PROCESS_BYTES
        print(f"{instance.role}: {peak / 2**20:.0f} MiB of {planned / 2**20:.0f} planned: {parts}")
        assert peak <= planned
        assert TOY or planned <= 3 * peak, "so large a guess leaves nothing for caches"


async def print_stages(served: Served, answers: Sequence[Answer]) -> None:
    """How long each stage of each request took, queues apart."""
    async with served.client() as client:
        for number, answer in enumerate(answers):
            told = await client.get(f"/requests/{answer.request_id}/timeline", cast_to=httpx.Response)
            for span in sorted(told.json()["spans"], key=lambda span: span["start_s"]):
                took_s, place = span["end_s"] - span["start_s"], f"{span['stage']} on {span['instance']}"
                print(f"request {number}: {took_s:8.2f} s  {place}")
