"""Requests of every kind with transformers' answers to them: the same ones for `LLM` and for clusters."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from common.text import whisper_prompt
from common.text.processor import TextProcessor
from common.text.prompts import default_decoder_prompt, preprocess_decoder_prompt
from tests.equality.media import data_url, picture, sound, text_prompts, wav
from tests.equality.references import Reference
from tests.media_files import encoded
from tools.numerals.data import KINDS, draw
from tools.signpost import scenes
from tools.signpost.model import PLACED_QUESTIONS

MAX_TOKENS = {"llama": 24, "qwen2": 24, "qwen3": 24, "mistral": 24, "qwen2_5_vl": 16, "signpost": 16, "whisper": 20}
MAX_TOKENS |= {"gemma3_text": 24, "gemma3": 16, "qwen2_vl": 16, "qwen3_vl": 16, "qwen2_audio": 16, "qwen3_asr": 16}
MAX_TOKENS |= {"florence2": 24, "bart": 24, "mbart": 24, "t5": 24, "flan_t5": 24, "numerals": 48}
MAX_TOKENS |= {"llava": 16, "llava_siglip": 16, "llava_next": 16, "idefics3": 16, "smolvlm": 16, "mllama": 16}
_LLAVAS = ("llava", "llava_siglip", "llava_next", "idefics3", "smolvlm")
PICTURE_FAMILIES = ("gemma3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", *_LLAVAS, "mllama")
ENCODER_DECODER_FAMILIES = ("bart", "mbart", "t5", "flan_t5")
TASK_TEXTS = (
    "<CAPTION>",
    "<OD>",
    "<CAPTION_TO_PHRASE_GROUNDING> a red house <loc_3>",
    "How many?",
    "<REGION_TO_OCR><loc_1><loc_2><loc_3><loc_4>",
    "<MORE_DETAILED_CAPTION>",
    "<CAPTION>",
    "",
)
LANGUAGES = ("en", "de", "fr", None)
FolderOf: TypeAlias = Callable[[str], Path]
ReferenceOf: TypeAlias = Callable[[str], Reference]
CasesOf: TypeAlias = Callable[[str], list["Case"]]
"""Fixtures: the folder of a tiny model by family, transformers with that model, requests for that model."""
Part: TypeAlias = str | Image.Image | npt.NDArray[np.float32]
"""Of a message: text, a picture or a clip."""


@dataclass(frozen=True)
class Case:
    """One request and the tokens that transformers answers it with (without the end-of-sequence token)."""

    prompt: list[int]
    expected: list[int]
    media: list[bytes] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)
    """Sampling fields that belong to the prompt: Whisper's suppressed and forced tokens."""
    http: dict[str, Any] = field(default_factory=dict)
    """The same request in OpenAI's API: its own fields, without model, limits and sampling."""
    encoder_prompt: list[int] | None = None
    decoder_prompt: list[int] | None = None
    """Of an encoder-decoder model of text, as the user gives it; None for the default that `prompt` says, too."""


def make_cases(name: str, reference: Reference) -> list[Case]:
    """The cases of a tiny family or of a bundled model."""
    if name == "whisper":
        return _speech_cases(reference, MAX_TOKENS[name])
    if name == "signpost":
        return _sign_cases(reference, MAX_TOKENS[name])
    if name == "numerals":
        return _numeral_cases(reference, MAX_TOKENS[name])
    if name in PICTURE_FAMILIES:
        return _media_cases(reference, picture, MAX_TOKENS[name])
    if name in ("qwen2_audio", "qwen3_asr"):
        return _media_cases(reference, sound, MAX_TOKENS[name])
    if name == "florence2":
        return _task_cases(reference, MAX_TOKENS[name])
    if name in ENCODER_DECODER_FAMILIES:
        return _encoder_decoder_cases(reference, MAX_TOKENS[name])
    limit = MAX_TOKENS[name]
    return [Case(ids, reference.generate(ids, limit), http={"prompt": ids}) for ids in text_prompts(12)]


def _encoder_decoder_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """Twelve encoder prompts, two of them the same; a third of the decoder prompts is given, and long at times."""
    cases = []
    for number, encoder_prompt in enumerate([*text_prompts(11), text_prompts(11)[1]]):
        given = None if number % 3 else text_prompts(11)[-number or 1]
        prompt = preprocess_decoder_prompt(reference.info, given)
        expected = reference.translate(encoder_prompt, prompt, max_tokens)
        http = {"prompt": encoder_prompt, **({} if given is None else {"extra_body": {"decoder_prompt": given}})}
        cases.append(Case(prompt, expected, http=http, encoder_prompt=encoder_prompt, decoder_prompt=given))
    return cases


def _task_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """Eight tasks and questions about pictures; two have the same picture, and a third a decoder prompt."""
    cases = []
    for number, text in enumerate(TASK_TEXTS):
        image, given = picture(number % 6), None if number % 3 else [0, *text_prompts(8)[number][:20]]
        prompt = preprocess_decoder_prompt(reference.info, given)
        # transformers counts a forced first token as generated.
        start, more = (prompt, 0) if given else (prompt[:1], 1)
        ids, expected = reference.describe(image, text, start, max_tokens + more)
        parts = [_http_part(image), _http_part(text)]
        http: dict[str, Any] = {"messages": [{"role": "user", "content": parts[:: 1 - number % 2 * 2]}]}
        http |= {} if given is None else {"extra_body": {"decoder_prompt": given}}
        media, expected = [encoded(image)], expected[more:]
        cases.append(Case(prompt, expected, media, http=http, encoder_prompt=ids, decoder_prompt=given))
    return cases


def _media_cases(reference: Reference, make: Callable[[int], Part], max_tokens: int) -> list[Case]:
    """Eight prompts of no, one, two and three inputs between text; some inputs appear more than once."""
    text, cases = TextProcessor(reference.info), []
    for number, count in enumerate([1, 2, 0, 3, 1, 1, 3, 2]):
        parts: list[Part] = [f"({number})"] if number % 2 else []
        for index in range(count):
            parts += [make((number * 3 + index) % 7), f" no. {index} "]
        cases.append(_chat_case(reference, text, [*parts, "what?"], max_tokens))
    return cases


def _sign_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """The bundled model: all questions about one sign, and about one of two."""
    text, rng, cases = TextProcessor(reference.info), random.Random(1), []
    for number in range(8):
        sizes = [scenes.SIZES[(number * 2 + index) % len(scenes.SIZES)] for index in range(1 + number % 2)]
        signs = [scenes.render(rng, size, "test").image for size in sizes]
        kind = scenes.KINDS[number // 2]
        question = PLACED_QUESTIONS[kind][0].format(place="second") if number % 2 else scenes.QUESTIONS[kind][0]
        cases.append(_chat_case(reference, text, [*signs, question], max_tokens))
    return cases


def _numeral_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """Questions of each kind about numbers and dates never trained; the answers are true."""
    text, rng, cases = TextProcessor(reference.info), random.Random(1), []
    for kind in KINDS:
        question, answer = draw(kind, rng, held_out=True)
        encoder_prompt, prompt = text.encode(question), default_decoder_prompt(reference.info)
        expected = reference.translate(encoder_prompt, prompt, max_tokens)
        assert text.decode(expected) == answer, question
        cases.append(Case(prompt, expected, http={"prompt": question}, encoder_prompt=encoder_prompt))
    return cases


def _chat_case(reference: Reference, text: TextProcessor, parts: Sequence[Part], max_tokens: int) -> Case:
    """One turn of text, pictures and clips, for the engine and for OpenAI's API."""
    media = [part for part in parts if not isinstance(part, str)]
    content = [_template_part(part) for part in parts]
    prompt = text.render_chat([{"role": "user", "content": content}])
    expected = reference.generate(prompt, max_tokens, media)
    messages = [{"role": "user", "content": [_http_part(part) for part in parts]}]
    return Case(prompt, expected, [_media_bytes(item) for item in media], http={"messages": messages})


def _template_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, Image.Image) else "audio"}


def _http_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return {"type": "image_url", "image_url": {"url": data_url(part)}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(part)).decode(), "format": "wav"}}


def _media_bytes(item: Image.Image | npt.NDArray[np.float32]) -> bytes:
    return encoded(item) if isinstance(item, Image.Image) else wav(item)


def timed_speech_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """Clips with timestamps; transformers tells the tokens of its prompt first."""
    text, cases = TextProcessor(reference.info), []
    for number in range(3):
        language, samples = LANGUAGES[1:][number], sound(number)
        prompt, rules = whisper_prompt.build(reference.info, text, language=language, timestamps=True)
        options = {"return_timestamps": True, "force_unique_generate_call": True}
        expected = reference.transcribe(samples, max_tokens, language=language, task="transcribe", **options)[3:]
        file = {"file": ("clip.wav", wav(samples), "audio/wav"), "response_format": "verbose_json"}
        http = {**file, **({"language": language} if language else {})}
        cases.append(Case(prompt, expected, [wav(samples)], rules, http))
    return cases


def _speech_cases(reference: Reference, max_tokens: int) -> list[Case]:
    """Six clips in three languages; in two the language is left to be detected."""
    text, cases = TextProcessor(reference.info), []
    for number in range(6):
        language, samples = LANGUAGES[number % 4], sound(number)
        prompt, rules = whisper_prompt.build(reference.info, text, language=language)
        expected = reference.transcribe(samples, max_tokens, language=language, task="transcribe")
        http = {"file": ("clip.wav", wav(samples), "audio/wav"), **({"language": language} if language else {})}
        cases.append(Case(prompt, expected, [wav(samples)], rules, http))
    return cases
