"""Evaluate a signpost folder on held-out pictures, through transformers' Auto classes and greedy generation.

    python -m tools.signpost.evaluate common/bundled/signpost --pictures 1800 --json figures.json

Every picture shows a text that training never saw, and about every fourth a colour-shape pair that it never saw.
An answer counts if it is exact. Questions come in all their wordings. Follow-up questions are asked after the
model's own earlier answers, right or wrong.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from common.model_info import load_model_info
from common.text.processor import TextProcessor
from tools.bench.transformers_system import TransformersSystem
from tools.bench.workloads import BenchRequest
from tools.signpost import scenes
from tools.signpost.model import PLACED_QUESTIONS, PLACES
from tools.signpost.scenes import BUILT_IN, FACES, KINDS, QUESTIONS, SIZES, Face, Scene

Message = dict[str, Any]
Hits = dict[str, list[bool]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """A conversation up to a question, and its pictures in order."""

    images: Sequence[Image.Image]
    messages: Sequence[Message]


class Signpost:
    """A model folder, loaded for questions."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        info = load_model_info(str(folder))
        self.system = TransformersSystem(info, dtype, num_threads=1)
        self._text = TextProcessor(info)

    def answer(self, prompts: Sequence[Prompt], batch_size: int = 60) -> list[str]:
        """Return the greedy answers to several prompts."""
        return [outcome.text for outcome in self.system.run(list(map(self._request, prompts)), batch_size)]

    def _request(self, prompt: Prompt) -> BenchRequest:
        ids, files = self._text.render_chat(list(prompt.messages)), [io.BytesIO() for _ in prompt.images]
        for image, file in zip(prompt.images, files, strict=True):
            image.save(file, "PNG", compress_level=1)
        return BenchRequest("image", ids, max_tokens=12, pictures=tuple(file.getvalue() for file in files))


def ask_about(images: Sequence[Image.Image], question: str) -> Prompt:
    """A first question about one picture or several."""
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    return Prompt(images, [{"role": "user", "content": parts}])


def swapped(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same questions, each with the pictures of the prompt before it."""
    return [Prompt(other.images, prompt.messages) for prompt, other in zip(prompts, _rolled(prompts), strict=True)]


def _rolled(items: Sequence[_T]) -> list[_T]:
    return [*items[-1:], *items[:-1]]


def evaluate_single(model: Signpost, drawn: Sequence[Scene], rng: random.Random) -> tuple[Hits, Hits, Hits]:
    """One picture, one question.

    Returns:
        The hits; the hits with pictures swapped; and how often the swapped picture happens to have the same answer.
    """
    hits, wrong_picture, chance = defaultdict(list), defaultdict(list), defaultdict(list)
    for kind in KINDS:
        prompts = [ask_about([scene.image], rng.choice(QUESTIONS[kind])) for scene in drawn]
        for scene, answer in zip(drawn, model.answer(prompts), strict=True):
            hit = answer == scene.answers[kind]
            for name in _groups(scene, kind):
                hits[name].append(hit)
            if kind == "text":
                padded = answer.ljust(len(scene.answers["text"]))
                hits["text, by character"] += [a == b for a, b in zip(scene.answers["text"], padded, strict=False)]
        answers = zip(drawn, model.answer(swapped(prompts)), _rolled(drawn), strict=True)
        for scene, answer, shown in answers:
            wrong_picture[kind].append(answer == scene.answers[kind])
            chance[kind].append(shown.answers[kind] == scene.answers[kind])
    return hits, wrong_picture, chance


def _groups(scene: Scene, kind: str) -> list[str]:
    """Which lines of the table an answer counts for."""
    groups = [kind]
    if kind == "text":
        groups += [f"text, {len(scene.answers['text'])} characters", f"text, {scene.text_kind}", f"text, {scene.face}"]
        groups.append(f"text, type of {_type_range(scene.type_size)}")
    elif scene.unseen_pair and kind in ("colour", "shape"):
        groups.append(f"{kind}, unseen pair")
    return groups


def _type_range(size: int) -> str:
    return next((f"{low} and {low + 1} px" for low in (14, 16) if size < low + 2), "18 px and more")


def evaluate_follow_ups(model: Signpost, drawn: Sequence[Scene], rng: random.Random) -> Hits:
    """All questions about a picture in one conversation; the first of each conversation does not count."""
    hits: Hits = defaultdict(list)
    orders = [rng.sample(KINDS, len(KINDS)) for _ in drawn]
    prompts = [
        ask_about([scene.image], rng.choice(QUESTIONS[order[0]])) for scene, order in zip(drawn, orders, strict=True)
    ]
    for turn in range(len(KINDS)):
        answers = model.answer(prompts)
        for index, (scene, order, answer) in enumerate(zip(drawn, orders, answers, strict=True)):
            if turn > 0:
                hits[order[turn]].append(answer == scene.answers[order[turn]])
            if turn + 1 < len(KINDS):
                prompts[index] = _continue(prompts[index], answer, rng.choice(QUESTIONS[order[turn + 1]]))
    return hits


def _continue(prompt: Prompt, answer: str, question: str) -> Prompt:
    turns: list[Message] = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return Prompt(prompt.images, [*prompt.messages, *turns])


def evaluate_pairs(model: Signpost, pairs: Sequence[Sequence[Scene]], rng: random.Random) -> Hits:
    """Two pictures in one prompt, and a question about one of them."""
    hits: Hits = defaultdict(list)
    for kind in KINDS:
        places = [rng.randrange(len(PLACES)) for _ in pairs]
        prompts = [
            ask_about([scene.image for scene in pair], rng.choice(PLACED_QUESTIONS[kind]).format(place=PLACES[place]))
            for pair, place in zip(pairs, places, strict=True)
        ]
        for pair, place, answer in zip(pairs, places, model.answer(prompts), strict=True):
            hits[kind].append(answer == pair[place].answers[kind])
            hits[f"{kind}, {PLACES[place]} picture"].append(answer == pair[place].answers[kind])
    return hits


def draw(rng: random.Random, count: int, faces: tuple[Face, ...] = FACES) -> list[Scene]:
    """Held-out pictures, all sizes alike."""
    return [scenes.render(rng, SIZES[index % len(SIZES)], "test", faces) for index in range(count)]


def evaluate(folder: Path, pictures: int, seed: int) -> dict[str, Any]:
    """All figures, each as its share of exact answers and the number of answers."""
    model, rng = Signpost(folder), random.Random(f"evaluate {seed}")
    single, wrong_picture, chance = evaluate_single(model, draw(rng, pictures), rng)
    built_in, _, _ = evaluate_single(model, draw(rng, pictures // 3, (BUILT_IN,)), rng)
    follow_ups = evaluate_follow_ups(model, draw(rng, pictures // 3), rng)
    sizes = [(rng.choice(SIZES), rng.choice(SIZES)) for _ in range(pictures // 3)]
    pairs = evaluate_pairs(model, [[scenes.render(rng, size, "test") for size in each] for each in sizes], rng)
    tables = {
        "one picture": single,
        "one picture, built-in face alone": built_in,
        "follow-up questions": follow_ups,
        "one of two pictures": pairs,
        "pictures swapped": wrong_picture,
        "chance: the swapped picture has the same answer": chance,
    }
    return {name: _shares(hits) for name, hits in tables.items()} | {
        "parameters": sum(parameter.numel() for parameter in model.system.model.parameters()),
        "folder_bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def _shares(hits: Hits) -> dict[str, dict[str, float]]:
    return {name: {"exact": round(sum(all_) / len(all_), 4), "n": len(all_)} for name, all_ in sorted(hits.items())}


def main() -> None:
    """Print the tables; write them as JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=1800, help="single pictures; a third of it for the others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    begin = time.monotonic()
    figures = evaluate(arguments.folder, arguments.pictures, arguments.seed)
    for table, rows in figures.items():
        if isinstance(rows, dict):
            print(f"\n{table}")
            for name, row in rows.items():
                print(f"  {name:34} {row['exact']:7.1%}  n={row['n']}")
    size_mb = figures["folder_bytes"] / 1e6
    print(f"\n{figures['parameters'] / 1e6:.2f} M parameters, folder {size_mb:.2f} MB")
    print(f"{time.monotonic() - begin:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
