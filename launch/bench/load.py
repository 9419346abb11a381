"""Loads: so many requests at once (closed loop), or requests at moments of their own (open loop); files made fresh."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from launch.cli.client import ApiClient, ClientRequest, ClientResult, Media
from launch.cli.request import send_all

OnEnd = Callable[[ClientResult], None]


@dataclass(frozen=True)
class Level:
    """One run of a benchmark: `concurrency` requests in flight at all times, or `rate` new requests per second.

    At a rate, gaps between requests are drawn from the exponential distribution (Poisson arrivals), or equal.
    """

    concurrency: int = 0
    rate: float = 0.0
    constant: bool = False

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} in flight"
        return f"{self.rate:g} requests/s{', evenly' if self.constant else ''}"

    def arrivals(self, count: int, rng: random.Random) -> list[float]:
        """Return the moments of the requests of an open loop, in seconds since the first."""
        gaps = (1 / self.rate if self.constant else rng.expovariate(self.rate) for _ in range(count - 1))
        moments = [0.0]
        for gap in gaps:
            moments.append(moments[-1] + gap)
        return moments


async def apply(level: Level, client: ApiClient, jobs: Sequence[ClientRequest], seed: int, on_end: OnEnd) -> float:
    """Send the jobs as the level says; `on_end` gets each result. Return the largest delay behind the schedule, in s.

    In an open loop no request waits for another: a slow server gets as many as a fast one.
    """
    if level.concurrency:
        await send_all(client, jobs, level.concurrency, lambda _key, result: on_end(result))
        return 0.0
    began_s, lags = time.perf_counter(), [0.0]

    async def send_at(moment_s: float, job: ClientRequest) -> None:
        await asyncio.sleep(began_s + moment_s - time.perf_counter())
        lags.append(time.perf_counter() - began_s - moment_s)
        on_end(await client.send(job))

    async with asyncio.TaskGroup() as group:
        for moment_s, job in zip(level.arrivals(len(jobs), random.Random(seed)), jobs, strict=True):
            group.create_task(send_at(moment_s, job))
    return max(lags)


def repeat_jobs(once: Sequence[ClientRequest], count: int, *, fresh: bool, seed: int) -> list[ClientRequest]:
    """Return `count` jobs, the given ones over and over; with `fresh` no two alike, so that no cache has an answer."""
    jobs = [once[number % len(once)] for number in range(count)]
    if not fresh:
        return jobs
    rng = random.Random(seed)
    return [_made_fresh(job, number, rng) for number, job in enumerate(jobs)]


def _made_fresh(job: ClientRequest, number: int, rng: random.Random) -> ClientRequest:
    media = tuple(_noisy(item, rng) for item in job.media)
    prompt = job.prompt if media else f"({rng.getrandbits(32):08x}) {job.prompt}"
    return replace(job, name=f"{job.name} #{number + 1}", media=media, prompt=prompt)


def _noisy(media: Media, rng: random.Random) -> Media:
    """Return a picture or recording with noise that nobody sees or hears, as PNG or FLAC."""
    noise, out = np.random.default_rng(rng.getrandbits(32)), io.BytesIO()
    if media.type.startswith("audio/"):
        import soundfile

        samples, rate = soundfile.read(io.BytesIO(media.data), dtype="float32")
        samples += 1e-4 * noise.standard_normal(samples.shape, dtype=np.float32)
        soundfile.write(out, samples, rate, format="FLAC", subtype="PCM_16")
        return Media(f"{media.name}.flac", "audio/flac", out.getvalue())
    from PIL import Image

    with Image.open(io.BytesIO(media.data)) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(np.int16)
    pixels += noise.integers(-1, 2, pixels.shape, dtype=np.int16)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "PNG", compress_level=1)
    return Media(f"{media.name}.png", "image/png", out.getvalue())
