"""Speech to text for recordings of any length: windows run in parallel, texts are joined in order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import fmean
from typing import Final

import msgspec

from common.messages import FinishReason, TokenLogprob
from common.sampling_params import MAX_LOGPROBS, SamplingParams, TimestampRules
from common.text import whisper_prompt
from common.text.prompts import ParsedPrompt, with_checkpoint_rules
from common.text.whisper_rules import Rules
from common.text.whisper_words import Word, aligned_words, alignment_request
from proxy.api.merge import merge_streams
from proxy.api.segments import Segment, split_at_timestamps
from proxy.dispatch.jobs import Job, MediaItem, make_slots, part_id
from proxy.dispatch.text_stream import Delta, TextStream, Usage
from proxy.media.audio import Window
from proxy.media.helper_process import shared
from proxy.media.voice import VoiceOptions
from proxy.server.limits import RequestTickets, Ticket
from proxy.server.request_context import RequestContext
from proxy.service import Service

PARALLEL_WINDOWS: Final = 8
"""Windows of a request under way at once: an hour of speech must not crowd out other requests."""


@dataclass(frozen=True)
class SpeechOptions:
    """Options of a transcription.

    `language` is detected by default; `prompt` is a hint for the first window, `token_ids` its decoder prompt as given;
    `token_limit` counts per window, beside the limit of the decoder, `total_limit` for all; `timestamps` divide windows
    into segments; `details` add the model's confidence. `rules` silence windows without speech, and read bad ones
    again; with `live` text is sent as it comes, and only silence is held back. `voice` leaves out what is no speech;
    `words` are told with their times.
    """

    language: str | None = None
    prompt: str | None = None
    task: whisper_prompt.Task = "transcribe"
    timestamps: bool = False
    token_ids: list[int] | None = None
    details: bool = False
    token_limit: int | None = None
    total_limit: int | None = None
    priority: int = 0
    rules: Rules | None = None
    live: bool = False
    voice: VoiceOptions | None = None
    words: bool = False


@dataclass
class _Window:
    """Result of a window."""

    start_s: float
    end_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    no_speech_prob: float | None = None
    temperature: float = 0.0
    words: list[Word] = field(default_factory=list)

    @property
    def avg_logprob(self) -> float | None:
        """Log-probability per token, the end included; as in Whisper, the same for all segments of the window."""
        if not self.logprobs:
            return None
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


@dataclass(eq=False, repr=False)
class Speech:
    """Transcription of a recording. After the end of `deltas`, all other results are complete."""

    _service: Service
    _context: RequestContext
    _tickets: RequestTickets
    _item: MediaItem
    _sampling: SamplingParams
    _options: SpeechOptions
    usage: Usage = field(default_factory=Usage)
    job: Job = field(init=False)
    """The first window's, set before the first delta; a recording without speech may have no window."""
    language: str | None = None
    _under_way: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL_WINDOWS))
    _next: asyncio.Lock = field(default_factory=asyncio.Lock)
    _language_known: asyncio.Event = field(default_factory=asyncio.Event)
    _windows: list[_Window] = field(default_factory=list)
    duration_s: float = 0.0
    _is_whole: bool = False  # the recording is the only window
    _stopped: bool = False  # the window read last ended by a stop string or a stop token

    @property
    def text(self) -> str:
        return "".join(window.text for window in self._windows).strip()

    @property
    def token_ids(self) -> list[int]:
        return [token for window in self._windows for token in window.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for window in self._windows for entry in window.logprobs]

    @property
    def words(self) -> list[Word]:
        return [word for window in self._windows for word in window.words]

    def segments(self) -> list[Segment]:
        """Return segments by timestamps, or a segment per window."""
        found: list[Segment] = []
        rules = self._rules
        for window in self._windows:
            times = (window.start_s, window.end_s)
            for segment in split_at_timestamps(window.token_ids, rules, times, self._service.text.decode):
                segment = replace(segment, temperature=window.temperature)
                if self._options.details:
                    segment = replace(segment, avg_logprob=window.avg_logprob, no_speech_prob=window.no_speech_prob)
                found.append(segment)
        return found

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield the text in order; only the last delta has a finish reason, "length" if any window was cut short.

        Without a given language the first window decides for all.
        Raises TriptychError as AudioWindows.split and JobRunner do.
        """
        with ExitStack() as held:
            self._context.held.reserve(len(self._item.data))
            path = held.enter_context(shared(self._item.data))
            window_s = float(self._service.info.preprocessor.get("chunk_length", 30))
            recordings, options = self._service.recordings, self._options
            windows, self.duration_s = await recordings.split(path, window_s, self._item.param, options.voice)
            if [(one.start_s, one.end_s) for one in windows] == [(0.0, self.duration_s)]:
                self._is_whole = True
                held.close()  # the recording goes to the encoder unchanged
                self._context.held.release(len(self._item.data))
            else:
                largest = sorted(window.size_bytes for window in windows)[-PARALLEL_WINDOWS:]
                self._context.held.reserve(sum(largest))
            language = options.language
            if language is not None or not whisper_prompt.is_multilingual(self._service.info):
                self.language = whisper_prompt.language_code(language) if language else "en"
                self._language_known.set()
            self._windows = [_Window(window.start_s, window.end_s) for window in windows]
            limit, stops = options.total_limit or math.inf, self._sampling.stop or self._sampling.stop_token_ids
            if stops or limit < len(windows) * self._service.max_model_len:
                texts = self._in_turn(windows, path)
            else:
                texts = merge_streams([self._transcribe(*one, path) for one in enumerate(windows)], in_order=True)
            finish: FinishReason = "stop"
            begun = False
            token_ids, logprobs, scores = list[int](), list[TokenLogprob](), list[float]()
            async with aclosing(texts) as deltas:
                async for index, delta in deltas:
                    text = delta.text if begun else delta.text.lstrip()
                    self._windows[index].text += text
                    token_ids += delta.token_ids
                    logprobs += delta.logprobs
                    if text:  # tokens that make no text are told with the next text, or with the end
                        begun = True
                        yield Delta(text, None, tuple(token_ids), logprobs=tuple(logprobs))
                        token_ids, logprobs = [], []
                    if delta.finish_reason is not None:
                        scores += [] if delta.score is None else [delta.score]
                        finish = "length" if delta.finish_reason == "length" else finish
            score = fmean(scores) if scores else None
            yield Delta("", finish, tuple(token_ids), logprobs=tuple(logprobs), score=score)

    async def _in_turn(self, windows: list[Window], path: str) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield the text of one window after another, up to a stop string, a stop token or the limit of all tokens."""
        limit = self._options.total_limit
        for index, window in enumerate(windows):
            if limit is not None:
                left = limit - self.usage.completion_tokens
                if left <= 0:
                    yield index, Delta("", "length")
                    return
                self._options = replace(self._options, token_limit=left)
            async with aclosing(self._transcribe(index, window, path)) as deltas:
                async for delta in deltas:
                    yield index, delta
            if self._stopped:
                return

    async def _transcribe(self, index: int, window: Window, path: str) -> AsyncGenerator[Delta]:
        """Yield the text of a window, once its turn has come."""
        if index > 0:
            await self._language_known.wait()
        async with self._under_way:
            line = self._tickets.line
            async with self._next:  # one window may always wait, more only while the queue is short
                while self._tickets.num_waiting and not line.has_room:
                    await line.moves()
                ticket = self._tickets.acquire()
            item = await self._part(window, path)
            rules, readings = self._options.rules, list[tuple[tuple[bool, float], _Window, list[Delta]]]()
            for attempt, temperature in enumerate(self._temperatures):
                ticket = ticket if attempt == 0 else self._tickets.acquire()
                generation = self._generation(index, attempt, temperature, item, ticket)
                held = list[Delta]()
                async with aclosing(generation.deltas()) as deltas:
                    async for delta in deltas:
                        if self._must_wait(generation):
                            held.append(delta)
                        else:
                            yield delta
                self.usage.add(generation.usage)
                self._stopped = generation.is_stopped
                result = self._windows[index] = replace(
                    self._windows[index],
                    temperature=generation.job.sampling.temperature,
                    token_ids=generation.text_token_ids,
                    logprobs=generation.sequences[0].logprobs[len(generation.job.sampling.prefix_allowed) :],
                    no_speech_prob=self._no_speech_prob(generation) if self._wants_probabilities else None,
                )
                if rules is None or not held:
                    break
                if rules.is_silence(result.no_speech_prob, result.avg_logprob):
                    result.token_ids, result.logprobs, held = [], [], [Delta("", "stop")]
                    break
                quality = rules.quality("".join(delta.text for delta in held), result.avg_logprob)
                if quality >= (True, rules.log_prob_threshold):
                    break
                readings.append((quality, result, held))
            else:  # all are bad; the best one, as in faster-whisper
                _, self._windows[index], held = max(readings, key=itemgetter(0))
            if self._options.words and self._windows[index].token_ids:
                self._windows[index].words = await self._align(index, item)
            for delta in held:
                yield delta

    async def _align(self, index: int, item: MediaItem) -> list[Word]:
        """Return when the words of a window were spoken, by a second pass over its text."""
        service, result = self._service, self._windows[index]
        prompt_ids, sampling = alignment_request(
            service.info,
            service.text,
            result.token_ids,
            language=self.language,
            task=self._options.task,
            duration_s=result.end_s - result.start_s,
        )
        request_id = part_id(self._context.id, index) + ".words"
        job = Job(request_id, prompt_ids, sampling, make_slots([item], None), [item], self._options.priority)
        generation = service.generate(job, self._context, self._tickets.acquire())
        async with aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass
        logprobs = generation.prompt_logprobs
        return aligned_words(prompt_ids, sampling, logprobs, service.text, self.language, result.start_s)

    def _must_wait(self, generation: TextStream) -> bool:
        """Note the language, if unknown. Return whether the text just read waits for the rules."""
        if not self._language_known.is_set():
            first = generation.sequences[0].token_ids
            self.language = whisper_prompt.detected_language(self._service.info, first)
            self._language_known.set()
        rules = self._options.rules
        if rules is not None and self._options.live:
            return rules.is_silence(self._no_speech_prob(generation), None)
        return rules is not None

    async def _part(self, window: Window, path: str) -> MediaItem:
        item = self._item
        if self._is_whole:
            return item
        part = await self._service.recordings.cut(path, window, item.param)
        return await asyncio.to_thread(MediaItem.of, "audio", part, item.param)

    @property
    def _temperatures(self) -> tuple[float | None, ...]:
        """Temperatures of the attempts at a window; None for the request's own. What is sent cannot be read again."""
        rules = self._options.rules
        return (None,) if rules is None or self._options.live else (None, *rules.temperatures[1:])

    @property
    def _wants_probabilities(self) -> bool:
        return self._options.details or self._options.rules is not None

    def _generation(
        self, index: int, attempt: int, temperature: float | None, item: MediaItem, ticket: Ticket
    ) -> TextStream:
        info, text, options = self._service.info, self._service.text, self._options
        prompt_ids, fields = whisper_prompt.build(
            info,
            text,
            language=self.language,
            task=options.task,
            prompt=options.prompt if index == 0 else None,
            timestamps=self._rules is not None,
            token_ids=options.token_ids if index == 0 else None,
        )
        if options.token_limit is not None:  # the forced prefix does not count as the answer's
            fields["max_tokens"] = min(fields["max_tokens"], options.token_limit + len(fields["prefix_allowed"]))
        if self._wants_probabilities:
            # The token after <|startoftranscript|> tells speech from silence: with a known language a token of the
            # prompt, else the first generated token.
            is_generated = prompt_ids[-1] == whisper_prompt.start_token_id(info)
            fields |= {"logprobs": MAX_LOGPROBS} if is_generated else {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS}
        if temperature is not None:
            fields |= {"temperature": temperature, "seed": self._sampling.seed or 0}
        request_id = self._context.id if self._is_whole else part_id(self._context.id, index)
        if attempt:
            request_id = part_id(request_id, attempt)
        told = msgspec.structs.replace(self._sampling, **fields)
        sampling = with_checkpoint_rules(info, told, ParsedPrompt(prompt_ids))
        slots, heard = make_slots([item], None), info.max_encoder_tokens
        job = Job(request_id, prompt_ids, sampling, slots, [item], options.priority, num_encoder_prompt_tokens=heard)
        if index == 0 and attempt == 0:
            self.job = job
        return self._service.generate(job, self._context, ticket)

    def _no_speech_prob(self, generation: TextStream) -> float | None:
        """Return the probability of silence; 0 outside of the likeliest MAX_LOGPROBS tokens."""
        info, text = self._service.info, self._service.text
        prompt = generation.job.prompt_token_ids
        place = prompt.index(whisper_prompt.start_token_id(info)) + 1
        first = generation.sequences[0].logprobs[:1]
        known = generation.prompt_logprobs[place : place + 1] if place < len(prompt) else first
        entry = known[0] if known else None
        token = whisper_prompt.no_speech_token_id(info, text)
        if entry is None or token is None:
            return None
        return math.exp(dict([*entry.top, (entry.token_id, entry.logprob)]).get(token, -math.inf))

    @property
    def _rules(self) -> TimestampRules | None:
        if not self._options.timestamps:
            return None
        return whisper_prompt.timestamp_rules(self._service.info, self._service.text)
