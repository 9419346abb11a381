"""`LLM`: the whole engine in a single process, offline, and the reference for every cluster.

llm = LLM("signpost")
[out] = llm.chat([{"role": "user", "content": [{"type": "image", "image": "sign.png"},
                                              {"type": "text", "text": "What does the sign say?"}]}])
print(out.outputs[0].text)
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from PIL import Image
from pydantic import ValidationError

from common.config import EngineConfig, GenerationConfigSource, explain
from common.errors import ErrorInfo, TriptychError, invalid, words_of
from common.hashing import content_hash
from common.messages import (
    Failed,
    FinishReason,
    Generate,
    Grant,
    InputNeeded,
    InputSlot,
    MediaKind,
    Offer,
    Span,
    TokenLogprob,
    Tokens,
)
from common.model_info import load_model_info
from common.sampling_params import SamplingParams
from common.text import whisper_prompt
from common.text.processor import Detokenizer, TextProcessor
from common.text.prompts import (
    ExplicitEncoderDecoderPrompt,
    ParsedPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    encode_tokens,
    is_single,
    join_media,
    parse_prompt,
    with_checkpoint_rules,
)
from common.text.token_text import bad_words_ids
from common.text.whisper_words import FRAME_S, Word, aligned_words, alignment_request
from engine import processors
from engine.core.decoder_engine import DecoderEngine
from engine.core.encoder_engine import EncoderEngine
from engine.device.memory import ENCODER_SHARE
from engine.media.image import to_rgb
from engine.state.events import Event

__all__ = [
    "LLM",
    "CompletionOutput",
    "ExplicitEncoderDecoderPrompt",
    "Prompt",
    "RequestOutput",
    "TextPrompt",
    "TokensPrompt",
]

FAR_FUTURE_S = 1e12
STAGED_BYTES = 128 * 2**20
"""Limit of a request's preprocessed inputs that wait for grants: a long video has gigabytes of them in all."""


@dataclass(frozen=True)
class CompletionOutput:
    """A generated sequence. `logprobs` are per token if requested; `score` is a beam's. `prefix_token_ids` were
    generated before it and belong to the prompt: the language that Whisper detects."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] = field(default_factory=list)
    score: float | None = None
    prefix_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request with its sequences in index order.

    `num_prompt_tokens` counts the media too, `num_cached_tokens` those found in the prefix cache; `prompt_token_ids`
    has one placeholder per media item, of a video one per piece. Of an encoder-decoder model it is the decoder prompt
    as it was processed, and the encoder prompt stands beside it; texts are None where none was given. `words` have
    times, where `transcribe` was asked for these.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_prompt_tokens: int
    outputs: list[CompletionOutput]
    spans: list[Span]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt: str | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    words: list[Word] = field(default_factory=list)


@dataclass
class _LiveSequence:
    """A growing sequence. After a stop string, tokens of the running step are discarded."""

    detokenizer: Detokenizer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output: CompletionOutput | None = None


@dataclass
class _Live:
    prompt: ParsedPrompt
    media: list[tuple[MediaKind, bytes]]
    sampling: SamplingParams
    continues: bool
    sequences: dict[int, _LiveSequence] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    processed: dict[int, processors.ProcessedInput] = field(default_factory=dict)  # offered, not granted yet
    unoffered: deque[int] = field(default_factory=deque)


class LLM:
    """A model, offline. Options are the fields of `EngineConfig`, such as `kv_cache_bytes` or `dtype`.

    `chat_template`, a file or Jinja, takes the place of the model's own. Prompts without parameters are sampled as
    generation_config.json says, unless `generation_config` is "none". `lora_modules` are folders of LoRA adapters by
    name; `SamplingParams.adapter` chooses one.
    Raises TriptychError where the model cannot be served, or an option is unknown or wrong.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | Path | None = None,
        generation_config: GenerationConfigSource = "auto",
        lora_modules: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        self.info = load_model_info(str(model), [f"{name}={path}" for name, path in (lora_modules or {}).items()])
        self._sampling_defaults = self.info.sampling_defaults(generation_config)
        # Whoever hands over a batch waits for all of it: its size overloads nothing, and no prompt disturbs a stream.
        try:
            self.config = EngineConfig(**{"max_waiting": sys.maxsize, "itl_objective_ms": 0, **options})
        except ValidationError as error:
            raise invalid(explain(error, EngineConfig, options)) from error
        self.text = TextProcessor(self.info, None if chat_template is None else str(chat_template))
        # The encoder first: the decoder's pools take what is left. And in one process nobody gets lost: grants do not
        # run out, however slow the encoder is.
        self.encoder: EncoderEngine | None = None
        if self.info.media_kind:
            self.encoder = EncoderEngine(self.info, self.config, "llm", memory_share=ENCODER_SHARE)
        beside = self.encoder.taken_bytes if self.encoder is not None else 0
        self.decoder = DecoderEngine(self.info, self.config, "llm", lease_s=math.inf, beside_bytes=beside)
        if self.encoder is not None:
            dtype = str(self.decoder.runner.dtype).removeprefix("torch.")
            self._preprocess = processors.Preprocessor(self.info, dtype)
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()
        self._outputs: dict[str, RequestOutput] = {}  # finished, not returned yet
        self._errors: dict[str, TriptychError] = {}  # failed, not raised yet

    # --- whole batches

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_prompts: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; return outputs in prompt order. Raises the TriptychError of the first failure.

        With `return_prompts` the outputs have the texts of all prompts as processed, special tokens included.
        """
        many = [cast(Prompt, prompts)] if is_single(prompts) else cast(list[Prompt], list(prompts))
        request_ids = self._add_all(many, self._params_for(sampling_params, len(many)))
        return self._run(request_ids, return_prompts=return_prompts)

    def chat(
        self,
        conversations: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_prompts: bool = False,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of messages) or several.

        Parts {"type": "image", "image": ...} and those of the types "audio" and "video" are media. A video is given as
        bytes, a path, its frames, or (frames, frames per second). Prompts are made and returned as
        `TextProcessor.render_chat` and `generate` do.
        """
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        params = self._params_for(sampling_params, len(conversations))
        render = partial(
            self.text.render_chat,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = [_chat_prompt(messages, render) for messages in conversations]
        request_ids = self._add_all(prompts, params, continues=continue_final_message)
        return self._run(request_ids, return_prompts=return_prompts)

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        prompt: str | None = None,
        timestamps: bool = False,
        decoder_prompt: str | list[int] | None = None,
        words: bool = False,
        return_prompts: bool = False,
    ) -> RequestOutput:
        """Transcribe audio of at most a window (30 s) with a Whisper model.

        With `words`, a second pass tells when each word was spoken. With `timestamps`, `token_ids` have a timestamp at
        both ends of each segment. A `decoder_prompt` takes the place of language, prompt and timestamps, and is checked
        as `whisper_prompt.options` says. Prompts are returned as `generate` does.
        """
        if not (self.info.is_encoder_decoder and self.info.media_kind == "audio"):
            raise invalid(f"{self.info.name} is no speech model: give clips to LLM.chat", "model")
        options = whisper_prompt.options(
            self.info, self.text, decoder_prompt=decoder_prompt, language=language, prompt=prompt, timestamps=timestamps
        )
        token_ids, rules = whisper_prompt.build(self.info, self.text, **options)
        params = SamplingParams(**{**self._sampling_defaults, "temperature": 0.0, **rules})
        request_id = self.add({"prompt_token_ids": token_ids, "multi_modal_data": {"audio": audio}}, params)
        output = self._run([request_id], return_prompts=return_prompts)[0]
        return replace(output, words=self._words(audio, output, options)) if words else output

    def _words(self, audio: Any, output: RequestOutput, options: dict[str, Any]) -> list[Word]:
        """Return when the words of a transcript were spoken."""
        from engine.media.audio import decode_audio

        rate = int(self.info.preprocessor.get("sampling_rate", 16000))
        duration_s = len(decode_audio(_media_bytes(audio), rate, self.info.max_encoder_tokens * FRAME_S)) / rate
        [said], spoken = output.outputs, options["language"]
        detected = whisper_prompt.detected_language(self.info, said.prefix_token_ids)
        language = whisper_prompt.language_code(spoken) if spoken else detected
        ids, sampling = alignment_request(
            self.info, self.text, said.token_ids, language=language, task=options["task"], duration_s=duration_s
        )
        prompt: TokensPrompt = {"prompt_token_ids": ids, "multi_modal_data": {"audio": audio}}
        [answer] = self._run([self.add(prompt, sampling)])
        return aligned_words(ids, sampling, answer.prompt_logprobs, self.text, language, 0.0)

    def _add_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, continues: bool = True
    ) -> list[str]:
        """Queue all prompts, or none."""
        request_ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_ids.append(self.add(prompt, one, continues=continues))
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        return request_ids

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of prompts without any: generation_config.json over greedy search, 256 tokens."""
        return SamplingParams(**{"temperature": 0.0, "max_tokens": 256, **self._sampling_defaults})

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise invalid(f"{count} prompts with {len(params)} sampling parameters", "sampling_params")
        return list(params)

    def _with_texts(self, output: RequestOutput) -> RequestOutput:
        decode, encoder_ids = partial(self.text.decode, skip_special_tokens=False), output.encoder_prompt_token_ids
        encoder_prompt = None if encoder_ids is None else decode(encoder_ids)
        return replace(output, prompt=decode(output.prompt_token_ids), encoder_prompt=encoder_prompt)

    def _run(self, request_ids: list[str], *, return_prompts: bool = False) -> list[RequestOutput]:
        own = set(request_ids)
        try:
            while not own <= self._outputs.keys():
                self._step()
                for request_id, error in self._errors.items():
                    if request_id in own:
                        raise error
            outputs = [self._outputs[request_id] for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self.abort(request_id)
                self._outputs.pop(request_id, None)
                self._errors.pop(request_id, None)
        return [self._with_texts(output) for output in outputs] if return_prompts else outputs

    # --- one at a time

    def add(self, prompt: Prompt, params: SamplingParams, priority: int = 0, *, continues: bool = True) -> str:
        """Queue a prompt and return its request id; lower `priority` goes first.

        The output continues the text of a prompt, with the blank between both, or starts a new text, as in a chat.
        Raises TriptychError for what is wrong with its media.
        """
        parsed, media = self._parse(prompt)
        token_ids = parsed.prompt_token_ids
        if params.bad_words:
            ids = bad_words_ids(self.text, params.bad_words)
            params = msgspec.structs.replace(params, bad_words_ids=(*params.bad_words_ids, *ids))
        params = with_checkpoint_rules(self.info, params, parsed)
        request_id = f"llm-{next(self._ids)}"
        if self.info.is_encoder_decoder:
            indices: list[int | None] = [None] * len(media)
        else:
            indices = [*self.text.placeholder_indices(token_ids, len(media))]
        slots = [
            InputSlot(number, kind, content_hash(kind, data), index)
            for number, ((kind, data), index) in enumerate(zip(media, indices, strict=True))
        ]
        live = self._live[request_id] = _Live(parsed, media, params, continues and not self.info.is_encoder_decoder)
        live.unoffered.extend(slot.input_id for slot in slots)
        try:
            self.decoder.add_request(Generate(request_id, token_ids, slots, params, priority))
            self._offer_some(request_id, live)
        except BaseException:
            self.abort(request_id)
            raise
        return request_id

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are fine."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self.decoder.abort(request_id)
        if self.encoder is not None:
            for input_id, attempt in live.attempts.items():
                self.encoder.cancel((request_id, input_id, attempt))

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all earlier prompts. Raises TriptychError while requests run."""
        if self._live:
            raise invalid(f"requests run ({len(self._live)}): the cache holds what they read")
        self.decoder.blocks.reset()

    def step(self) -> list[RequestOutput]:
        """Run a step of each engine; return finished requests.

        Raises the TriptychError of a request that failed, of several one a step; they are gone then, the others go on
        with the next step.
        """
        self._step()
        if self._errors:
            raise self._errors.pop(next(iter(self._errors)))
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())

    def _step(self) -> None:
        for event in self.decoder.step():
            try:
                self._handle(event)
            except TriptychError as error:
                self._fail(event.request_id, error)
        if self.encoder is not None and self.encoder.has_work():
            for result in self.encoder.step():
                if result.tensor is not None:
                    self.decoder.deliver(*result.key, result.tensor)
                else:
                    message = f"the encoder failed: {result.error}"
                    self._fail(result.key[0], TriptychError("internal_error", message))

    def _fail(self, request_id: str, error: TriptychError) -> None:
        if request_id in self._live:
            self._errors[request_id] = error
            self.abort(request_id)

    def _parse(self, prompt: Prompt) -> tuple[ParsedPrompt, list[tuple[MediaKind, bytes]]]:
        parsed = parse_prompt(prompt, self.info, self.text)
        kinds, media = self.info.media_kinds, dict[str, list[list[bytes]]]()
        for given, items in parsed.multi_modal_data.items():
            many = items if isinstance(items, list) else [items]
            if many and given not in kinds:
                raise TriptychError("invalid_request", f"{self.info.name} takes no {given}", "multi_modal_data")
            media[given] = [self._video_pieces(item) if given == "video" else [_media_bytes(item)] for item in many]
        if (ids := parsed.encoder_prompt_token_ids) is not None:
            joined = [join_media(ids, item) for items in media.values() for [item] in items]
            return parsed, [(kinds[0], item) for item in joined or [encode_tokens(ids)]]
        if len(kinds) < 2:
            return parsed, [(kinds[0], item) for items in media.values() for [item] in items]
        return self._in_order(parsed, media)

    def _in_order(
        self, parsed: ParsedPrompt, media: Mapping[str, list[list[bytes]]]
    ) -> tuple[ParsedPrompt, list[tuple[MediaKind, bytes]]]:
        """Return media of several kinds in the order of their placeholders, of a video one for each piece."""
        from common.media import videos  # imports PyAV

        texts = [videos.prompt_text(pieces[0]) for pieces in media.get("video", ())]
        ids = self.text.write_videos(parsed.prompt_token_ids, texts)
        self.text.placeholder_indices(ids, sum(map(len, media.values())))
        kinds = [self.info.placeholders[token] for token in ids if token in self.info.placeholders]
        for kind in self.info.media_kinds:
            if kinds.count(kind) != len(media.get(kind, ())):
                message = f"the prompt has {kinds.count(kind)} placeholders of {kind}, for {len(media.get(kind, ()))}"
                raise invalid(message, "multi_modal_data")
        remaining = {kind: iter(items) for kind, items in media.items()}
        items = [(kind, next(remaining[kind])) for kind in kinds]
        ids = self.text.repeat_placeholders(ids, [len(pieces) for _, pieces in items])
        return replace(parsed, prompt_token_ids=ids), [(kind, piece) for kind, pieces in items for piece in pieces]

    def _video_pieces(self, item: Any) -> list[bytes]:
        """Return the pieces of a video given as bytes, a path, frames, or (frames, frames per second)."""
        from common.media import video_rules, videos  # imports PyAV

        rules = video_rules.read_rules(self.info)
        if isinstance(item, bytes | str | Path):
            limits = videos.VideoLimits(max_tokens=self.decoder.runner.max_model_len)
            return videos.cut(item if isinstance(item, bytes) else str(item), rules, limits, "the video")
        try:
            frames, fps = item if isinstance(item, tuple) else (item, rules.fps or 2.0)
            images = [one if isinstance(one, Image.Image) else Image.fromarray(np.asarray(one)) for one in frames]
            is_good = len({image.size for image in images}) == 1 and 0 < fps < math.inf
        except Exception as error:  # as for `_media_bytes`
            kinds = "a video is bytes, a path, frames (PIL images or arrays of uint8), or (frames, frames per second)"
            message = f"{kinds}; this {type(item).__name__} cannot be read: {words_of(error)}"
            raise TriptychError("bad_media", message) from error
        if not is_good:
            raise TriptychError("bad_media", "a video's frames have one size and a rate, and there is one at least")
        return videos.of_frames([_media_bytes(image) for image in images], images[0].size, fps, rules)

    def _offer_some(self, request_id: str, live: _Live) -> None:
        """Preprocess and offer the next inputs, up to STAGED_BYTES; the others follow after grants."""
        while live.unoffered and sum(item.array_bytes for item in live.processed.values()) < STAGED_BYTES:
            self._offer(request_id, live.unoffered.popleft())

    def _offer(self, request_id: str, input_id: int) -> None:
        """Preprocess an input and offer the result to the decoder, as an encoder worker would."""
        live = self._live[request_id]
        kind, data = live.media[input_id]
        attempt = live.attempts[input_id] = live.attempts.get(input_id, -1) + 1
        item = live.processed[input_id] = self._preprocess(kind, data)
        digest, shape = content_hash(kind, data), list(item.shape)
        of_item = digest, kind, shape, item.dtype, item.size_bytes, item.layout
        self.decoder.offer(Offer(request_id, input_id, attempt, *of_item, sender="", deadline_s=FAR_FUTURE_S))

    def _handle(self, event: Event) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        match event:
            case Grant(status="granted"):
                assert self.encoder is not None
                item = live.processed.pop(event.input_id)
                self.encoder.submit((event.request_id, event.input_id, event.attempt), item)
                self._offer_some(event.request_id, live)
            case Grant(status="cached"):
                live.processed.pop(event.input_id, None)
                self._offer_some(event.request_id, live)
            case InputNeeded():
                if self.encoder is not None:
                    self.encoder.cancel((event.request_id, event.input_id, live.attempts[event.input_id]))
                self._offer(event.request_id, event.input_id)
            case Failed(error=ErrorInfo() as error) | Grant(error=ErrorInfo() as error):
                raise TriptychError(error.code, error.message, error.param)
            case Tokens():
                self._receive_tokens(live, event)

    def _receive_tokens(self, live: _Live, event: Tokens) -> None:
        live.prompt_logprobs += event.prompt_logprobs
        sequence = live.sequences.get(event.index)
        if sequence is None:
            stop, least = live.sampling.stop, live.sampling.min_tokens
            before = live.prompt.prompt_token_ids if live.continues else ()
            detokenizer = Detokenizer(self.text, stop, min_tokens=least, prompt=before)
            sequence = live.sequences[event.index] = _LiveSequence(detokenizer)
        if sequence.output is None:
            self._grow(event, live, sequence)
        ended = sum(one.output is not None for one in live.sequences.values())
        if event.done or ended == live.sampling.n:
            self._finish(event, live)

    def _grow(self, event: Tokens, live: _Live, sequence: _LiveSequence) -> None:
        reason, num_forced = event.finish_reason, len(live.sampling.prefix_allowed)
        begin = max(0, num_forced - len(sequence.token_ids))
        shown = event.token_ids[begin : -1 if reason == "stop" else None]  # without the token that ended it
        sequence.text += sequence.detokenizer.push(shown, final=reason is not None)
        sequence.token_ids += event.token_ids
        sequence.logprobs += event.logprobs
        end = None
        if sequence.detokenizer.stopped:
            reason, end = "stop", num_forced + sequence.detokenizer.num_tokens
            self.decoder.stop_sequence(event.request_id, event.index)
        if reason is not None:
            sequence.output = CompletionOutput(
                event.index,
                sequence.text,
                sequence.token_ids[num_forced:end],
                reason,
                sequence.logprobs[num_forced:end],
                event.score,
                sequence.token_ids[:num_forced],
            )

    def _finish(self, event: Tokens, live: _Live) -> None:
        self.abort(event.request_id)
        outputs = [one.output for _, one in sorted(live.sequences.items()) if one.output is not None]
        prompt = live.prompt
        self._outputs[event.request_id] = RequestOutput(
            event.request_id,
            prompt.prompt_token_ids,
            event.num_prompt_tokens,
            outputs,
            event.spans,
            event.num_cached_tokens,
            live.prompt_logprobs,
            prompt.prompt,
            prompt.encoder_prompt,
            prompt.encoder_prompt_token_ids,
        )


def _chat_prompt(
    messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], list[int]]
) -> TokensPrompt:
    """Return a conversation as token ids of `render`, with its media apart."""
    media: dict[str, list[Any]] = {}
    rendered = []
    for message in messages:
        content = message.get("content") or ""  # calls may come alone
        if not isinstance(content, str):
            for part in content:
                kind = part.get("type")
                if kind in ("image", "audio", "video"):
                    media.setdefault(kind, []).append(part.get(kind))
                elif kind != "text":
                    raise invalid(f"LLM.chat takes parts of type text, image, audio and video, not {kind}", "messages")
            content = [{k: v for k, v in part.items() if k in ("type", "text")} for part in content]
        rendered.append({**message, "content": content})
    return {"prompt_token_ids": render(rendered), "multi_modal_data": media}


def _media_bytes(item: Any) -> bytes:
    """Bytes of a media item given as bytes, a path, a PIL image, or (samples, sampling rate).

    Raises TriptychError("bad_media") for anything else, and where it cannot be read.
    """
    if isinstance(item, bytes):
        return item
    buffer = io.BytesIO()
    try:
        if isinstance(item, str | Path):
            return Path(item).read_bytes()
        if isinstance(item, tuple):
            import soundfile

            samples, subtype = np.asarray(item[0]), "PCM_32"  # whole numbers are parts of their range
            if samples.dtype.kind == "f":
                samples, subtype = samples.astype(np.float32), "FLOAT"
            soundfile.write(buffer, samples, int(item[1]), format="WAV", subtype=subtype)
        else:
            to_rgb(item).save(buffer, format="PNG")
    except Exception as error:  # whatever an object of another kind makes the libraries stumble over
        kinds = "a media item is bytes, a path, a PIL image, or (samples, sampling rate)"
        message = f"{kinds}; this {type(item).__name__} cannot be read: {words_of(error)}"
        raise TriptychError("bad_media", message) from error
    return buffer.getvalue()
