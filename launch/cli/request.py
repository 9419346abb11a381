"""`triptych request`: sends requests in parallel, shows answers and times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from common.errors import invalid
from launch.cli.answers import AnswerView, latency_table, summary
from launch.cli.client import ApiClient, ClientOptions, ClientRequest, ClientResult, Media
from launch.cli.console import make_console

EXIT_INTERRUPTED = 130
MEDIA_TYPES = (
    {f".{kind}": f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp", "avif", "tiff")}
    | {f".{kind}": f"audio/{kind}" for kind in ("wav", "flac", "ogg", "aac", "aiff", "webm")}
    | {".jpg": "image/jpeg", ".tif": "image/tiff", ".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".opus": "audio/ogg"}
)


def load_media(path: Path) -> Media:
    """Return an image or audio file, known by the suffix.

    Raises TriptychError("invalid_request") where it is neither, or cannot be read.
    """
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type is None:
        known = " ".join(MEDIA_TYPES)
        raise invalid(f"{path}: neither a picture nor audio by its suffix; known: {known}")
    try:
        return Media(path.name, media_type, path.read_bytes())
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}") from error


def make_jobs(files: list[Path], prompt: str, *, together: bool) -> list[ClientRequest]:
    """Return a job for each file, a single job for all (`together`), or a job for the prompt alone.

    Raises TriptychError("invalid_request") where files and prompt make no request.
    """
    media = [load_media(path) for path in files]
    clips = [item.name for item in media if item.type.startswith("audio/")]
    if len(clips) < max(1, len(media)) and not prompt:
        raise invalid('nothing to ask: give --prompt "…"', "prompt")
    if not together:
        return [ClientRequest(item.name, prompt, (item,)) for item in media] or [ClientRequest("prompt", prompt)]
    if clips or not media:
        named = f"{clips[0]} is audio" if clips else "there is none"
        raise invalid(f"--together puts pictures into one request; {named}", "together")
    return [ClientRequest(" + ".join(item.name for item in media), prompt, tuple(media))]


def run_requests(
    files: list[Path],
    prompt: str,
    options: ClientOptions,
    *,
    parallel: int,
    repeat: int,
    live: bool,
    together: bool,
) -> int:
    """Send and print all requests; return 1 if a request failed, 130 after Ctrl-C, 0 otherwise.

    Raises TriptychError where nothing could be sent at all.
    """
    once = make_jobs(files, prompt, together=together)
    jobs = once if repeat == 1 else [replace(job, name=f"{job.name} #{n + 1}") for n in range(repeat) for job in once]
    return asyncio.run(_run(jobs, options, parallel, live=live))


async def _run(jobs: list[ClientRequest], options: ClientOptions, parallel: int, *, live: bool) -> int:
    console, outcomes, interrupted = make_console(), list[ClientResult](), False
    async with ApiClient(options) as client:
        model = await client.connect()
        began = time.perf_counter()
        with AnswerView(console, model, len(jobs), live=live) as view:
            try:

                def ended(key: int, outcome: ClientResult) -> None:
                    outcomes.append(outcome)
                    view.finish(key, outcome)

                await send_all(client, jobs, parallel, ended, view.grow)
            except asyncio.CancelledError:  # Ctrl-C: what has ended is still worth telling
                interrupted = True
    _report(console, outcomes, time.perf_counter() - began)
    if interrupted:
        console.print(f"interrupted: {len(jobs) - len(outcomes)} requests did not end", style="yellow")
        return EXIT_INTERRUPTED
    return int(any(outcome.error is not None for outcome in outcomes))


async def send_all(
    client: ApiClient,
    jobs: Sequence[ClientRequest],
    parallel: int,
    ended: Callable[[int, ClientResult], None],
    grown: Callable[[int, ClientRequest, str], None] = lambda _key, _job, _text: None,
) -> None:
    """Send the jobs in order, at most `parallel` at once. `ended` gets each number and outcome, `grown` the pieces of
    answers."""
    queue = iter(enumerate(jobs))

    async def send_next() -> None:
        for key, job in queue:
            ended(key, await client.send(job, partial(grown, key, job)))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, len(jobs))):
            group.create_task(send_next())


def _report(console: Console, outcomes: list[ClientResult], wall_s: float) -> None:
    if outcomes:
        console.print(summary(outcomes, wall_s), highlight=False)
    good = [outcome for outcome in outcomes if outcome.error is None]
    if len(good) > 1:
        console.print(latency_table(outcomes))
    elif good and good[0].ttft_s is not None:  # one has no percentiles
        console.print(f"first token after {1000 * good[0].ttft_s:.0f} ms", highlight=False)
    failed = [outcome for outcome in outcomes if outcome.error is not None and len(outcomes) > 1]
    if failed:  # the error of a single one stands above
        console.print(f"{len(failed)} failed:", style="bold red")
    for outcome in failed:
        console.print(f"  {outcome.job.name}: {outcome.error}", style="red", markup=False, highlight=False)
