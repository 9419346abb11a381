"""The prompt formats of the document "vLLM encoder/decoder infrastructure overview", each of its examples, and more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import TriptychError
from common.model_info import ModelInfo, load_model_info
from common.sampling_params import SamplingParams
from common.text.processor import TextProcessor
from common.text.prompts import (
    ExplicitEncoderDecoderPrompt,
    ParsedPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    decode_tokens,
    encode_tokens,
    is_single,
    parse_prompt,
    preprocess_decoder_prompt,
    with_checkpoint_rules,
)
from tests import tiny_models
from tests.tiny import encdec

TEXT = "The rain in spain falls mainly on the"
UNFORCED, FORCED = ParsedPrompt([2]), ParsedPrompt([2, 0], num_forced_tokens=1)
Parse = Callable[[Any], ParsedPrompt]
Rewrite = Callable[..., ModelInfo]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    makers: dict[str, Callable[[Path], Path]] = {
        "bart": encdec.make_bart,
        "mbart": encdec.make_mbart,
        "t5": encdec.make_t5,
        "llama": tiny_models.make_llama,
        "whisper": tiny_models.make_whisper,
    }

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = makers[name](tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder


@pytest.fixture
def parser(folders: Callable[[str], Path]) -> Callable[[str], Parse]:
    def make(name: str) -> Parse:
        info = load_model_info(str(folders(name)))
        text = TextProcessor(info)
        return lambda prompt: parse_prompt(prompt, info, text)

    return make


@pytest.fixture
def bart(parser: Callable[[str], Parse]) -> Parse:
    return parser("bart")


@pytest.fixture
def tokenize(folders: Callable[[str], Path]) -> Callable[[str], list[int]]:
    return TextProcessor(load_model_info(str(folders("bart")))).encode


@pytest.fixture
def changed(folders: Callable[[str], Path]) -> Rewrite:
    """BART's ModelInfo with other JSON files."""

    def change(generation: dict[str, Any], **config: Any) -> ModelInfo:
        info = load_model_info(str(folders("bart")))
        values = {**info.config, **config}
        return ModelInfo(info.folder, info.name, info.architecture, info.family, values, generation, {})

    return change


def refused(parse: Parse, prompt: Any) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        parse(prompt)
    return caught.value


# --- the document's examples


def test_a_single_text_is_the_encoders(bart: Parse, tokenize: Callable[[str], list[int]]) -> None:
    assert bart(TEXT) == ParsedPrompt([2, 0], None, tokenize(TEXT), TEXT, num_forced_tokens=1)
    assert tokenize(TEXT)[0] == encdec.BOS
    assert tokenize(TEXT)[-1] == encdec.EOS


def test_a_text_prompt_is_the_same(bart: Parse) -> None:
    assert bart(TextPrompt(prompt=TEXT)) == bart(TEXT)


def test_token_ids_may_be_of_any_integer_type(bart: Parse) -> None:
    for given in (np.array([5, 6]).tolist(), [*np.array([5, 6])], (5, 6), {"prompt_token_ids": np.array([5, 6])}):
        assert bart(given).encoder_prompt_token_ids == [5, 6]


@pytest.mark.parametrize("key", ["prompt_tokens", "prompt_token_ids"])
def test_a_tokens_prompt_goes_to_the_encoder_unmodified(bart: Parse, key: str) -> None:
    assert bart({key: [2, 0, 171, 5, 2]}) == ParsedPrompt([2, 0], None, [2, 0, 171, 5, 2], None, num_forced_tokens=1)


def test_an_explicit_pair_of_a_text_and_tokens(bart: Parse, tokenize: Callable[[str], list[int]]) -> None:
    pair = ExplicitEncoderDecoderPrompt(encoder_prompt=TextPrompt(prompt=TEXT), decoder_prompt=[2, 0, 51, 178, 2])
    assert bart(pair) == ParsedPrompt([2, 0, 51, 178, 2], None, tokenize(TEXT), TEXT)


def test_the_decoder_start_token_is_prepended_unless_it_is_there(bart: Parse) -> None:
    for given in ([0, 51], [2, 0, 51]):
        assert bart({"encoder_prompt": TEXT, "decoder_prompt": given}).prompt_token_ids == [2, 0, 51]
    assert bart({"encoder_prompt": TEXT, "decoder_prompt": [51, 2]}).prompt_token_ids == [2, 51, 2]


HALVES: list[tuple[Prompt, list[int]]] = [
    ("ab", [0, 68, 69, 2]),
    ([5, 6], [5, 6]),
    (TextPrompt(prompt="ab"), [0, 68, 69, 2]),
    (TokensPrompt(prompt_tokens=[5, 6]), [5, 6]),
    (TokensPrompt(prompt_token_ids=[5, 6]), [5, 6]),
]


@pytest.mark.parametrize(("encoder", "encoder_ids"), HALVES, ids=str)
@pytest.mark.parametrize(("decoder", "decoder_ids"), HALVES, ids=str)
def test_each_half_of_a_pair_may_be_any_single_prompt(
    bart: Parse, encoder: Any, encoder_ids: list[int], decoder: Any, decoder_ids: list[int]
) -> None:
    parsed = bart({"encoder_prompt": encoder, "decoder_prompt": decoder})
    offset = encdec.FIRST_BYTE  # of the tokenizer's bytes, in whatever order they are
    assert len(parsed.encoder_prompt_token_ids or []) == len(encoder_ids)
    assert len(parsed.prompt_token_ids) == 1 + len(decoder_ids)
    assert parsed.prompt_token_ids[0] == encdec.EOS
    for half, ids, given in (
        (encoder, parsed.encoder_prompt_token_ids, parsed.encoder_prompt),
        (decoder, parsed.prompt_token_ids[1:], parsed.prompt),
    ):
        is_text = isinstance(half, str) or "prompt" in half
        assert given == ("ab" if is_text else None)
        assert ids is not None
        assert (ids[0], ids[-1]) == ((0, 2) if is_text else (5, 6))
        assert all(token >= offset for token in ids[1:-1])


# --- other models


def test_mbart_goes_on_with_its_target_language(parser: Callable[[str], Parse]) -> None:
    parse = parser("mbart")
    parsed = parse(TEXT)
    assert parsed.prompt_token_ids == [2, encdec.FIRST_LANGUAGE + 1]
    assert (parsed.encoder_prompt_token_ids or [])[0] == encdec.FIRST_LANGUAGE
    french = encdec.FIRST_LANGUAGE + 2
    assert parse({"encoder_prompt": TEXT, "decoder_prompt": [french]}).prompt_token_ids == [2, french]


def test_t5_has_no_bos(parser: Callable[[str], Parse]) -> None:
    parsed = parser("t5")(TEXT)
    assert parsed.prompt_token_ids == [encdec.T5_PAD]
    assert (parsed.encoder_prompt_token_ids or [])[-1] == encdec.T5_EOS


def test_the_forced_first_token_goes_before_bos(changed: Rewrite) -> None:
    assert preprocess_decoder_prompt(changed({"decoder_start_token_id": 7, "forced_bos_token_id": 9}), None) == [7, 9]
    assert preprocess_decoder_prompt(changed({"decoder_start_token_id": 7}), None) == [7, encdec.BOS]


def test_config_json_is_asked_where_there_is_no_generation_config(changed: Rewrite) -> None:
    old = changed({}, decoder_start_token_id=8, forced_bos_token_id=6, forced_eos_token_id=4, no_repeat_ngram_size=3)
    assert preprocess_decoder_prompt(old, None) == [8, 6]
    params = with_checkpoint_rules(old, SamplingParams(), UNFORCED)
    assert (params.forced_eos_token_id, params.no_repeat_ngram_size) == (4, 3)
    # As transformers: rules in config.json do not count where there is a generation_config.json.
    new = changed({"bos_token_id": 0}, decoder_start_token_id=8, forced_bos_token_id=6, forced_eos_token_id=4)
    assert preprocess_decoder_prompt(new, None) == [8, 0]
    assert with_checkpoint_rules(new, SamplingParams(), UNFORCED) == SamplingParams()


def test_a_checkpoint_without_a_start_token_begins_with_bos_or_says_so(changed: Rewrite) -> None:
    none = {"decoder_start_token_id": None, "bos_token_id": None}
    assert preprocess_decoder_prompt(changed({}, **{**none, "bos_token_id": 5}), [6]) == [5, 6]
    with pytest.raises(TriptychError, match="has no decoder_start_token_id"):
        preprocess_decoder_prompt(changed({}, **none), [6])


def test_what_a_request_says_goes_before_the_checkpoints_rules(changed: Rewrite) -> None:
    info = changed({"forced_eos_token_id": [2, 3], "no_repeat_ngram_size": 3})
    given = SamplingParams(forced_eos_token_id=7, no_repeat_ngram_size=5, max_tokens=9)
    assert with_checkpoint_rules(info, given, UNFORCED) == given
    filled = with_checkpoint_rules(info, SamplingParams(max_tokens=9), UNFORCED)
    assert filled == SamplingParams(max_tokens=9, forced_eos_token_id=2, no_repeat_ngram_size=3)


@pytest.mark.parametrize(
    ("rules", "given", "expected"),
    [
        ({"min_length": 12}, {}, 10),
        ({"min_length": 12}, {"min_tokens": 3}, 3),
        ({"min_length": 12}, {"max_tokens": 4}, 4),
        ({"min_length": 2}, {}, 0),
        ({"min_new_tokens": 12, "min_length": 50}, {}, 11),
    ],
)
def test_the_least_length_of_the_checkpoint_counts_as_in_transformers(
    changed: Rewrite, rules: dict[str, int], given: dict[str, int], expected: int
) -> None:
    params = SamplingParams(**{"max_tokens": 99, **given})
    assert with_checkpoint_rules(changed(rules), params, FORCED).min_tokens == expected


def test_tokens_that_a_checkpoint_never_writes_are_forbidden(changed: Rewrite) -> None:
    vocab_size = encdec.VOCAB_SIZE
    bad = [[7, 8], [9], [vocab_size], [], ["5"]]
    info = changed({"suppress_tokens": [3, -1, vocab_size], "begin_suppress_tokens": [4], "bad_words_ids": bad})
    filled = SamplingParams(suppress_tokens=(3,), begin_suppress_tokens=(4,), bad_words_ids=((7, 8), (9,)))
    assert with_checkpoint_rules(info, SamplingParams(), UNFORCED) == filled
    given = SamplingParams(suppress_tokens=(5,), begin_suppress_tokens=(6,), bad_words_ids=((5, 6),))
    assert with_checkpoint_rules(info, given, UNFORCED) == given


def test_a_decoder_only_model_takes_texts_and_tokens(parser: Callable[[str], Parse]) -> None:
    parse = parser("llama")
    assert parse("hi") == ParsedPrompt(list(b"hi"), "hi")
    assert parse({"prompt": "hi"}) == ParsedPrompt(list(b"hi"), "hi")
    for tokens in ([5, 6], {"prompt_tokens": [5, 6]}, {"prompt_token_ids": [5, 6]}):
        assert parse(tokens) == ParsedPrompt([5, 6])


def test_whisper_takes_audio_as_its_encoder_prompt(parser: Callable[[str], Parse]) -> None:
    parse, start = parser("whisper"), tiny_models.FIRST_SPECIAL + 1
    audio = {"multi_modal_data": {"audio": b"clip"}}
    text = "<|startoftranscript|><|en|>"
    expected = ParsedPrompt([start, start + 1], text, multi_modal_data={"audio": b"clip"})
    assert parse({**audio, "prompt": text}) == expected
    assert parse({"encoder_prompt": audio, "decoder_prompt": text}) == expected
    assert parse({"encoder_prompt": {**audio, "prompt": ""}, "decoder_prompt": [start + 1]}).prompt_token_ids == [
        start,
        start + 1,
    ]
    assert parse(audio).prompt_token_ids == parse({"encoder_prompt": audio}).prompt_token_ids == [start]
    earlier = [start + 4, 65, start]
    assert parse({**audio, "prompt_token_ids": earlier}).prompt_token_ids == earlier


# --- what is refused


@pytest.mark.parametrize(
    ("family", "prompt", "code", "message"),
    [
        (
            "llama",
            {"encoder_prompt": "a", "decoder_prompt": "b"},
            "invalid_request",
            "decoder-only model and takes no enc",
        ),
        ("llama", {"encoder_prompt": "a"}, "invalid_request", "decoder-only model"),
        ("bart", {"decoder_prompt": "b"}, "invalid_request", "needs an encoder prompt"),
        ("bart", {"encoder_prompt": None, "decoder_prompt": "b"}, "invalid_request", "needs an encoder prompt"),
        ("bart", [], "invalid_request", "the encoder prompt is empty"),
        ("bart", [5, 264], "invalid_request", "token id 264 of the encoder prompt is outside the vocabulary of 264"),
        ("bart", [-1], "invalid_request", "token id -1 of the encoder prompt is outside the vocabulary of 264"),
        (
            "bart",
            {"encoder_prompt": "a", "decoder_prompt": [2, -1]},
            "invalid_request",
            "token id -1 of the decoder prompt is outside the vocabulary of 264",
        ),
        ("bart", [5] * 129, "context_length_exceeded", "has 129 tokens, the encoder of .* takes at most 128"),
        ("bart", "a" * 127, "context_length_exceeded", "has 129 tokens, the encoder of .* takes at most 128"),
        ("bart", ["a"], "invalid_request", "token ids are a list of integers: 'str'"),
        ("bart", {"prompts": "a"}, "invalid_request", "a prompt is a text, .* not a dict of prompts"),
        ("bart", {"prompt": "a", "multi_modal_data": {"image": b""}}, "invalid_request", "takes text, no image"),
        ("bart", 7, "invalid_request", "a prompt is a text"),
        ("whisper", "text alone", "invalid_request", "needs audio as its encoder prompt"),
        (
            "whisper",
            {"encoder_prompt": {"prompt": "x", "multi_modal_data": {"audio": b""}}},
            "invalid_request",
            "takes audio, no text",
        ),
    ],
)
def test_what_a_model_cannot_take_is_refused(
    parser: Callable[[str], Parse], family: str, prompt: Any, code: str, message: str
) -> None:
    error = refused(parser(family), prompt)
    assert error.info.code == code
    assert error.info.param is not None
    with pytest.raises(TriptychError, match=message):
        raise error


# --- on the wire


def test_token_ids_travel_as_little_endian_uint32() -> None:
    assert encode_tokens([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert decode_tokens(encode_tokens([0, 2**32 - 1, 50_264])) == [0, 2**32 - 1, 50_264]
    with pytest.raises(TriptychError, match="5 bytes are no token ids"):
        decode_tokens(bytes(5))


def test_a_list_of_numbers_is_one_prompt_and_a_list_of_lists_is_many() -> None:
    assert is_single([1, 2])
    assert is_single("a")
    assert is_single({"prompt": "a"})
    assert not is_single([[1, 2], [3]])
    assert not is_single(["a", "b"])
    assert not is_single([])


def test_prompts_are_parsed_without_torch(folders: Callable[[str], Path]) -> None:
    program = (
        "import json, sys; from common.model_info import load_model_info;"
        "from common.text.processor import TextProcessor;"
        "from common.text.prompts import parse_prompt; info = load_model_info(sys.argv[1]);"
        "print(json.dumps(parse_prompt('a', info, TextProcessor(info)).prompt_token_ids));"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folders("bart"))], check=True, timeout=60, stdout=-1)
    assert json.loads(done.stdout) == [2, 0]
