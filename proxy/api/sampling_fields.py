"""Common fields of chat and text completion, and their conversion to sampling parameters.

Unsupported fields are refused by name rather than ignored: a client that asks for tools must not get an answer without
tools. Accepted are fields without influence on the answer (`user`, `metadata`, ...), and unsupported fields with a
value that means "off".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from common.errors import TriptychError, invalid
from common.sampling_params import (
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from common.text.processor import TextProcessor
from common.text.token_text import bad_words_ids
from proxy.api.structured import FewFields, StructuredFields
from proxy.dispatch.text_stream import Usage
from proxy.server.errors import FIRST_ERROR, refuse_unsupported

IGNORED: Final = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
        "guided_decoding_backend",
        "prediction",  # of OpenAI's, to speed up: the text is the same without
        "verbosity",  # a hint to models trained for it
    ]
)
"""Fields without influence on the answer."""
ACCEPTED_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "suffix": (None, ""),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None,),
    "include_reasoning": (None, True),
    "web_search_options": (None,),
    "cache_salt": (None, ""),  # keeps tenants' caches apart: to ignore it would break that promise
    "chat_template": (None,),
    "detokenize": (None, True),
    "documents": (None, []),
    "kv_transfer_params": (None,),
    "logits_processors": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "vllm_xargs": (None, {}),
    "spaces_between_special_tokens": (None, True),
    "guided_whitespace_pattern": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
}
"""Unsupported fields, and the values accepted as "off"."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integers that fit the wire: larger values are refused here, where the field can be named."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
MAX_BIASES: Final = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], FIRST_ERROR, Field(max_length=MAX_STOP_STRINGS)]


def _few(biases: object) -> object:
    """Limit the number before values are validated: pydantic would report a million errors for a million values."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"has {len(biases)} entries, at most {MAX_BIASES} are taken")
    return biases


def list_tag(value: Any) -> str:
    """Return the tag of a union of one value and a list."""
    return "SEVERAL" if isinstance(value, list) else "ONE"  # capitals: left out of the field names in error messages


Stop = Annotated[
    Annotated[StopString | None, Tag("ONE")] | Annotated[StopStrings, Tag("SEVERAL")], Discriminator(list_tag)
]


class StreamOptions(FewFields):
    """`include_obfuscation` is OpenAI's, and changes nothing: no padding is sent."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(StructuredFields, ABC):
    """Common fields of chat and text completion. Null means absent.

    The names are OpenAI's, or vLLM's. `best_of` sequences are sampled, and the `n` with the highest mean
    log-probability returned; with `use_beam_search`, `best_of` is the width of the beam. With `return_token_ids`, every
    choice, whole or of a streamed chunk, has the generated tokens in `token_ids`, the stopping token included. With
    `return_prompts`, the first choice of a prompt has the prompt as processed.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    best_of: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    no_repeat_ngram_size: int | None = Field(None, ge=0, lt=2**31)
    logit_bias: Annotated[dict[str, Bias] | None, BeforeValidator(_few)] = Field(None, max_length=MAX_BIASES)
    allowed_token_ids: Annotated[list[TokenId], FIRST_ERROR] | None = Field(None, min_length=1)
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], FIRST_ERROR] | None = Field(
        None, max_length=256
    )
    seed: Seed | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[TokenId], FIRST_ERROR] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    early_stopping: bool | None = None
    priority: Int32 | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompts: bool | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> GenerationRequest:
        refuse_unsupported(self.model_extra, IGNORED, ACCEPTED_OFF, type(self).model_fields)
        return self

    def sampling(
        self, text: TextProcessor, max_tokens: int, defaults: Mapping[str, Any], adapter: str = ""
    ) -> SamplingParams:
        """Return the sampling parameters, for at most `max_tokens` tokens of each sequence.

        `defaults` hold for fields that are not given; `adapter` is the one that `model` names.
        Raises TriptychError("invalid_request") naming the field for combinations without meaning.
        """
        constraint = self.constraint()
        if self.prompt_logprobs is not None and self.stream:
            raise _wrong("prompt_logprobs", "cannot be streamed: they come with a whole answer only")
        if max_tokens < (self.min_tokens or 0):
            raise _wrong("min_tokens", f"is {self.min_tokens}, but at most {max_tokens} tokens are generated")
        allowed, vocab_size = tuple(self.allowed_token_ids or ()), text.info.vocab_size
        if len(allowed) > vocab_size:
            raise _wrong("allowed_token_ids", f"has {len(allowed)} token ids, the vocabulary has only {vocab_size}")
        bad_words = tuple(self.bad_words or ())
        # The best sequences are found by their log-probabilities.
        logprobs = 0 if self.num_logprobs is None and self.picks_best else self.num_logprobs
        return SamplingParams(
            **self._search(defaults),
            **self._chosen(defaults, "repetition_penalty"),
            **self._chosen({}, "min_tokens", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
            **self._chosen({}, "prompt_logprobs", "ignore_eos"),
            max_tokens=max_tokens,
            logit_bias=_token_keys(self.logit_bias) if self.logit_bias else {},
            allowed_token_ids=allowed,
            bad_words=bad_words,
            bad_words_ids=bad_words_ids(text, bad_words) if bad_words else (),
            logprobs=logprobs,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=None if constraint is None else constraint.grammar,
            adapter=adapter,
        ).validate()

    def _chosen(self, defaults: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """Return the given ones of these fields, and the others' defaults where there are any."""
        chosen = {name: defaults.get(name) if (value := getattr(self, name)) is None else value for name in names}
        return {name: value for name, value in chosen.items() if value is not None}

    def _search(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of the search: by sampling, or by beams."""
        if self.use_beam_search:
            refuse_sampling(self)
            if self.num_logprobs is not None:
                raise _wrong("logprobs", "are not available with use_beam_search: beams have a score instead")
            if self.width < self.num_choices:
                raise _wrong("best_of", f"is {self.width}, fewer than the n={self.num_choices} beams to return")
            return {
                "n": self.num_choices,
                "beam_width": self.width,
                "temperature": 0.0,
                **self._chosen({}, "length_penalty", "early_stopping"),
            }
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) not in (None, default):
                raise _wrong(name, "is for beam search: set use_beam_search, too")
        if self.width < self.num_choices:
            raise _wrong("best_of", f"is {self.width}, fewer than the n={self.num_choices} to return")
        if self.picks_best and self.stream:
            raise _wrong("best_of", "cannot be streamed: which ones are best is known at the end")
        drawing = self._chosen(defaults, "temperature", "top_p", "top_k", "min_p")
        return {**plain_drawing(drawing), "n": self.width, "seed": self.seed}

    def shortened(self, prompt: list[int], longest: int, num_media: int = 0) -> list[int]:
        """Return the last `truncate_prompt_tokens` tokens of a prompt; -1 means as many as leave room for an answer.

        Raises TriptychError("invalid_request") for a prompt with media, whose placeholders must stay.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt
        keep = longest - 1 if keep == -1 else keep
        if keep == 0:
            raise _wrong("truncate_prompt_tokens", "is 0, which leaves no prompt")
        if num_media and len(prompt) > keep:
            raise _wrong("truncate_prompt_tokens", "cannot shorten a prompt with media: leave it out")
        return prompt[-keep:]

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def width(self) -> int:
        """Number of sequences that run at once."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def picks_best(self) -> bool:
        """Return whether more sequences are sampled than returned."""
        return not self.use_beam_search and self.width > self.num_choices

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens per position in the answer; None for no log-probabilities."""

    def text_options(self) -> dict[str, bool]:
        """Return how tokens become text, as arguments of `Service.generate`."""
        skips = self.skip_special_tokens is not False
        return {"skip_special_tokens": skips, "includes_stop": bool(self.include_stop_str_in_output)}

    def field_of(self, setting: str) -> str:
        """Return the request's field for a sampling setting, for error messages."""
        constraint = self.constraint()
        fields = {
            "bad_words_ids": "bad_words",
            "adapter": "model",
            **dict.fromkeys(("n", "beam_width"), "n" if self.best_of is None else "best_of"),
            **({"grammar": constraint.field} if constraint is not None else {}),
        }
        return fields.get(setting, setting)

    def token_ids_of(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return `token_ids` of a choice, if requested."""
        return {"token_ids": list(token_ids)} if self.return_token_ids else {}

    @property
    def wants_usage_event(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def chunk_usage(self, usage: Usage) -> dict[str, Any]:
        """Return `usage` of a chunk: null before a usage event, the count so far with `continuous_usage_stats`."""
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            return {"usage": usage.to_json()}
        return {"usage": None} if self.wants_usage_event else {}


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """Convert the keys, strings in JSON, to token ids."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise _wrong("logit_bias", f"has the key {key[:40]!r}, which is no token id")
    return {int(key): value for key, value in bias.items()}


def plain_drawing(drawing: dict[str, Any]) -> dict[str, Any]:
    """Return settings of drawing without a `top_k` of -1, all tokens, or a `top_p` of 0, which is temperature 0."""
    likeliest = {"temperature": 0.0, "top_p": 1.0} if drawing.get("top_p") == 0 else {}
    return {**drawing, "top_k": max(0, drawing.get("top_k", 0)), **likeliest}


def refuse_sampling(fields: BaseModel) -> None:
    """Raise TriptychError("invalid_request") naming the first sampling field of a request for beam search."""
    for name, off in (("temperature", 0), ("top_p", 1), ("top_k", -1), ("min_p", 0)):
        if getattr(fields, name) not in (None, off, 0, [0.0]):
            raise _wrong(name, f"must be {off} with use_beam_search, which does not sample")


def _wrong(field: str, what: str) -> TriptychError:
    return invalid(f"{field} {what}", field)
