"""Measure numerals through transformers, greedy, on numbers and dates never trained.

python -m tools.numerals.evaluate common/bundled/numerals --json common/bundled/numerals/evaluation.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tools.numerals.data import ALWAYS_TRAINED, KINDS, ask, draw, pad
from tools.numerals.model import PAD


def tables(count: int, seed: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield names with questions: held-out ones of each kind, and all numbers below a hundred, which are trained."""
    for kind in KINDS:
        rng = Random(f"evaluation {seed} {kind}")
        yield kind, [draw(kind, rng, held_out=True) for _ in range(count)]
        if not kind.endswith("dates"):
            yield f"{kind} below 100, trained", [ask(kind, number, rng) for number in range(ALWAYS_TRAINED)]


def answer(model: Any, tokenizer: Any, questions: list[str], batch: int = 250) -> list[str]:
    """Return an answer per question, in order."""
    answers: list[str] = []
    for start in range(0, len(questions), batch):
        ids = pad(tokenizer(questions[start : start + batch])["input_ids"], PAD)
        tokens = model.generate(ids, attention_mask=(ids != PAD).long())
        answers += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return answers


def main() -> None:
    """Print the share of exact answers of each kind, and some of the wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000, help="questions of each kind")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model, figures = AutoModelForSeq2SeqLM.from_pretrained(arguments.folder, dtype=arguments.dtype), {}
    for name, questions in tables(arguments.count, seed=0):
        answers = answer(model, tokenizer, [question for question, _ in questions])
        wrong = [(*pair, answer) for pair, answer in zip(questions, answers, strict=True) if answer != pair[1]]
        figures[name] = {"exact": round(1 - len(wrong) / len(questions), 4), "n": len(questions)}
        print(f"{name:30} {figures[name]['exact']:8.2%}  n={len(questions)}", *wrong[:3], sep="\n    ", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
