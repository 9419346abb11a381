"""Prompt formats for users, and the parts for encoder and decoder.

The formats and the rules of encoder-decoder models are those of the document "vLLM encoder/decoder infrastructure
overview": a single prompt is the encoder's, and the decoder begins with its start token.

    decoder-only        prompt                               -> decoder
    encoder-decoder     prompt                               -> encoder, default decoder prompt   -> decoder
                        {encoder_prompt, decoder_prompt}     -> encoder, decoder start + prompt   -> decoder
    of audio (Whisper)  {prompt, multi_modal_data: {audio}}  -> audio to the encoder, prompt      -> decoder
    with `reads_text`   {prompt, multi_modal_data: {image}}  -> both to the encoder, default      -> decoder
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypedDict, cast

import msgspec
import numpy as np

from common.errors import TriptychError, invalid
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor

NOT_COMPUTED = (
    "exponential_decay_length_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "sequence_bias",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "guidance_scale",
)
"""Rules of generation_config.json that transformers has; None, 0 and 1 turn them off."""


class TextPrompt(TypedDict, total=False):
    """`prompt` text; `multi_modal_data` like {"image": [...]} or {"audio": ...}, an item per placeholder."""

    prompt: str
    multi_modal_data: dict[str, Any]


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids, under either name; the ids hold a placeholder for each media item."""

    prompt_token_ids: list[int]
    prompt_tokens: list[int]
    multi_modal_data: dict[str, Any]


SingletonPrompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt


class ExplicitEncoderDecoderPrompt(TypedDict, total=False):
    """A prompt for each half of an encoder-decoder model. Without `decoder_prompt` the decoder gets the default.

    A text becomes what the tokenizer makes of it, with the special tokens that it adds at both ends; whoever wants the
    decoder to go on in the middle of a sentence gives it token ids.
    """

    encoder_prompt: SingletonPrompt
    decoder_prompt: SingletonPrompt | None


Prompt: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt of either kind of model. `prompt` and `prompt_token_ids` are the decoder's, the latter as processed.

    Texts are None where token ids were given, or nothing; `encoder_prompt_token_ids` is None where the model has no
    encoder of text. `multi_modal_data` are the media items by kind, as they were given. The last `num_forced_tokens` of
    a default decoder prompt are those that the checkpoint would make the decoder generate first.
    """

    prompt_token_ids: list[int]
    prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    encoder_prompt: str | None = None
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    num_forced_tokens: int = 0


@dataclass(frozen=True)
class _Singleton:
    """A tokenised prompt; `token_ids` is None for a prompt of media alone, and where none was given."""

    token_ids: list[int] | None
    text: str | None
    media: dict[str, Any]


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether the value is a single prompt: a list of numbers is a prompt, any other list holds several."""
    if isinstance(prompts, str | dict):
        return True
    return len(prompts) > 0 and all(isinstance(token, int) for token in prompts)


def parse_prompt(prompt: Prompt, info: ModelInfo, text: TextProcessor) -> ParsedPrompt:
    """Return the meaning of a prompt, in any of the formats, for a model.

    Raises TriptychError: "invalid_request" for another format, for an encoder prompt where the model has no encoder
    or none where it has one, and for token ids outside the vocabulary; "context_length_exceeded" for an encoder prompt
    that is too long. The decoder prompt's length is for the engine to check, which knows how long media are.
    """
    is_pair = isinstance(prompt, dict) and ("encoder_prompt" in prompt or "decoder_prompt" in prompt)
    if not info.is_encoder_decoder:
        if is_pair:
            message = f"{info.name} is a decoder-only model and takes no encoder prompt: give the text as the prompt"
            raise invalid(message, "encoder_prompt")
        one = _parse_singleton(cast(SingletonPrompt, prompt), text.encode_prompt, "prompt")
        if one.token_ids is None:
            raise _bad_format(prompt, "prompt")
        return ParsedPrompt(one.token_ids, one.text, multi_modal_data=one.media)
    pair = cast(ExplicitEncoderDecoderPrompt, prompt if is_pair else {"encoder_prompt": prompt})
    encoder, decoder = pair.get("encoder_prompt"), pair.get("decoder_prompt")
    if info.media_kind != "text" and not info.family.reads_text:
        return _parse_media_pair(encoder, decoder, info, text, is_pair=is_pair)
    return _parse_text_pair(encoder, decoder, info, text)


def decoder_start_token_id(info: ModelInfo) -> int:
    """Return <DEC>, the first token of every decoder prompt.

    Raises TriptychError("invalid_request") where neither generation_config.json nor config.json names one.
    """
    for key in ("decoder_start_token_id", "bos_token_id"):
        for settings in (info.generation, info.text_config):
            if settings.get(key) is not None:
                return int(settings[key])
    message = f"{info.name} has no decoder_start_token_id in generation_config.json or config.json: add it there"
    raise invalid(message, "model")


def default_decoder_prompt(info: ModelInfo) -> list[int]:
    """Return the decoder prompt for users who give none: <DEC>, and any forced first token.

    That is the forced one of generation_config.json (mBART's target language), else <BOS> for BART; T5 has none.
    """
    forced = (info.generation or info.text_config).get("forced_bos_token_id")
    if forced is None and info.family.prompt_bos:
        forced = info.text_config.get(info.family.prompt_bos)
    return [decoder_start_token_id(info)] + ([] if forced is None else [int(forced)])


def preprocess_decoder_prompt(info: ModelInfo, token_ids: Sequence[int] | None) -> list[int]:
    """Return the decoder prompt for the decoder: the default for None, otherwise with a leading <DEC>.

    Whisper's begins with earlier text at times (<|startofprev|>), so that its start token counts wherever it stands.
    """
    if token_ids is None:
        return default_decoder_prompt(info)
    start = decoder_start_token_id(info)
    present = start in token_ids if info.media_kind == "audio" else list(token_ids[:1]) == [start]
    return [*token_ids] if present else [start, *token_ids]


def with_checkpoint_rules(info: ModelInfo, params: SamplingParams, parsed: ParsedPrompt) -> SamplingParams:
    """Return the parameters with gaps filled by the checkpoint's own rules of generation: the last token of a sequence
    of full length, the longest repetition, the least length, and tokens that never appear. `transformers` applies them
    by default; it counts the prompt into `min_length`, and the forced tokens of a default prompt as generated."""
    rules: dict[str, Any] = {"num_forced_tokens": parsed.num_forced_tokens} if parsed.num_forced_tokens else {}
    own = info.generation or info.text_config  # which has them in folders older than generation_config.json
    forced_eos, ngram_size = own.get("forced_eos_token_id"), own.get("no_repeat_ngram_size")
    if forced_eos is not None and params.forced_eos_token_id is None:
        rules["forced_eos_token_id"] = int(forced_eos[0] if isinstance(forced_eos, list) else forced_eos)
    if ngram_size and not params.no_repeat_ngram_size:
        rules["no_repeat_ngram_size"] = int(ngram_size)
    least, new = own.get("min_length") or 0, own.get("min_new_tokens")
    least = least - len(parsed.prompt_token_ids) if new is None else new - parsed.num_forced_tokens
    if least > 0 and not params.min_tokens:
        rules["min_tokens"] = min(int(least), params.max_tokens)
    for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"):
        given = () if getattr(params, name) else own.get(name) or ()
        words = [one if isinstance(one, list) else [one] for one in given]
        known = range(info.vocab_size)
        possible = [word for word in words if word and all(isinstance(one, int) and one in known for one in word)]
        if possible:
            rules[name] = tuple(tuple(word) if name == "bad_words_ids" else word[0] for word in possible)
    return msgspec.structs.replace(params, **rules) if rules else params


def check_encoder_prompt(info: ModelInfo, token_ids: Sequence[int]) -> None:
    """Raise TriptychError for token ids unfit for the encoder: none, too many, or outside the vocabulary."""
    if not token_ids:
        raise invalid("the encoder prompt is empty", "encoder_prompt")
    _check_vocabulary(info, token_ids, "encoder")
    if len(token_ids) > info.max_encoder_tokens:
        message = (
            f"the encoder prompt has {len(token_ids)} tokens, the encoder of {info.name} takes at most "
            f"{info.max_encoder_tokens}: shorten it"
        )
        raise TriptychError("context_length_exceeded", message, "encoder_prompt")


def _check_vocabulary(info: ModelInfo, token_ids: Sequence[int], whose: str) -> None:
    bad = next((token for token in token_ids if not 0 <= token < info.vocab_size), None)
    if bad is not None:
        message = f"token id {bad} of the {whose} prompt is outside the vocabulary of {info.vocab_size}"
        raise invalid(message, f"{whose}_prompt")


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return checked token ids as an input of kind "text": little-endian uint32."""
    return np.asarray(token_ids, "<u4").tobytes()


def decode_tokens(media: bytes) -> list[int]:
    """Return the token ids of an input of kind "text". Raises TriptychError("bad_media") for an impossible size."""
    if len(media) % 4:
        raise TriptychError("bad_media", f"{len(media)} bytes are no token ids: they have four bytes each")
    token_ids: list[int] = np.frombuffer(media, "<u4").tolist()
    return token_ids


def join_media(token_ids: Sequence[int], media: bytes) -> bytes:
    """Return a media item and the text beside it as one input: the number of token ids, these, the media."""
    return encode_tokens([len(token_ids), *token_ids]) + media


def split_media(joined: bytes) -> tuple[list[int], bytes]:
    """Return what `join_media` has joined. Raises TriptychError("bad_media") for fewer bytes than announced."""
    end = 4 + 4 * int.from_bytes(joined[:4], "little")
    if len(joined) < end:
        raise TriptychError("bad_media", f"{len(joined)} bytes are no text with media: the text would end at {end}")
    return decode_tokens(joined[4:end]), joined[end:]


def _parse_text_pair(
    encoder: SingletonPrompt | None, decoder: SingletonPrompt | None, info: ModelInfo, text: TextProcessor
) -> ParsedPrompt:
    kinds = info.media_kinds if info.family.reads_text else ()
    encode = text.encode_beside if kinds else text.encode_prompt
    source = _parse_singleton(encoder, encode, "encoder_prompt")
    target = _parse_singleton(decoder, text.encode_prompt, "decoder_prompt")
    for one, taken in ((source, kinds), (target, ())):
        if refused := [kind for kind in one.media if kind not in taken]:
            message = f"{info.name} takes {' and '.join(('text', *taken))}, no {', '.join(refused)}"
            raise invalid(message, "multi_modal_data")
    if source.token_ids is None:
        message = f"{info.name} is an encoder-decoder model and needs an encoder prompt: a text or token ids"
        raise invalid(message, "encoder_prompt")
    count = sum(len(items) if isinstance(items, list) else 1 for items in source.media.values())
    if kinds and not count == source.token_ids.count(info.placeholder_token_id or 0) == 1:
        message = f"{info.name} takes a text with one {kinds[0]}, and its placeholder in token ids, not {count}"
        raise invalid(message, "multi_modal_data")
    check_encoder_prompt(info, source.token_ids)
    pair = source.token_ids, source.text, source.media
    if target.token_ids is None:
        default = default_decoder_prompt(info)
        return ParsedPrompt(default, None, *pair, num_forced_tokens=len(default) - 1)
    _check_vocabulary(info, target.token_ids, "decoder")
    return ParsedPrompt(preprocess_decoder_prompt(info, target.token_ids), target.text, *pair)


def _parse_media_pair(
    encoder: SingletonPrompt | None,
    decoder: SingletonPrompt | None,
    info: ModelInfo,
    text: TextProcessor,
    *,
    is_pair: bool,
) -> ParsedPrompt:
    """Parse a prompt whose media go to the encoder; the text beside them in a single prompt is the decoder's."""
    encode = partial(text.encode_prompt, add_special_tokens=False)
    source = _parse_singleton(encoder, encode, "encoder_prompt")
    if not source.media:
        message = f"{info.name} needs {info.media_kind} as its encoder prompt: give it as multi_modal_data"
        raise invalid(message, "encoder_prompt")
    if is_pair and source.token_ids:
        message = f"the encoder of {info.name} takes {info.media_kind}, no text: give that as decoder_prompt"
        raise invalid(message, "encoder_prompt")
    target = _parse_singleton(decoder, encode, "decoder_prompt") if is_pair else source
    ids = preprocess_decoder_prompt(info, target.token_ids)
    return ParsedPrompt(ids, target.text, multi_modal_data=source.media)


def _parse_singleton(prompt: SingletonPrompt | None, encode: Callable[[str, str], list[int]], param: str) -> _Singleton:
    if prompt is None:
        return _Singleton(None, None, {})
    if isinstance(prompt, str):
        return _Singleton(encode(prompt, param), prompt, {})
    if isinstance(prompt, list | tuple):
        return _Singleton(_token_ids(prompt, param), None, {})
    if not isinstance(prompt, dict):
        raise _bad_format(prompt, param)
    fields = cast(dict[str, Any], prompt)
    media = fields.get("multi_modal_data") or {}
    if not isinstance(media, dict):
        raise _bad_format(prompt, param)
    for key in ("prompt_token_ids", "prompt_tokens"):
        if fields.get(key) is not None:
            return _Singleton(_token_ids(fields[key], param), None, media)
    if isinstance(fields.get("prompt"), str):
        return _Singleton(encode(fields["prompt"], param), fields["prompt"], media)
    if not media:
        raise _bad_format(prompt, param)
    return _Singleton(None, None, media)


def _token_ids(value: Any, param: str) -> list[int]:
    try:
        return [operator.index(token) for token in value]  # numpy's integers, too
    except TypeError as error:
        raise invalid(f"token ids are a list of integers: {error}", param) from error


def _bad_format(prompt: Any, param: str) -> TriptychError:
    given = f"a dict of {', '.join(map(str, prompt)) or 'nothing'}" if isinstance(prompt, dict) else f"{prompt!r:.80}"
    message = (
        "a prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`, and media by kind as "
        f"`multi_modal_data`; encoder-decoder models take {{`encoder_prompt`, `decoder_prompt`}} of these; not {given}"
    )
    return invalid(message, param)
