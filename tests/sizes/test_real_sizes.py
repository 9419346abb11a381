"""Models of their full sizes with random weights: the tokens of transformers in float32 wherever that is sure,
log-probabilities no further from it than those of transformers in bfloat16, and memory as it was planned.

To rehearse on a CPU, the models are toys.
"""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    GenerationMixin,
)

from common.model_info import load_model_info
from common.text import whisper_prompt
from common.text.processor import TextProcessor
from engine.llm import LLM
from tests import tiny_models
from tests.equality.cases import Case
from tests.equality.media import SAMPLE_RATE, sound, wav
from tests.equality.references import Reference
from tests.equality.runs import answer_all
from tests.equality.served import serve
from tests.gpu import fast_path
from tests.gpu.device import DEVICE, needs_gpu
from tests.gpu.test_engine import MARGIN_FACTOR, MAX_FACTOR, MEAN_FACTOR, logprobs
from tests.media_files import encoded
from tests.proxy.sample_media import data_url
from tests.tools.gpu_check.whisper_shape import whisper_large_v3
from tools.gpu_check.shapes import qwen2_5_vl_3b

TOY = DEVICE == "cpu"
pytestmark = [*needs_gpu, pytest.mark.cluster, pytest.mark.timeout(600)]
DTYPE = torch.bfloat16
MAX_TOKENS = 16
FULL_HD, FOUR_K = ((84, 56), (140, 84)) if TOY else ((1920, 1080), (3840, 2160))
TEXT_TOKENS, MODEL_LEN = (100, 1024) if TOY else (8192, 32768)
SECONDS = 40 if TOY else 600
SHARE: dict[str, Any] = {"kv_cache_bytes": 2**24, "encoder_cache_bytes": 2**22} if TOY else {"memory_fraction": 0.3}
ENGINE: dict[str, Any] = {"device": DEVICE, "dtype": "bfloat16", "swap_bytes": 0, **SHARE}


@dataclass(frozen=True)
class Known:
    """Requests, what transformers in float32 thinks of each token of its answers [num_tokens, vocab_size], and how far
    its log-probabilities in bfloat16 stray from that [all tokens]."""

    folder: Path
    cases: list[Case]
    scores: list[torch.Tensor]
    rounding: npt.NDArray[np.float64]

    def check_tokens(self, answers: Sequence[Sequence[int]]) -> None:
        """Another token is as good where float32 prefers its own by no more than errors of rounding."""
        for case, scores, answer in zip(self.cases, self.scores, answers, strict=True):
            pairs = list(zip(case.expected, answer, strict=False))
            first = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
            if first is not None:
                preference = scores[first, case.expected[first]] - scores[first, answer[first]]
                assert preference <= MARGIN_FACTOR * self.rounding.max(), f"token {first} of {len(pairs)}"
            else:
                assert len(answer) == len(case.expected)

    def check_logprobs(self, got: npt.NDArray[np.float64]) -> None:
        """`got` are those of all tokens of all answers."""
        tokens = [torch.tensor(case.expected) for case in self.cases]
        sure = [scores.gather(1, ids[:, None])[:, 0] for scores, ids in zip(self.scores, tokens, strict=True)]
        strayed = np.abs(got - torch.cat(sure).double().numpy())
        assert strayed.mean() <= MEAN_FACTOR * self.rounding.mean()
        assert strayed.max() <= MAX_FACTOR * self.rounding.max()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Pictures of 1920 x 1080 and of 3840 x 2160, four in one request, and a long text."""
    folder = qwen2_5_vl_3b(toy=TOY).write(tmp_path_factory.mktemp("qwen"))
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
    return known(folder, AutoModelForImageTextToText, inputs, cases)


def test_a_vision_language_model_answers_as_transformers(qwen: Known) -> None:
    llm = LLM(qwen.folder, max_model_len=MODEL_LEN, **ENGINE, **fast_path.flashinfer_for("bfloat16"))
    with as_planned(llm):  # before anything is in a cache
        qwen.check_tokens([answer_all(llm, [case], MAX_TOKENS)[0] for case in qwen.cases])
        qwen.check_tokens(answer_all(llm, qwen.cases, MAX_TOKENS))
    qwen.check_logprobs(logprobs(llm, qwen.cases))


async def test_its_cluster_answers_as_transformers(qwen: Known, broker_url: str) -> None:
    release()  # what the last test had
    options = {**ENGINE, "max_model_len": MODEL_LEN, **fast_path.flashinfer_for("bfloat16")}
    with serve(qwen.folder, broker_url, "real-sizes", topology="1e1pd", **options) as served:
        answers = await served.answer_all(qwen.cases, MAX_TOKENS)
        qwen.check_tokens([answer.token_ids or [] for answer in answers])
        await served.wait_until_nothing_is_held()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Clips of 30 s, with the tokenizer of the tiny model."""
    folder = tiny_models.make_whisper(tmp_path_factory.mktemp("whisper"))
    shape = whisper_large_v3(toy=TOY)
    sizes = {name: value for name, value in shape.config.items() if not name.endswith("_token_id")}
    small = json.loads((folder / "config.json").read_text())
    sizes["vocab_size"] = max(small["vocab_size"], shape.config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(small | sizes))
    (folder / "preprocessor_config.json").write_text(json.dumps(shape.preprocessor))
    draw_weights(folder, AutoModelForSpeechSeq2Seq)
    info = load_model_info(str(folder))
    prompt, _ = whisper_prompt.build(info, TextProcessor(info), language="en")
    listen = AutoFeatureExtractor.from_pretrained(folder)

    def inputs(model: Any, case: Case) -> dict[str, Any]:
        samples, _ = soundfile.read(io.BytesIO(case.media[0]), dtype="float32")
        features = listen(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        ids = torch.tensor([case.prompt], device=DEVICE)
        return {"input_features": features.to(DEVICE, model.dtype), "decoder_input_ids": ids}

    return known(folder, AutoModelForSpeechSeq2Seq, inputs, [Case(prompt, [], [wav(one)]) for one in clips()])


def test_a_speech_model_answers_as_transformers(whisper: Known) -> None:
    llm = LLM(whisper.folder, **ENGINE, **fast_path.flashinfer_for("bfloat16"))
    with as_planned(llm):
        whisper.check_tokens(answer_all(llm, whisper.cases, MAX_TOKENS))
    whisper.check_logprobs(logprobs(llm, whisper.cases))


async def test_its_cluster_transcribes_a_long_recording(whisper: Known, broker_url: str) -> None:
    """Random weights say nothing: every window is computed, and the same recording has the same text again."""
    samples = np.concatenate(clips())
    recording = ("long.wav", wav(samples), "audio/wav")
    release()
    options = {**ENGINE, **fast_path.flashinfer_for("bfloat16")}
    with serve(whisper.folder, broker_url, "long-recording", topology="1e1pd", **options) as served:
        async with served.client() as client:
            texts = []
            for _ in range(2):
                create: Any = client.audio.transcriptions.create
                told = await create(
                    model=served.info.name, file=recording, language="en", response_format="verbose_json"
                )
                assert told.duration == pytest.approx(len(samples) / SAMPLE_RATE)
                texts.append(told.text)
            assert texts[0] == texts[1]
        await served.wait_until_nothing_is_held()


def clips() -> list[npt.NDArray[np.float32]]:
    """Of 30 s each."""
    return [np.resize(sound(number), SAMPLE_RATE * 30) for number in range(SECONDS // 30)]


def draw_weights(folder: Path, loader: Any) -> None:
    """Write weights as transformers draws them for a training, in bfloat16."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = loader.from_config(AutoConfig.from_pretrained(folder), dtype=DTYPE)
    model.save_pretrained(folder)


def photo(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A gradient under noise, as a JPEG file: megabytes, as photographs have."""
    ramp = np.linspace(0, 160, width)[None, :, None] * rng.random(3)
    pixels = (ramp + rng.integers(0, 96, (height, width, 3))).astype(np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=80)


@torch.inference_mode()
def known(folder: Path, loader: Any, make_inputs: Callable[[Any, Case], dict[str, Any]], cases: list[Case]) -> Known:
    """Ask transformers: for answers in float32, and for what it thinks of these in bfloat16."""
    model = loader.from_pretrained(folder, dtype=DTYPE).to(DEVICE).float().eval()
    answered, scores = [], []
    for case in cases:
        rules = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        options = {"generation_config": rules, "output_scores": True, "return_dict_in_generate": True}
        told = GenerationMixin.generate(model, **make_inputs(model, case), **options)
        answered.append(replace(case, expected=told.sequences[0, -MAX_TOKENS:].tolist()))
        scores.append(torch.cat(told.scores).float().log_softmax(-1).cpu())
    del model
    release()
    model = loader.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()
    rounding = []
    for case, sure in zip(answered, scores, strict=True):
        inputs = make_inputs(model, replace(case, prompt=[*case.prompt, *case.expected]))
        logits = model(**inputs).logits[0, -MAX_TOKENS - 1 : -1]
        ids = torch.tensor(case.expected)[:, None]
        rounding.append((logits.float().log_softmax(-1).cpu().gather(1, ids) - sure.gather(1, ids)).abs()[:, 0])
    del model
    release()
    return Known(folder, answered, scores, torch.cat(rounding).double().numpy())


@contextmanager
def as_planned(llm: LLM) -> Iterator[None]:
    """Beside weights and pools nothing takes more than was measured at start."""
    if DEVICE == "cpu":
        yield
        return
    planned = sum(part.stats()["memory_activation_bytes"] for part in (llm.encoder, llm.decoder) if part is not None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{peak / 2**20:.0f} MiB of {planned / 2**20:.0f} planned")
    assert peak <= planned


def release() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
