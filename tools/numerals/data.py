"""Questions with their answers, the split of numbers and dates, and batches of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import date, timedelta
from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.numerals.model import PAD
from tools.numerals.words import LANGUAGES, spell, spell_date, to_words

TASKS: Final = {"words": 4, "digits": 4, "dates": 1}
"""Words to digits, digits to words, dates to ISO form, and how often each is drawn for training."""
KINDS: Final = tuple(f"{language} {task}" for task in TASKS for language in LANGUAGES)
ALWAYS_TRAINED: Final = 100
"""Numbers below are no combinations: each is trained."""
_IGNORED: Final = -100


def is_held_out(value: int | date) -> bool:
    """Return whether a number or a date belongs to the tenth never trained, in any language and direction."""
    if isinstance(value, int) and value < ALWAYS_TRAINED:
        return False
    return hashlib.blake2b(f"numerals {value}".encode()).digest()[0] % 10 == 0


def draw(kind: str, rng: Random, *, held_out: bool) -> tuple[str, str]:
    """Draw a question of a kind and its answer, from one side of the split."""
    while True:
        value = _draw_date(rng) if kind.endswith("dates") else _draw_number(rng)
        if is_held_out(value) == held_out:
            return ask(kind, value, rng)


def ask(kind: str, value: int | date, rng: Random) -> tuple[str, str]:
    """Return a question of a kind about a number or a date, in a spelling drawn at random, and its answer."""
    language, task = kind.split()
    end = "." if rng.random() < 0.05 else ""
    if isinstance(value, date):
        return spell_date(language, value, rng) + end, value.isoformat()
    if task == "words":
        return spell(language, value, rng) + end, str(value)
    return f"{language}:{rng.choice(('', ' ', ' ', ' '))}{value}{end}", to_words(language, value)


def _draw_number(rng: Random) -> int:
    """Draw a number of one to six digits, with more zeros than by chance at times."""
    length = rng.choices(range(1, 7), weights=(1, 2, 4, 6, 8, 10))[0]
    share = rng.choice((0.1, 0.1, 0.5))
    digits = [0 if rng.random() < share else rng.randrange(10) for _ in range(length)]
    return int("".join(map(str, digits)))


def _draw_date(rng: Random) -> date:
    first, last = ((date(1900, 1, 1), date(2099, 12, 31)), (date(1000, 1, 1), date(2999, 12, 31)))[rng.randrange(2)]
    return first + timedelta(days=rng.randrange((last - first).days + 1))


def training_batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the model's arguments without end: questions, their mask and answers, [size, tokens], of like lengths."""
    rng = Random(f"training {seed}")
    weights = [TASKS[kind.split()[1]] for kind in KINDS]
    while True:
        examples = [draw(kind, rng, held_out=False) for kind in rng.choices(KINDS, weights, k=16 * size)]
        sources, targets = (tokenizer(list(texts))["input_ids"] for texts in zip(*examples, strict=True))
        order = sorted(range(len(examples)), key=lambda index: (len(targets[index]), len(sources[index])))
        starts = list(range(0, len(order), size))
        rng.shuffle(starts)
        for start in starts:
            chosen = order[start : start + size]
            source = pad([sources[index] for index in chosen], PAD)
            labels = pad([targets[index] for index in chosen], _IGNORED)
            yield {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return rows of tokens as one tensor, filled up with a value."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
