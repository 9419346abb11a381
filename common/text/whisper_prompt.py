"""Whisper's decoder prompts, equal to those of transformers' WhisperForConditionalGeneration.generate.

    [<|startofprev|> earlier text] <|startoftranscript|> [<|en|> <|transcribe|>] <|notimestamps|>

English-only checkpoints know no language and no task tokens. Where neither the caller nor generation_config.json tells
a multilingual checkpoint the language, the prompt ends after <|startoftranscript|> and the rest is generated under
constraint: the first token is the most likely language, the others are forced (`SamplingParams.prefix_allowed`). With
timestamps <|notimestamps|> is left out, and the answer follows Whisper's rules for them. Never imports torch.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from common.errors import TriptychError, invalid
from common.model_info import ModelInfo
from common.sampling_params import TimestampRules
from common.text.processor import TextProcessor
from common.text.prompts import preprocess_decoder_prompt

Task = Literal["transcribe", "translate"]
MIN_NEW_TOKENS = 8
"""A prompt must leave room for at least so many tokens of transcript."""
_CHARS_PER_TOKEN: Final = 256
"""More than any token has."""
_LANGUAGES: Final = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian, bg bulgarian,
bn bengali, bo tibetan, br breton, bs bosnian, ca catalan, cs czech, cy welsh, da danish, de german,
el greek, en english, es spanish, et estonian, eu basque, fa persian, fi finnish, fo faroese, fr french,
gl galician, gu gujarati, ha hausa, haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian creole,
hu hungarian, hy armenian, id indonesian, is icelandic, it italian, ja japanese, jw javanese, ka georgian,
kk kazakh, km khmer, kn kannada, ko korean, la latin, lb luxembourgish, ln lingala, lo lao, lt lithuanian,
lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam, mn mongolian, mr marathi, ms malay,
mt maltese, my myanmar, ne nepali, nl dutch, nn nynorsk, no norwegian, oc occitan, pa punjabi, pl polish,
ps pashto, pt portuguese, ro romanian, ru russian, sa sanskrit, sd sindhi, si sinhala, sk slovak,
sl slovenian, sn shona, so somali, sq albanian, sr serbian, su sundanese, sv swedish, sw swahili, ta tamil,
te telugu, tg tajik, th thai, tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek,
vi vietnamese, yi yiddish, yo yoruba, yue cantonese, zh chinese,
"""
LANGUAGE_NAMES: Final[dict[str, str]] = {
    code: name for code, _, name in (entry.strip().partition(" ") for entry in _LANGUAGES.split(",")) if code
}
"""Code -> English name, in lower case."""
_OTHER_NAMES: Final = """
burmese my, castilian es, flemish nl, haitian ht, letzeburgesch lb, mandarin zh, moldavian ro, moldovan ro, panjabi pa,
pushto ps, sinhalese si, valencian ca
"""
_LANGUAGE_CODES: Final = {name: code for code, name in LANGUAGE_NAMES.items()} | dict(
    entry.split() for entry in _OTHER_NAMES.split(",")
)


def is_multilingual(info: ModelInfo) -> bool:
    """True where the checkpoint has language and task tokens."""
    return bool(info.generation.get("is_multilingual", True)) and "lang_to_id" in info.generation


def options(
    info: ModelInfo,
    text: TextProcessor,
    *,
    decoder_prompt: str | list[int] | None = None,
    language: str | None = None,
    prompt: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of `build`, from a decoder prompt (text or token ids) where one is given.

    A language and a task that nobody tells are those of generation_config.json, where it has any. Raises
    TriptychError("invalid_request") for a decoder prompt beside `language` or `prompt`, and for one that breaks the
    rules at the top of this module; the language and the task of a multilingual checkpoint must be there. Text
    after the control tokens, the beginning of the transcript, needs <|notimestamps|>.
    """
    if decoder_prompt is None:
        usual_language, usual_task = _usual(info)
        return {"language": language or usual_language, "prompt": prompt, "task": usual_task or "transcribe", **others}
    for name, value in (("language", language), ("prompt", prompt)):
        if value:
            raise invalid(f"decoder_prompt holds all that the decoder is told: leave {name} out", name)
    if isinstance(decoder_prompt, str):
        decoder_prompt = text.encode_prompt(decoder_prompt, "decoder_prompt", add_special_tokens=False)
    ids = preprocess_decoder_prompt(info, decoder_prompt)
    place = ids.index(start_token_id(info))
    earlier, rest = ids[:place], ids[place + 1 :]
    if earlier and earlier.pop(0) != _previous_start(info, text):
        raise _wrong_prompt("text before <|startoftranscript|> begins with <|startofprev|>")
    if len(earlier) > info.max_model_len // 2 - 1:
        raise _wrong_prompt(f"earlier text has at most {info.max_model_len // 2 - 1} tokens, not {len(earlier)}")
    told: dict[str, Any] = {"language": None, "task": "transcribe"}
    if is_multilingual(info):
        languages = {token: name.strip("<|>") for name, token in info.generation["lang_to_id"].items()}
        tasks = {token: name for name, token in info.generation["task_to_id"].items()}
        if not (rest and rest[0] in languages and rest[1:2] and rest[1] in tasks):
            raise _wrong_prompt("a language as <|en|> and a task as <|transcribe|> follow <|startoftranscript|>")
        told = {"language": languages[rest.pop(0)], "task": tasks[rest.pop(0)]}
    no_timestamps = _no_timestamps(text)
    timestamps = bool(no_timestamps) and rest[:1] != no_timestamps
    rest = rest if timestamps else rest[len(no_timestamps) :]
    _check_plain(info, text, [*earlier, *rest])
    if rest and timestamps:
        raise _wrong_prompt("text after the control tokens needs <|notimestamps|> before it")
    return {**told, "timestamps": timestamps, "token_ids": ids}


def build(
    info: ModelInfo,
    text: TextProcessor,
    *,
    language: str | None,
    task: Task = "transcribe",
    prompt: str | None = None,
    timestamps: bool = False,
    token_ids: list[int] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """Return the decoder prompt of an audio window, and the matching SamplingParams fields.

    `language` is a code such as "en" or an English name (None: detected, or English for an English-only checkpoint);
    `prompt` is text that may come before the window, a hint for names and style, of which the last tokens are kept.
    `token_ids` are the decoder prompt itself, checked by `options` and in accord with the other arguments.
    With `timestamps` segments begin and end with timestamp tokens, from `timestamp_rules(...).first_token_id` on.
    The fields are suppress_tokens, begin_suppress_tokens, prefix_allowed, timestamps, and max_tokens: the most that fit
    into the decoder, generated prefix included.
    Raises TriptychError("invalid_request") naming the field for an unknown language, or for a language or task that
    an English-only checkpoint does not have.
    """
    start = start_token_id(info)
    rules = timestamp_rules(info, text) if timestamps else None
    if timestamps and rules is None:
        raise invalid(f"{info.name} has no <|notimestamps|> token, and so no timestamps", "timestamp_granularities")
    known = _language_and_task(info, language, task)
    no_timestamps = [] if timestamps else _no_timestamps(text)
    limit = info.max_model_len
    ids = [*_previous_text(info, text, prompt, limit // 2 - 1), start]
    prefix: tuple[tuple[int, ...], ...] = ()
    if token_ids is not None:
        ids = token_ids
    elif any(len(allowed) > 1 for allowed in known):
        prefix = (*known, *((token,) for token in no_timestamps))
    else:
        ids += [token for allowed in known for token in allowed] + no_timestamps
    if limit - len(ids) < MIN_NEW_TOKENS:
        name = "prompt" if token_ids is None else "decoder_prompt"
        message = f"the prompt of {len(ids)} tokens leaves no room in a decoder of {limit}: shorten `{name}`"
        raise TriptychError("context_length_exceeded", message, name)
    fields: dict[str, Any] = {
        "max_tokens": limit - len(ids),
        "suppress_tokens": tuple(info.generation.get("suppress_tokens") or ()),
        "begin_suppress_tokens": tuple(info.generation.get("begin_suppress_tokens") or ()),
        "prefix_allowed": prefix,
        "timestamps": rules,
    }
    return ids, fields


def language_code(language: str) -> str:
    """Return the code of a language from code, English name or code and region ("de-DE"), in any case; an unknown text
    unchanged."""
    lower = language.strip().lower()
    alone = lower.replace("_", "-").partition("-")[0]
    return alone if alone in LANGUAGE_NAMES else _LANGUAGE_CODES.get(lower, lower)


def language_name(code: str) -> str:
    """Return the English name of a language, in lower case; an unknown code unchanged."""
    return LANGUAGE_NAMES.get(code, code)


def start_token_id(info: ModelInfo) -> int:
    """Return <|startoftranscript|>: the next token shows whether there is speech at all, and the language."""
    return int({**info.config, **info.generation}["decoder_start_token_id"])


def timestamp_rules(info: ModelInfo, text: TextProcessor) -> TimestampRules | None:
    """Return the rules for timestamp tokens, which follow <|notimestamps|> 20 ms apart; None if the checkpoint has
    none."""
    no_timestamps = _no_timestamps(text)
    if not no_timestamps:
        return None
    first = info.generation.get("max_initial_timestamp_index")
    return TimestampRules(no_timestamps[0] + 1, no_timestamps[0], None if first is None else int(first))


def no_speech_token_id(info: ModelInfo, text: TextProcessor) -> int | None:
    """<|nospeech|>, called <|nocaptions|> at first: the token before <|notimestamps|>."""
    no_timestamps = _no_timestamps(text)
    return no_timestamps[0] - 1 if no_timestamps else None


def detected_language(info: ModelInfo, token_ids: list[int]) -> str | None:
    """Return the language code at the begin of a generation under `prefix_allowed`; None without a code."""
    codes = {token: name.strip("<|>") for name, token in info.generation.get("lang_to_id", {}).items()}
    return codes.get(token_ids[0]) if token_ids else None


def _usual(info: ModelInfo) -> tuple[str | None, Task | None]:
    """Return the language and the task that generation_config.json names; the older forced ids only without both."""
    if not is_multilingual(info):
        return None, None
    rules = info.generation
    language, task = rules.get("language"), rules.get("task")
    if language is None and task is None:
        forced = dict(rules.get("forced_decoder_ids") or info.config.get("forced_decoder_ids") or ())
        names = {token: name for name, token in {**rules["lang_to_id"], **rules["task_to_id"]}.items()}
        language, task = names.get(forced.get(1)), names.get(forced.get(2))
    return language and language.strip("<|>"), task


def _language_and_task(info: ModelInfo, language: str | None, task: Task) -> list[tuple[int, ...]]:
    """Return allowed ids of the language and the task token; none for an English-only checkpoint."""
    if not is_multilingual(info):
        if task != "transcribe":
            message = f"{info.name} is English-only and cannot {task}: transcribe, or serve a multilingual Whisper"
            raise invalid(message, "model")
        if language is not None and language_code(language) != "en":
            raise invalid(f"{info.name} is English-only, language {language!r} is not available", "language")
        return []
    languages: dict[str, int] = info.generation["lang_to_id"]
    allowed = tuple(sorted(languages.values()))
    if language is not None:
        token = f"<|{language_code(language)}|>"
        if token not in languages:
            codes = ", ".join(sorted(name.strip("<|>") for name in languages))
            raise invalid(f"unknown language {language!r}; use one of: {codes}", "language")
        allowed = (languages[token],)
    return [allowed, (int(info.generation["task_to_id"][task]),)]


def _no_timestamps(text: TextProcessor) -> list[int]:
    return [] if text.no_timestamps_token_id is None else [text.no_timestamps_token_id]


def _previous_text(info: ModelInfo, text: TextProcessor, prompt: str | None, max_tokens: int) -> list[int]:
    """Return <|startofprev|> and the last `max_tokens` tokens of the prompt; an empty list without a prompt."""
    if not prompt or not prompt.strip():
        return []
    start = _previous_start(info, text)
    if start is None:
        raise invalid(f"{info.name} has no <|startofprev|> token", "prompt")
    ids = text.encode(" " + prompt.strip()[-_CHARS_PER_TOKEN * max_tokens :], add_special_tokens=False)
    special = [token for token in ids if token in text.tokenizer.get_added_tokens_decoder()]
    if special:
        named = text.tokenizer.id_to_token(special[0])
        raise invalid(f"the prompt contains the special token {named}", "prompt")
    return [start, *ids[-max_tokens:]]


def _previous_start(info: ModelInfo, text: TextProcessor) -> int | None:
    """Return <|startofprev|>, which begins earlier text."""
    start = info.generation.get("prev_sot_token_id", text.tokenizer.token_to_id("<|startofprev|>"))
    return None if start is None else int(start)


def _check_plain(info: ModelInfo, text: TextProcessor, token_ids: list[int]) -> None:
    """Raise TriptychError("invalid_request") for tokens of a decoder prompt that should be text and are not."""
    control = text.tokenizer.get_added_tokens_decoder().keys()
    timestamps = (_no_timestamps(text) or [info.vocab_size])[0]
    for token in token_ids:
        if token in control or not 0 <= token < timestamps:
            named = text.tokenizer.id_to_token(token) if 0 <= token < info.vocab_size else None
            raise _wrong_prompt(f"the token {named or token} is out of place")


def _wrong_prompt(what: str) -> TriptychError:
    return invalid(f"decoder_prompt is none of Whisper's: {what}", "decoder_prompt")
