"""What is asked of the systems: the same requests for each, no two with the same media or prompt."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.errors import TriptychError
from common.model_info import ModelInfo, load_model_info
from common.text.processor import TextProcessor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kind = Literal["text", "audio", "image"]
SAMPLE_RATE = 16_000


@dataclass(frozen=True)
class BenchRequest:
    """One request in every form that a system may want it in.

    `prompt_token_ids` has one placeholder token per picture. `question` is what stands beside the pictures in a chat.
    """

    kind: Kind
    prompt_token_ids: list[int]
    max_tokens: int
    ignore_eos: bool = False
    question: str = ""
    pictures: tuple[bytes, ...] = ()
    clip: bytes = b""


@dataclass(frozen=True)
class Workload:
    """A model and a stream of requests for it."""

    name: str
    info: ModelInfo
    kind: Kind
    unit: str
    """What one request is, for the report."""
    requests_per_turn: int
    """Enough for seconds, not minutes, on two cores."""

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        """The first `count` requests of a seed."""
        stream = _STREAMS[self.kind](self.info, random.Random(f"{self.name} {seed}"))
        return [next(stream) for _ in range(count)]


def make_workload(model: str) -> Workload:
    """The workload that fits a model's family. Raises TriptychError("model_not_found")."""
    info = load_model_info(model)
    if info.media_kind == "audio":
        return Workload(info.name, info, "audio", "a clip of 10.4 s of recorded speech", 8)
    if info.media_kind == "image":
        return Workload(info.name, info, "image", "a question about one picture", 64)
    return Workload(info.name, info, "text", f"{TOKENS_IN} tokens in, {TOKENS_OUT} out", 8)


# --- text

TOKENS_IN, TOKENS_OUT = 128, 64


def _texts(info: ModelInfo, rng: random.Random) -> Iterator[BenchRequest]:
    """Prompts of words that are one token each, so that text and tokens have the same length."""
    text = TextProcessor(info)
    words = [token for token in range(info.vocab_size) if _is_word(text, token)]
    if len(words) < TOKENS_IN:
        raise TriptychError("invalid_request", f"the tokenizer of {info.name} has only {len(words)} whole words")
    while True:
        prompt = rng.sample(words, TOKENS_IN)
        if text.encode(text.decode(prompt)) == prompt:
            yield BenchRequest("text", prompt, TOKENS_OUT, ignore_eos=True)


def _is_word(text: TextProcessor, token: int) -> bool:
    word = text.decode([token])
    return len(word) > 3 and word[0] == " " and word[1:].isalpha() and word[1:].islower()


# --- audio

_CLIPS = ("dashwood.flac", "amiable.wav")
_RECORDINGS = Path(__file__).resolve().parents[2] / "tests" / "data"


def _clips(info: ModelInfo, rng: random.Random) -> Iterator[BenchRequest]:
    """One recording with a little noise of its own in each, so that no two share a content hash."""
    import numpy as np

    speech = _load_recordings()
    prompt = _transcription_prompt(info)
    while True:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(speech))
        samples = speech + 1e-4 * noise.astype(np.float32)
        yield BenchRequest("audio", prompt, max_tokens=80, clip=_flac(samples))


def _load_recordings() -> npt.NDArray[np.float32]:
    import numpy as np
    import soundfile

    parts = [soundfile.read(_RECORDINGS / name, dtype="float32")[0] for name in _CLIPS]  # of SAMPLE_RATE
    return np.concatenate(parts)


def _flac(samples: npt.NDArray[np.float32]) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _transcription_prompt(info: ModelInfo) -> list[int]:
    """What transformers' `generate` begins with; a multilingual checkpoint is told English."""
    generation = info.generation
    prompt = [int(generation["decoder_start_token_id"])]
    if generation.get("is_multilingual"):
        prompt += [generation["lang_to_id"]["<|en|>"], generation["task_to_id"]["transcribe"]]
    return [*prompt, int(generation["no_timestamps_token_id"])]


# --- pictures


def draw_picture(rng: random.Random) -> bytes:
    """Return the PNG of a freshly drawn sign that the bundled model has not been trained on."""
    from tools.signpost import scenes

    buffer = io.BytesIO()
    scenes.render(rng, rng.choice(scenes.SIZES), "test").image.save(buffer, "PNG")
    return buffer.getvalue()


def _pictures(info: ModelInfo, rng: random.Random) -> Iterator[BenchRequest]:
    from tools.signpost import scenes

    text = TextProcessor(info)
    while True:
        picture, question = draw_picture(rng), rng.choice(scenes.QUESTIONS[rng.choice(scenes.KINDS)])
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = text.render_chat([{"role": "user", "content": parts}])
        yield BenchRequest("image", prompt, max_tokens=12, question=question, pictures=(picture,))


_STREAMS = {"text": _texts, "audio": _clips, "image": _pictures}
