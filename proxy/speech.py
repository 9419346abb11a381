"""Speech to text for a recording of any length: its windows run side by side, their texts are joined in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common import whisper_prompt
from common.sampling_params import SamplingParams
from proxy import audio
from proxy.exchange import Exchange
from proxy.generation import Delta, Finish, Generation, Usage
from proxy.jobs import Job, MediaItem, make_slots, part_id
from proxy.merge import merge
from proxy.service import Service

PARALLEL_WINDOWS: Final = 8
"""Windows of one request under way at once: an hour of speech must not crowd out everybody else."""


@dataclass
class Segment:
    """The text of one window, and when it was spoken."""

    start_s: float
    end_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


class Speech:
    """Transcribes one clip. After `deltas` has ended, `segments`, `language` and `duration_s` are complete."""

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        item: MediaItem,
        sampling: SamplingParams,
        token_limit: int | None,
        priority: int = 0,
    ) -> None:
        """`token_limit` holds for each window, on top of what the model's decoder can hold."""
        self._service = service
        self._exchange = exchange
        self._item = item
        self._sampling = sampling
        self._token_limit = token_limit
        self._priority = priority
        self._places = asyncio.Semaphore(PARALLEL_WINDOWS)
        self._language_known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.usage = Usage()
        self.segments: list[Segment] = []
        self.language: str | None = None

    @property
    def duration_s(self) -> float:
        return self.segments[-1].end_s if self.segments else 0.0

    async def deltas(self, language: str | None, prompt: str | None) -> AsyncGenerator[Delta]:
        """The text in order; the finish reason is on the last delta only: "length" if any window was cut short.

        Where the language is not given, the first window decides for all. `prompt` is a hint for the first window.
        Raises TriptychError as audio.split and Flight do.
        """
        if language is not None or not whisper_prompt.is_multilingual(self._service.info):
            self.language = language or "en"
            self._language_known.set_result(None)
        window_s = float(self._service.info.preprocessor.get("chunk_length", 30))
        windows = await self._service.in_thread(audio.split, self._item.data, window_s, self._item.param)
        self.segments = [Segment(window.start_s, window.end_s) for window in windows]
        parts = [self._window(index, window, len(windows), prompt) for index, window in enumerate(windows)]
        finish: Finish = "stop"
        begun = False
        untold: tuple[int, ...] = ()
        async with aclosing(_in_order(merge(parts), len(parts))) as ordered:
            async for index, delta in ordered:
                text = delta.text if begun else delta.text.lstrip()
                begun = begun or bool(text)
                self.segments[index].text += text
                untold += delta.token_ids
                if delta.finish_reason == "length":
                    finish = "length"
                if text:
                    yield Delta(text, token_ids=untold)
                    untold = ()
        yield Delta("", finish, untold)

    async def _window(
        self, index: int, window: audio.Window, num_windows: int, prompt: str | None
    ) -> AsyncGenerator[Delta]:
        if index > 0:
            await asyncio.shield(self._language_known)
        async with self._places:
            generation = await self._generation(index, window, num_windows, prompt if index == 0 else None)
            try:
                async with aclosing(self._service.deltas(generation, self._exchange)) as deltas:
                    async for delta in deltas:
                        self._note_language(generation)
                        yield delta
            finally:
                self.usage.add(generation.usage)
                self.segments[index].token_ids = generation.text_token_ids

    async def _generation(self, index: int, window: audio.Window, num_windows: int, prompt: str | None) -> Generation:
        info, text = self._service.info, self._service.text
        prompt_ids, fields = whisper_prompt.build(info, text, language=self.language, prompt=prompt)
        if self._token_limit is not None:  # the forced prefix does not count as the answer's
            fields["max_tokens"] = min(fields["max_tokens"], self._token_limit + len(fields["prefix_allowed"]))
        item, request_id = self._item, self._exchange.id
        if num_windows > 1:
            item = await self._service.in_thread(_cut_item, item, window)
            request_id = part_id(request_id, index)
        sampling = msgspec.structs.replace(self._sampling, **fields)
        job = Job(request_id, prompt_ids, sampling, make_slots([item], None), [item], self._priority)
        return self._service.generation(job, self._exchange)

    def _note_language(self, generation: Generation) -> None:
        if not self._language_known.done():
            self.language = whisper_prompt.detected_language(self._service.info, generation.token_ids)
            self._language_known.set_result(None)


def _cut_item(item: MediaItem, window: audio.Window) -> MediaItem:
    return MediaItem.of("audio", audio.cut(item.data, window, item.param), item.param)


async def _in_order(merged: AsyncGenerator[tuple[int, Delta]], num_parts: int) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of part 0 as they come, those of later parts once everything before them is complete."""
    waiting: list[list[Delta]] = [[] for _ in range(num_parts)]
    current = 0
    async with aclosing(merged):
        async for index, delta in merged:
            waiting[index].append(delta)
            while current < num_parts and waiting[current]:
                next_delta = waiting[current].pop(0)
                yield current, next_delta
                if next_delta.finish_reason is not None:
                    current += 1
