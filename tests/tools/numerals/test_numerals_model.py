"""Numerals on a small sample, its card, and a few steps of its training; `evaluate.py` is the full evaluation."""

from __future__ import annotations

import json
import re
import sys
from datetime import date
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from common.model_info import BUNDLED
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tools.numerals import train
from tools.numerals.data import KINDS, draw, is_held_out, training_batches
from tools.numerals.evaluate import answer
from tools.numerals.model import make_tokenizer

FOLDER = BUNDLED / "numerals"


def test_folder_is_small_and_ordinary() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER)
    assert (model.config.model_type, model.dtype) == ("bart", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer("Two  hundred\nCrème").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "two hundred crème"
    assert ids == make_tokenizer()("Two  hundred\nCrème").input_ids, "the recipe makes another tokenizer"


@pytest.mark.parametrize("kind", KINDS)
def test_card_states_the_evaluation_and_it_reached_the_goal(kind: str) -> None:
    figure = json.loads((FOLDER / "evaluation.json").read_text())[kind]
    assert figure["exact"] >= 0.98
    assert figure["n"] >= 2000
    assert (
        f"| {kind} | {figure['exact']:.2%} (n={figure['n']}) |".replace("%", " %") in (FOLDER / "README.md").read_text()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_questions_are_answered_through_transformers_and_equally_by_llm(kind: str) -> None:
    rng = Random(f"sample {kind}")
    questions, truths = zip(*(draw(kind, rng, held_out=True) for _ in range(40)), strict=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, dtype="float32")
    theirs = answer(model, AutoTokenizer.from_pretrained(FOLDER), list(questions))
    outputs = LLM("numerals", num_threads=1).generate(list(questions), SamplingParams(temperature=0, max_tokens=48))
    assert [output.outputs[0].text for output in outputs] == theirs
    assert sum(given == truth for given, truth in zip(theirs, truths, strict=True)) >= 39


def test_spellings_that_people_type_are_read() -> None:
    """With hyphens anywhere and nowhere, with "and", with a full stop; dates in the words of each language."""
    truths = {
        "one thousand two hundred four": "1204",
        "One-thousand-two-hundred-four": "1204",
        "one-thousand two-hundred and four": "1204",
        "nine hundred ninety nine thousand nine hundred ninety nine": "999999",
        "six.": "6",
        "ein-tausend-zwei-hundert-vier": "1204",
        "mille-deux-cent-quatre": "1204",
        "de: 1204": "eintausendzweihundertvier",
        "July 10th 2064": "2064-07-10",
        "2nd of May 2032": "2032-05-02",
        "the 10th of July, 2064": "2064-07-10",
        "der 3. März 2021": "2021-03-03",
        "le 1er février 2021.": "2021-02-01",
        "2021-03-03": "2021-03-03",
    }
    outputs = LLM("numerals", num_threads=1).generate(list(truths), SamplingParams(temperature=0, max_tokens=48))
    assert {question: output.outputs[0].text for question, output in zip(truths, outputs, strict=True)} == truths


def test_training_never_sees_what_is_held_out() -> None:
    """Answers that are numbers or dates say what was drawn; of answers in words, the questions do."""
    tokenizer, seen = make_tokenizer(), set()
    for batch in islice(training_batches(tokenizer, seed=3, size=64), 16):
        for source, target in zip(batch["input_ids"], batch["labels"].clamp_min(1), strict=True):
            question, answered = (tokenizer.decode(row, skip_special_tokens=True) for row in (source, target))
            digits = re.fullmatch(r"(?:[a-z]{2}: ?)?(\d+)\.?", question)
            if is_date := re.fullmatch(r"\d{4}-\d\d-\d\d", answered):
                value: int | date = date.fromisoformat(answered)
            else:
                value = int(digits[1] if digits else answered)
            seen.add((bool(is_date), bool(digits)))
            assert not is_held_out(value)
    assert seen == {(False, False), (False, True), (True, False)}


@pytest.mark.slow
def test_a_few_steps_make_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, before = torch.get_num_threads(), _weights(tmp_path / "1", 1, monkeypatch)
    after = _weights(tmp_path / "3", 3, monkeypatch)
    torch.set_num_threads(threads)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("q_proj.weight"))


def _weights(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["train", str(folder), "--steps", str(steps), "--batch", "8", "--rate", "0.5"])
    train.main()
    return dict(AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict())
