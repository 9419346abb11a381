"""Log-probabilities in chat's and in text completion's shape, and those of prompts."""

from __future__ import annotations

import asyncio
import math
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.messages import Generate, TokenLogprob
from common.text.token_text import TokenTexts
from proxy.api.logprobs import CompletionLogprobs, LogprobShapes
from tests.proxy.streams import events
from tests.tiny import encdec

TEXT = "a grün sign 🪧"


async def _chat(rig, **fields):
    return (await rig.chat(logprobs=True, **fields)).choices[0].logprobs.content


async def test_chat_tells_each_token_with_its_bytes_and_the_likeliest(rig):
    rig.cluster.decoders[0].answer = lambda message: TEXT
    sent = [*rig.cluster.text.encode(TEXT, add_special_tokens=False), rig.cluster.info.eos_token_ids[0]]
    content = await _chat(rig, top_logprobs=2)
    assert len(content) == len(sent)
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]).decode() == TEXT
    assert [entry.logprob for entry in content] == pytest.approx([-(i + 1) / 10 for i in range(len(sent))])
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(sent)
    assert content[0].token == "a"
    assert content[0].top_logprobs[0].token == "a"
    assert content[0].top_logprobs[0].logprob > content[0].top_logprobs[1].logprob
    assert rig.cluster.decoders[0].of(Generate)[-1].sampling.logprobs == 2
    assert [entry.top_logprobs for entry in await _chat(rig)] == [[]] * len(sent)


async def test_a_streamed_chat_tells_the_same_in_pieces(rig):
    rig.cluster.decoders[0].answer = lambda message: TEXT
    whole = await _chat(rig, top_logprobs=1)
    pieces = []
    async for chunk in await rig.chat(logprobs=True, top_logprobs=1, stream=True):
        for choice in chunk.choices:
            pieces += choice.logprobs.content if choice.logprobs else []
    assert pieces == whole


async def test_completions_have_parallel_lists_and_offsets_into_the_text(rig):
    rig.cluster.decoders[0].answer = lambda message: TEXT
    create = rig.client.completions.create
    choice = (await create(model=rig.model, prompt="x", logprobs=2, max_tokens=5)).choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 5
    for token, offset, end in zip(told.tokens, told.text_offset, [*told.text_offset[1:], None], strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset:end] == token
    assert all(told.tokens[i] in told.top_logprobs[i] for i in range(5))


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer_with_its_log_probabilities(rig, stream):
    prompt = rig.cluster.text.encode("the prompt")
    body = {"prompt": "the prompt", "echo": True, "logprobs": 1, "stream": stream, "n": 2}
    response = await rig.http.post("/v1/completions", json=body)
    chunks = events(response) if stream else [response.json()]
    generated = len(rig.cluster.text.encode("a red sign", add_special_tokens=False)) + 1
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "the prompta red sign"
        values = {
            name: [value for choice in mine for value in choice["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
        assert len(values["tokens"]) == len(prompt) + generated
        assert values["token_logprobs"][0] is None
        assert values["token_logprobs"][1] == pytest.approx(-0.1)
        assert values["token_logprobs"][len(prompt)] == pytest.approx(-0.1)
        assert values["text_offset"][len(prompt)] == len("the prompt")
        assert "".join(values["tokens"][: len(prompt)]) == "the prompt"
    assert rig.cluster.decoders[0].of(Generate)[-1].sampling.prompt_logprobs == 1


async def test_the_blank_behind_a_prompt_belongs_to_what_continues_it(rig):
    """SentencePiece's tokenizers leave it out where a text begins, as a chat's answer does."""
    steps = [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    rig.service.text.tokenizer.decoder = decoders.Sequence(steps)
    rig.cluster.decoders[0].answer = lambda message: " red sign"
    response = await rig.http.post("/v1/completions", json={"prompt": "the", "echo": True, "max_tokens": 9})
    assert response.json()["choices"][0]["text"] == "the red sign"
    assert (await rig.chat()).choices[0].message.content == "red sign"
    beginning = {"role": "assistant", "content": "the"}
    body = {"messages": [beginning], "continue_final_message": True, "add_generation_prompt": False}
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == " red sign"


async def test_a_shortened_prompt_is_echoed_as_it_was_read(rig):
    prompt = "one two three four five six seven"
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 3}
    (choice,) = (await rig.http.post("/v1/completions", json=body)).json()["choices"]
    kept = rig.cluster.text.decode(rig.cluster.text.encode(prompt)[-3:])
    assert choice["text"] == f"{kept}a red sign"
    told = choice["logprobs"]
    for token, (begin, end) in zip(told["tokens"], pairwise(told["text_offset"]), strict=False):
        assert choice["text"][begin:end] == token
    body["truncate_prompt_tokens"] = 100
    (choice,) = (await rig.http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == f"{prompt}a red sign"


async def test_a_prompt_can_be_scored_without_an_answer(rig):
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await rig.http.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == rig.cluster.text.decode([5, 6, 7])
    assert choice["logprobs"]["token_logprobs"] == [None, pytest.approx(-0.1), pytest.approx(-0.2)]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert rig.cluster.decoders[0].of(Generate)[-1].sampling.max_tokens == 1


async def test_prompt_log_probabilities_come_by_token_id(rig):
    body = {"prompt": [5, 6], "prompt_logprobs": 2}
    (choice,) = (await rig.http.post("/v1/completions", json=body)).json()["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["6"] == {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": rig.cluster.text.decode([6])}
    assert second["7"]["rank"] == 2
    chat = await rig.chat(extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": "x y", "logprobs": 0}),
        ("/v1/completions", {"prompt": "x y", "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": "x y", "logprobs": 0, "echo": True, "stream": True}),
    ],
)
async def test_other_requests_are_answered_while_log_probabilities_are_written(rig, monkeypatch, path, fields):
    begun, others_answered = threading.Event(), threading.Event()

    def write_slowly(self: TokenTexts, token_id: int) -> str:
        begun.set()
        assert others_answered.wait(5)
        return ""

    monkeypatch.setattr(TokenTexts, "string_of", write_slowly)
    asking = asyncio.create_task(rig.http.post(path, json=fields))
    assert await asyncio.to_thread(begun.wait, 5)
    assert (await rig.http.get("/version")).status_code == 200
    others_answered.set()
    assert (await asking).status_code == 200


async def test_tokens_can_be_named_by_their_ids(rig):
    body = {"prompt": "x", "logprobs": 0, "max_tokens": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await rig.http.post("/v1/completions", json=body)).json()["choices"]
    token = rig.cluster.text.encode("a red sign", add_special_tokens=False)[0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}"]


async def test_nobody_gets_log_probabilities_who_did_not_ask(rig):
    assert (await rig.chat()).choices[0].logprobs is None
    answer = await rig.client.completions.create(model=rig.model, prompt="x")
    assert answer.choices[0].logprobs is None
    assert "prompt_logprobs" not in answer.model_dump_json()
    assert rig.cluster.decoders[0].of(Generate)[-1].sampling.logprobs is None


def test_impossible_tokens_have_a_number_that_json_knows(text_model):
    shapes = LogprobShapes(TokenTexts(Tokenizer.from_file(str(text_model.folder / "tokenizer.json"))), 1)
    entry = TokenLogprob(5, -math.inf, 9, [(6, 0.0)])
    assert shapes.chat([entry])["content"][0]["logprob"] == -9999.0
    assert CompletionLogprobs(shapes).add([entry])["token_logprobs"] == [-9999.0]


def test_tokens_of_a_sentencepiece_vocabulary_have_their_spaces_and_bytes():
    vocabulary = [("<unk>", 0.0), ("\u2581red", -1.0), ("s", -1.0), ("<0xC3>", -2.0), ("<0xBC>", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer)
    assert [texts.bytes_of(token) for token in (1, 2, 3, 4, 99)] == [b" red", b"s", b"\xc3", b"\xbc", b""]
    assert texts.string_of(3) == "\ufffd"


def make_metaspace(folder):
    """A tokenizer of words with a space before each, as SentencePiece has them, and no special tokens."""
    words = {"▁the": 0, "▁red": 1, "▁é": 2, "▁sign": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁the"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("make", [encdec.make_bart, encdec.make_t5, make_metaspace], ids=["bart", "t5", "metaspace"])
def test_tokens_that_the_text_of_a_prompt_lacks_move_no_other(tmp_path, make):
    """A start and an end token stand beside the text, a space before its first word in no echo."""
    tokenizer = Tokenizer.from_file(str(make(tmp_path) / "tokenizer.json"))
    prompt = "the red é sign"
    ids = tokenizer.encode(prompt).ids
    added = tokenizer.get_added_tokens_decoder().keys()
    pieces = CompletionLogprobs(LogprobShapes(TokenTexts(tokenizer), 0))
    told = pieces.add_prompt(ids, [None] * len(ids), prompt)
    offsets = told["text_offset"]
    behind = [*offsets[1:], len(prompt)]
    for token_id, token, begin, end in zip(ids, told["tokens"], offsets, behind, strict=True):
        if token_id in added:
            assert begin == end
        elif "\ufffd" not in token:
            assert prompt[begin:end] == (token if begin or prompt.startswith(token) else token.lstrip())
    assert added & set(ids) or make is make_metaspace
    answer = TokenLogprob(ids[0], -0.5, 1, [])
    assert pieces.add([answer])["text_offset"] == [len(prompt)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([b"a", b"\xe2", b"b"], [0, 1, 2]),
        ([b"\xe2", b"\xe2\x82", b"a"], [0, 1, 2]),
        ([b"\xe0", b"\x80", b"d"], [0, 1, 2]),
        ([b"a", b"\x80", b"b"], [0, 1, 2]),
        ([b"\xf0\x9f", b"\x98", b"a"], [0, 0, 1]),
        ([b"\xe2\x82", b"\x82 \xc3", b"\xa9", b"y"], [0, 0, 2, 3]),
    ],
    ids=str,
)
def test_offsets_behind_bytes_that_are_no_text_are_those_of_the_text(tokens, expected):
    """The replacement of half a character comes once the next token shows that it stays one, and is not that one's."""
    texts = SimpleNamespace(bytes_of=tokens.__getitem__, string_of=str, added={})
    told = CompletionLogprobs(LogprobShapes(texts, 0)).add_prompt(range(len(tokens)), ())
    assert told["text_offset"] == expected
