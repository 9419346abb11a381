"""Bodies of somebody who knows the bundled model, made of bodies out of the API's description.

Without this nearly every request ends with its first wrong field, and no engine ever sees one.
"""

from __future__ import annotations

import random
from typing import Any, Final

from tests.proxy.sample_media import data_url, picture

_ESSENTIAL: Final = ("messages", "prompt")
_NOT_THIS_MODELS: Final = ("model", "encoder_prompt", "decoder_prompt", "language")
_VOCABULARY: Final = 448
_IMAGE: Final = {"type": "image_url", "image_url": {"url": data_url(picture())}}
_GRAMMARS: Final[tuple[dict[str, Any], ...]] = (
    *({"guided_regex": regex} for regex in ("a*", "[", "(a{999}){999}", r"\p{L}{1,99}", "(?=a)b", "\0", "", ".{0,3}")),
    *({"guided_choice": choice} for choice in ([""], ["a", "a"], ["é😀", "x" * 5000], ["\ud83d\ude00"])),
    *({"guided_grammar": grammar} for grammar in ('start: "a"', "start: start", "x", "start: /(/", 'root ::= "a"')),
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"enum": []}},
    {"guided_json": {"type": "string", "pattern": "(", "maxLength": 2**70}},
    {"guided_json": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1e308}}}},
    {"guided_json": {"allOf": [{"type": "integer"}, {"type": "string"}]}},
    {"guided_json": "[1]"},
    {"structured_outputs": {"json": True}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
)
_SAMPLING: Final[tuple[dict[str, Any], ...]] = (
    {"logit_bias": {"0": 100, "447": -100}},
    {"logit_bias": {"448": 1}},
    {"logit_bias": {str(token): -100 for token in range(_VOCABULARY)}},
    {"allowed_token_ids": [_VOCABULARY]},
    {"allowed_token_ids": [0], "min_tokens": 2, "stop_token_ids": [0]},
    {"bad_words": ["a", "\0", "😀"]},
    {"stop": ["", "a"]},
    {"stop": ["a"] * 9},
    {"stop_token_ids": [2**31 - 1]},
    {"min_tokens": 9},
    {"ignore_eos": True, "repetition_penalty": 1e-300},
    {"repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
    {"no_repeat_ngram_size": 1},
    {"temperature": 1e-300, "top_p": 1e-300, "top_k": 1, "min_p": 1},
    {"seed": -(2**63), "n": 3},
    {"seed": 2**63 - 1, "best_of": 5, "n": 2},
    {"use_beam_search": True, "n": 4, "length_penalty": 0, "early_stopping": True},
    {"prompt_logprobs": 20},
    {"priority": -(2**31)},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)


def knowing(body: Any, rng: random.Random) -> Any:
    """The same prompt as this model takes it, few other fields at once, often one that the engine has to judge, and
    a short answer."""
    if not isinstance(body, dict):
        return body
    optional = [name for name in body if name not in (*_ESSENTIAL, *_NOT_THIS_MODELS)]
    kept = [*_ESSENTIAL, *rng.sample(optional, min(len(optional), rng.randint(0, 2)))]
    known = {name: body[name] for name in kept if body.get(name) is not None}
    if "messages" in body:
        messages = known["messages"] if isinstance(known.get("messages"), list) else []
        known["messages"] = [_message(message, rng) for message in messages[:4]]
    else:
        known["prompt"] = _prompt(known.get("prompt"), rng)
    for choices in (_GRAMMARS, _SAMPLING):
        if rng.random() < 0.4:
            known |= rng.choice(choices)
    known["max_tokens"] = rng.choice([1, 2, 5, 17])
    return known


def _message(message: Any, rng: random.Random) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list):
        content = [part if _is_text(part) else _IMAGE for part in content[:3]]
    role = message.get("role")
    return {"role": role if rng.random() < 0.3 else "user", "content": content or [_IMAGE]}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _prompt(prompt: Any, rng: random.Random) -> Any:
    """The prompt with tokens that there are."""
    if isinstance(prompt, list) and prompt:
        return [_prompt(part, rng) for part in prompt[:6]] if not _is_number(prompt[0]) else _tokens(prompt)
    return prompt or rng.choice(["a red sign", "\0", "😀", [0], [_VOCABULARY - 1, 5], ["a", [7]]])


def _tokens(prompt: list[Any]) -> list[Any]:
    return [int(token) % 400 if _is_number(token) else token for token in prompt]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
