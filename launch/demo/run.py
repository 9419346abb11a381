"""`triptych demo`: real clusters, pictures, true answers, and the work of each stage; then numbers and dates."""

from __future__ import annotations

import asyncio
import io
import random
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from common.config import Settings
from common.keys import own_api_key
from launch.cli.answers import latency_table, summary, timeline_table
from launch.cli.client import ApiClient, ClientOptions, ClientRequest, ClientResult, Media
from launch.cli.console import ConsoleReporter, make_console
from launch.cluster.children import adopt_orphans
from launch.cluster.local_cluster import LocalCluster
from launch.demo.numbers import follow_chains, show_chains
from launch.demo.samples import FILES, write_files

_THUMBNAIL_COLUMNS = 32
PICTURES: Final = FILES / "pictures"
"""Signs with texts that the model has not seen in training; `tools.signpost.pictures` has drawn them."""
WRONG_ALLOWED = 1 / 3
"""The model is right in about 49 of 50 answers; more wrong ones than this mean that something is broken."""
_TIMELINE_S = 3.0


@dataclass
class Question:
    """A picture as a PNG file, a question and the right answer; later the outcome."""

    png: bytes
    text: str
    expected: str
    outcome: ClientResult | None = None
    spans: list[dict[str, Any]] | None = None

    @property
    def right(self) -> bool:
        return self.outcome is not None and self.outcome.text.strip().lower() == self.expected.lower()


def run_demo(settings: Settings, pictures: int, seed: int, keep: Path | None = None) -> int:
    """Run the demo with signpost, then numerals; return 1 if a request failed or too many answers are wrong, else 0.

    `keep` is a folder for the pictures, with their questions and answers in `answers.txt`. Raises TriptychError as a
    cluster does, and where the folder cannot be written."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the cluster is taken down
    adopt_orphans()
    console = make_console()
    questions = choose_questions(random.Random(seed), pictures)
    if keep is not None:
        keep_pictures(keep, questions)
    with LocalCluster(settings, reporter=ConsoleReporter(console, "demo")) as cluster:
        console.print(f"\nasking about {pictures} pictures new to the model, all at once …")
        began = time.perf_counter()
        asyncio.run(ask_all(cluster.base_url, questions, own_api_key(settings)))
        wall_s = time.perf_counter() - began
    for question in questions:
        console.print()
        console.print(_show(question, console))
    signs = _conclude(console, questions, wall_s)
    console.print()
    settings = settings.model_copy(update={"model": "numerals"})
    with LocalCluster(settings, reporter=ConsoleReporter(console, "demo")) as cluster:
        chains = asyncio.run(follow_chains(cluster.base_url, random.Random(seed), own_api_key(settings)))
    code = max(signs, show_chains(console, chains))
    console.print(_next_steps(questions[0], keep), highlight=False, markup=False, soft_wrap=True)
    return code


def keep_pictures(folder: Path, questions: list[Question]) -> None:
    """Write the pictures, and `answers.txt` with a line for each: name, question, answer, separated by tabs.

    Raises TriptychError("invalid_request") where the folder cannot be written, or has other files of these names."""
    pictures = {f"picture-{number}.png": question for number, question in enumerate(questions, 1)}
    lines = [f"{name}\t{question.text}\t{question.expected}\n" for name, question in pictures.items()]
    files = {name: question.png for name, question in pictures.items()}
    write_files(folder, {**files, "answers.txt": "".join(lines).encode()})


def _next_steps(first: Question, kept: Path | None) -> str:
    """Return the commands that go on from here: the same model, asked by the reader."""
    ask = ["triptych samples", 'triptych request samples/sign.png --prompt "What does the sign say?"']
    if kept is not None:
        ask = [f'triptych request {shlex.quote(str(kept / "picture-1.png"))} --prompt "{first.text}"']
        ask.append(f"cat {shlex.quote(str(kept / 'answers.txt'))}")
    begin = f"source {shlex.quote(sys.prefix)}/bin/activate   # in each terminal"
    return "\n  ".join(["\nnext, `serve` in a terminal of its own:", begin, "triptych serve signpost", *ask])


def choose_questions(rng: random.Random, pictures: int) -> list[Question]:
    """Return so many of the pictures, each with its question."""
    lines = [line.split("\t") for line in (PICTURES / "answers.txt").read_text().splitlines()]
    chosen = rng.sample(lines, pictures)
    return [Question((PICTURES / name).read_bytes(), text, expected) for name, text, expected in chosen]


async def ask_all(base_url: str, questions: list[Question], api_key: str | None) -> None:
    """Ask all questions at once through the OpenAI API, then fetch the timelines."""
    options = ClientOptions(base_url, None, max_tokens=16, temperature=0.0, timeout_s=90.0, api_key=api_key)
    async with ApiClient(options) as client:
        await client.connect()
        outcomes = await asyncio.gather(*(client.send(_job(question)) for question in questions))
        for question, outcome in zip(questions, outcomes, strict=True):
            question.outcome = outcome
            if outcome.request_id is not None:
                question.spans = await _timeline(client, outcome.request_id)


async def _timeline(client: ApiClient, request_id: str) -> list[dict[str, Any]]:
    """Return all spans of a request. The encoder's spans come with the confirmation of the handoff, which may follow
    the answer."""
    ends_s = time.monotonic() + _TIMELINE_S
    while True:
        spans = await client.timeline(request_id)
        if any(span["stage"] == "handoff" for span in spans) or time.monotonic() > ends_s:
            return spans
        await asyncio.sleep(0.05)


def _job(question: Question) -> ClientRequest:
    return ClientRequest(question.text, question.text, (Media("picture.png", "image/png", question.png),))


def _show(question: Question, console: Console) -> RenderableType:
    outcome = question.outcome
    assert outcome is not None
    mark = ("✓ ", "bold green") if question.right else ("✗ ", "bold red")
    answer = outcome.text.strip() if outcome.error is None else outcome.error
    lines = Text.assemble(
        (f"{question.text}\n", "bold"),
        mark,
        (answer, "green" if question.right else "red"),
        (f"   expected {question.expected}", "dim"),
        (f"   {1000 * outcome.latency_s:.0f} ms", "dim"),
    )
    coloured = console.color_system is not None
    bars = timeline_table(question.spans or [], width=max(10, console.width - (_THUMBNAIL_COLUMNS * coloured) - 42))
    if not coloured:
        return Group(lines, bars)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(_thumbnail(Image.open(io.BytesIO(question.png)), _THUMBNAIL_COLUMNS), Group(lines, Text(), bars))
    return grid


def _conclude(console: Console, questions: list[Question], wall_s: float) -> int:
    outcomes = [question.outcome for question in questions if question.outcome is not None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    wrong = sum(not question.right for question in questions)
    console.print()
    console.print(summary(outcomes, wall_s), highlight=False)
    console.print(latency_table(outcomes))
    console.print(f"{len(questions) - wrong} of {len(questions)} answers right", style="bold")
    for outcome in failed:
        console.print(f"failed: {outcome.job.name}: {outcome.error}", style="red", markup=False)
    if not failed and wrong > WRONG_ALLOWED * len(questions):
        console.print("so many wrong answers mean that something is broken", style="red")
        return 1
    return int(bool(failed))


def _thumbnail(image: Image.Image, columns: int) -> Text:
    """Return the image over `columns` cells, each an upper half block: foreground for the upper pixel, background for
    the lower."""
    rows = max(1, round(columns * image.height / image.width / 2))
    small = image.convert("RGB").resize((columns, 2 * rows), Image.Resampling.LANCZOS)
    pixels = small.tobytes()

    def colour(x: int, y: int) -> Color:
        at = 3 * (y * columns + x)
        return Color.from_rgb(*pixels[at : at + 3])

    text = Text(no_wrap=True)
    for row in range(rows):
        for x in range(columns):
            text.append("▀", Style(color=colour(x, 2 * row), bgcolor=colour(x, 2 * row + 1)))
        text.append("\n")
    text.rstrip()
    return text
