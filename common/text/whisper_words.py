"""Words of a transcript with times, from the first frame of every token, merged as in openai-whisper (`timing.py`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.messages import TokenLogprob
from common.model_info import ModelInfo
from common.sampling_params import Alignment, SamplingParams
from common.text import whisper_prompt
from common.text.processor import TextProcessor

FRAME_S: Final = 0.02
"""Seconds between the encoder's frames."""
_NO_SPACES: Final = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages written without spaces: each character is a word."""
_BEFORE: Final = "\"'“¿([{-"
_AFTER: Final = "\"'.。,，!！?？:：”)]}、"
_ENDS: Final = ".。!！?？"
_PUNCTUATION: Final = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_LONGEST_MEDIAN_S: Final = 0.7


@dataclass(frozen=True)
class Word:
    """A word of the transcript in seconds of the recording; `text` has its space and its punctuation."""

    text: str
    start_s: float
    end_s: float
    probability: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's shape."""
        return {"word": self.text.strip(), "start": round(self.start_s, 3), "end": round(self.end_s, 3)}


def alignment_request(
    info: ModelInfo,
    text: TextProcessor,
    token_ids: Sequence[int],
    *,
    language: str | None,
    task: whisper_prompt.Task,
    duration_s: float,
) -> tuple[list[int], SamplingParams]:
    """Return prompt and parameters of a request that only tells when the text tokens of a transcript were spoken.

    The whole transcript is the decoder's prompt. What does not fit is left out at the end.
    """
    ids, _ = whisper_prompt.build(info, text, language=language, task=task)
    rules = whisper_prompt.timestamp_rules(info, text)
    first = info.vocab_size if rules is None else rules.first_token_id
    plain = [token for token in token_ids if token < first and token not in info.eos_token_ids]
    room = info.max_model_len - len(ids) - 2  # the end, and the token that every request generates
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        alignment=Alignment(len(ids), max(1, math.ceil(duration_s / FRAME_S))),
    )
    return [*ids, *plain[:room], info.eos_token_ids[0]], sampling


def aligned_words(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    logprobs: Sequence[TokenLogprob | None],
    text: TextProcessor,
    language: str | None,
    begin_s: float,
) -> list[Word]:
    """Return the words of an answered `alignment_request`; none where the answer has no frames."""
    assert sampling.alignment is not None
    place = sampling.alignment.first_token
    known = [one for one in logprobs[place:] if one is not None and one.frame is not None]
    if not known or len(known) != len(prompt_ids) - place:
        return []
    frames = [one.frame or 0 for one in known]
    probabilities = [math.exp(one.logprob) for one in known]
    return words_of(prompt_ids[place:-1], frames, text.decode, language, begin_s, probabilities[:-1])


def words_of(
    token_ids: Sequence[int],
    frames: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
    begin_s: float,
    probabilities: Sequence[float] | None = None,
) -> list[Word]:
    """Return the words of tokens that begin at `frames`, one more than there are tokens: the end of the last one.

    `begin_s` is the time of frame 0 in the recording.
    """
    words: list[Word] = []
    place = 0
    for part in _group(token_ids, decode, language):
        end = place + len(part)
        times = (begin_s + frames[place] * FRAME_S, begin_s + frames[end] * FRAME_S)
        known = None if probabilities is None else statistics.fmean(probabilities[place:end])
        words.append(Word(decode(part), *times, known))
        place = end
    return _merged(_shortened(words))


def _group(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], language: str | None) -> list[list[int]]:
    """Return the tokens word by word, no character cut."""
    pieces: list[list[int]] = []
    held: list[int] = []
    for token in token_ids:
        held.append(token)
        if "\ufffd" not in decode(held):
            pieces.append(held)
            held = []
    pieces += [held] if held else []
    if language in _NO_SPACES:
        return pieces
    words: list[list[int]] = []
    for piece in pieces:
        text = decode(piece)
        if not words or text.startswith(" ") or text.strip() in _PUNCTUATION:
            words.append(list(piece))
        else:
            words[-1] += piece
    return words


def _shortened(words: list[Word]) -> list[Word]:
    """Cut words that last far too long beside the end of a sentence: they hold a pause."""
    lengths = [word.end_s - word.start_s for word in words if word.end_s > word.start_s]
    longest = 2 * min(_LONGEST_MEDIAN_S, statistics.median(lengths)) if lengths else 0.0
    found = list(words)
    for index, word in enumerate(found[1:], 1):
        if word.end_s - word.start_s <= longest:
            continue
        if word.text.strip() in _ENDS:
            found[index] = replace(word, end_s=word.start_s + longest)
        elif found[index - 1].text.strip() in _ENDS:
            found[index] = replace(word, start_s=word.end_s - longest)
    return found


def _merged(words: list[Word]) -> list[Word]:
    """Put punctuation into the word that it belongs to; times stay the word's own."""
    found: list[Word] = []
    opening = ""
    for word in words:
        bare = word.text.strip()
        if bare and bare in _BEFORE and word.text.startswith(" "):
            opening += word.text
        elif found and not opening and bare and bare in _AFTER and not found[-1].text.endswith(" "):
            found[-1] = replace(found[-1], text=found[-1].text + word.text)
        else:
            found.append(replace(word, text=opening + word.text))
            opening = ""
    if opening and found:
        found[-1] = replace(found[-1], text=found[-1].text + opening)
    return [word for word in found if word.text.strip()]
