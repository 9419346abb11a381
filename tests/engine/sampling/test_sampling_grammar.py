"""Constrained output: only what the grammar allows is generated, and an end only where it may end."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import TriptychError
from common.sampling_params import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from engine.sampling.grammar import GrammarCompiler
from engine.sampling.sampler import Sampler
from engine.state.request import Sequence
from proxy.conversation.forced import CallList, call_grammar
from tests.engine.sampling.sampled import make_info, make_sequence
from tests.tiny_models import CHAT_SPECIALS, FIRST_SPECIAL, save_chat_tokenizer

END = FIRST_SPECIAL + 2
OTHER_END = FIRST_SPECIAL
VOCAB_SIZE = 272
"""Tokens are bytes and three specials; the model has some logits more, as padded output heads have."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHAT_SPECIALS)


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Sampler:
    return Sampler(make_info(folder, vocab_size=VOCAB_SIZE, eos=(END, OTHER_END)), VOCAB_SIZE)


def logits_of(seed: int) -> Iterator[torch.Tensor]:
    """Endless rows [1, vocab_size] of a model that knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn((1, VOCAB_SIZE), generator=generator) * 3


def generate(sampler: Sampler, sequence: Sequence, seed: int = 0, limit: int = 200) -> str:
    """Generate until an end-of-sequence token; returns the text before it."""
    for logits, _ in zip(logits_of(seed), range(limit), strict=False):
        (sampled,) = sampler.sample(logits, [sequence])
        assert sampled.error is None
        sequence.token_ids.append(sampled.token_id)
        if sampled.token_id in (END, OTHER_END):
            break
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    return bytes(token for token in output if token < 256).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_regular_expression_is_matched_in_full(sampler: Sampler, seed: int, temperature: float) -> None:
    pattern = r"[a-c]{2,5}-(yes|no)"
    sequence = make_sequence([1, 2], grammar=Grammar("regex", pattern), temperature=temperature, seed=seed)
    assert re.fullmatch(pattern, generate(sampler, sequence, seed))


@pytest.mark.parametrize("seed", range(4))
def test_a_json_schema_is_followed(sampler: Sampler, seed: int) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    text = generate(sampler, make_sequence(grammar=grammar, temperature=1.0, seed=seed), seed)
    value = json.loads(text)
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":")), "no blanks between the values"
    assert set(value) == {"name", "age"}
    assert len(value["name"]) <= 5
    assert value["age"] <= 99


def test_any_json_object_means_an_object(sampler: Sampler) -> None:
    """Without a schema: nudged to close what it opens, a model that knows nothing writes an object."""
    sequence = make_sequence(grammar=Grammar("json_object"), logit_bias={ord("}"): 20.0, ord('"'): 10.0})
    assert isinstance(json.loads(generate(sampler, sequence)), dict)


@pytest.mark.parametrize("seed", range(3))
def test_one_of_the_choices_is_given(sampler: Sampler, seed: int) -> None:
    choices = ["yes", "no", 'über "x"\n', "😀"]
    sequence = make_sequence(grammar=Grammar("choice", json.dumps(choices)), temperature=1.0, seed=seed)
    assert generate(sampler, sequence, seed) in choices


@pytest.mark.parametrize(
    "text",
    [
        'start: "(" start ")" | "x"',
        '// In Lark, too\n  ?start: inner\n?inner: "(" start ")" | "x"',
        'root ::= "(" root ")" | "x"',
    ],
    ids=["lark", "lark with ?start", "gbnf"],
)
def test_a_context_free_grammar_is_followed_in_either_notation(sampler: Sampler, text: str) -> None:
    sequence = make_sequence(grammar=Grammar("grammar", text), logit_bias={ord("x"): 1.0})
    output = generate(sampler, sequence)
    depth = output.count("(")
    assert output == "(" * depth + "x" + ")" * depth


def test_every_end_token_is_allowed_where_the_grammar_may_end_and_nowhere_else(sampler: Sampler) -> None:
    sequence = make_sequence(grammar=Grammar("regex", "ab*"))
    assert allowed(sampler, sequence) == {ord("a")}
    sequence.token_ids.append(ord("a"))
    assert allowed(sampler, sequence) == {ord("b"), END, OTHER_END}


def allowed(sampler: Sampler, sequence: Sequence) -> set[int]:
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.apply_rules(scores, [sequence])
    return set((scores[0] > -torch.inf).nonzero().squeeze(1).tolist())


def test_after_the_end_only_the_end_may_follow(sampler: Sampler) -> None:
    """With ignore_eos generation goes on; the output stays what the grammar made it."""
    sequence = make_sequence([1], [*b"ab", END, END], grammar=Grammar("regex", "ab"))
    assert allowed(sampler, sequence) == {END, OTHER_END}


def test_the_grammar_wins_over_rules_that_leave_nothing_of_it(sampler: Sampler) -> None:
    grammar = Grammar("regex", "ab")
    assert allowed(sampler, make_sequence(grammar=grammar, suppress_tokens=(ord("a"),))) == {ord("a")}
    ended = make_sequence([1], [*b"ab"], grammar=grammar, min_tokens=5)
    assert allowed(sampler, ended) == {END, OTHER_END}


def test_a_forced_prefix_is_no_part_of_the_grammar(sampler: Sampler) -> None:
    sequence = make_sequence([1], [200], grammar=Grammar("regex", "ab"), prefix_allowed=((200,), (201, 202)))
    assert allowed(sampler, sequence) < {201, 202}  # the likelier one
    sequence.token_ids.append(202)
    assert allowed(sampler, sequence) == {ord("a")}


def test_forks_and_resumed_sequences_stand_where_their_tokens_say(sampler: Sampler) -> None:
    """Two children of one sequence go different ways; neither moves the other, nor the grammar kept for the next."""
    parent = make_sequence([1], grammar=Grammar("regex", "a(b+|c+)d"))
    parent.token_ids.append(ord("a"))
    assert allowed(sampler, parent) == {ord("b"), ord("c")}
    for one in "bc":
        child = parent.fork(0)
        child.token_ids.append(ord(one))
        assert allowed(sampler, child) == {ord(one), ord("d")}
    assert allowed(sampler, parent) == {ord("b"), ord("c")}
    assert allowed(sampler, make_sequence([1], grammar=parent.sampling.grammar)) == {ord("a")}


def test_rows_of_a_batch_follow_their_own_grammars(sampler: Sampler) -> None:
    batch = [
        make_sequence(grammar=Grammar("regex", "x")),
        make_sequence(),
        make_sequence([1], b"y", grammar=Grammar("regex", "yz")),
    ]
    logits = next(logits_of(0)).repeat(3, 1)
    tokens = [sampled.token_id for sampled in sampler.sample(logits.clone(), batch)]
    assert tokens == [ord("x"), int(logits[1].argmax()), ord("z")]


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("regex", "a("), "unclosed group"),
        (Grammar("json_schema", '{"type": "nope"}'), "Invalid type: nope"),
        (Grammar("json_schema", "{"), "json_schema"),
        (Grammar("json_schema", '{"$ref": "https://example.com/other.json"}'), "example.com"),
        (Grammar("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'), "json_schema"),
        (Grammar("grammar", 'start: "x" missing'), 'unknown name: "missing"'),
        (Grammar("grammar", "nonsense @@@"), "lexer error"),
        (Grammar("grammar", "root ::= @@@"), "from GBNF"),
        (Grammar("grammar", ""), "grammar"),
        (Grammar("choice", "yes"), "not a JSON list"),
        (Grammar("choice", "[]"), "at least one string"),
        (Grammar("choice", '["a", 3]'), "at least one string"),
        (Grammar("choice", '["a", ""]'), "none of them empty"),
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused_with_what_is_wrong(sampler: Sampler, grammar: Grammar, said: str) -> None:
    with pytest.raises(TriptychError, match=re.escape(said)) as caught:
        sampler.check(SamplingParams(grammar=grammar))
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_request", "grammar")


HOSTILE: dict[str, Grammar] = {
    "deep regex": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "deep lark": Grammar("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep gbnf": Grammar("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep schema": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "endless reference": Grammar("json_schema", '{"$ref": "#"}'),
    "deep choices": Grammar("choice", "[" * 30_000),
    "product of schemas": Grammar(
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(9)]} for i in range(9)]}),
    ),
    "text over the limit": Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_harms_nobody(sampler: Sampler, name: str) -> None:
    with pytest.raises(TriptychError, match="refused"):
        sampler.check(SamplingParams(grammar=HOSTILE[name]))


def test_a_grammar_that_outgrows_its_limits_fails_its_own_request_alone(sampler: Sampler) -> None:
    """1100 rules that all begin alike: after the first token, all of them have to be followed at once."""
    rules = [f'r{number}: "a" r{number} | "b"' for number in range(1100)]
    text = "\n".join(["start: " + " | ".join(f"r{number}" for number in range(1100)), *rules])
    costly = make_sequence(grammar=Grammar("grammar", text), logit_bias={ord("a"): 50.0})
    neighbour = make_sequence(grammar=Grammar("regex", "a+"), logit_bias={ord("a"): 50.0})
    errors = []
    for logits, _ in zip(logits_of(0), range(3), strict=False):
        results = sampler.sample(logits.repeat(2, 1), [costly, neighbour])
        errors.append(results[0].error)
        assert results[1] == (ord("a"), None, None)
        for sequence, result in zip((costly, neighbour), results, strict=True):
            sequence.token_ids.append(result.token_id)
    assert errors[0] is None
    assert errors[2] is not None
    assert errors[2].code == "invalid_request"
    assert "cannot follow the grammar any further: Parser Error" in errors[2].message
    assert sampler.error(costly) == errors[2]
    assert sampler.error(neighbour) is None
    assert allowed(sampler, costly) == set()


def test_a_model_without_tokenizer_or_end_says_that_it_cannot_follow_a_grammar(tmp_path: Path, folder: Path) -> None:
    params = SamplingParams(grammar=Grammar("json_object"))
    for info, missing in ((make_info(tmp_path), "tokenizer.json"), (make_info(folder, eos=()), "end-of-sequence")):
        with pytest.raises(TriptychError, match=f"has no {missing}"):
            Sampler(info, VOCAB_SIZE).check(params)


def test_the_tokenizer_is_read_at_the_first_grammar_and_grammars_are_compiled_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []
    original = GrammarCompiler._compile

    def count(self: GrammarCompiler, grammar: Grammar) -> Any:
        compiled.append(grammar)
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    sampler = Sampler(make_info(folder, eos=(END,)), VOCAB_SIZE)
    sampler.check(SamplingParams(allowed_token_ids=(3,)))
    assert sampler._grammars is None
    params = SamplingParams(grammar=Grammar("regex", "[0-9]+"))
    for _ in range(3):
        sampler.check(params)
        assert allowed(sampler, make_sequence(grammar=Grammar("regex", "[0-9]+"))) == set(b"0123456789")
    assert len(compiled) == 1


def test_a_logit_head_smaller_than_the_tokenizer_is_served(folder: Path) -> None:
    """A placeholder token may have no logit: masks are cut to the logits."""
    sampler = Sampler(make_info(folder, eos=(END - 1,)), FIRST_SPECIAL + 2)
    scores = torch.zeros(1, FIRST_SPECIAL + 2)
    sampler.apply_rules(scores, [make_sequence([1], b"a", grammar=Grammar("regex", "ab?"))])
    assert set((scores[0] > -torch.inf).nonzero().squeeze(1).tolist()) == {ord("b"), END - 1}


PIECES = ("<pad>", "</s>", "<unk>", "▁yes", "▁no", "yes", "no", "▁", "y", "e", "s")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    """As T5 and mBART have it: pieces of text, a leading "▁" where a word begins, no token for most bytes."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in PIECES[:3]])
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Sampler(make_info(folder, vocab_size=len(PIECES), eos=(1,)), len(PIECES))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], {"yes", "y", "no"}),
        (["y"], {"e"}),
        (["y", "e"], {"s"}),
        (["yes"], {"</s>", "▁no", "▁"}),
        (["yes", "▁"], {"no"}),
        (["yes", "▁no"], {"</s>"}),
    ],
)
def test_pieces_of_sentencepiece_are_taken_by_their_text(
    sentencepiece: Sampler, output: list[str], expected: set[str]
) -> None:
    grammar = Grammar("choice", '["yes", "no", "yes no"]')
    sequence = make_sequence([1], [PIECES.index(piece) for piece in output], grammar=grammar)
    scores = torch.zeros(1, len(PIECES))
    sentencepiece.apply_rules(scores, [sequence])
    assert {PIECES[token] for token in (scores[0] > -torch.inf).nonzero().squeeze(1).tolist()} == expected


def test_text_that_the_vocabulary_cannot_write_is_refused(sentencepiece: Sampler) -> None:
    with pytest.raises(TriptychError, match="no output can match it"):
        sentencepiece.check(SamplingParams(grammar=Grammar("json_object")))


def test_random_walks_never_leave_the_grammar(sampler: Sampler) -> None:
    """Whatever is allowed at each step leads on: no dead ends, whichever token is taken."""
    draw = random.Random(0)
    for _ in range(20):
        sequence = make_sequence(grammar=Grammar("regex", r"(ab|a(cd)+|[xy]z{2,3})(,[0-9]{1,2})*"), max_tokens=30)
        while sequence.num_output_tokens < 30:
            token = draw.choice(sorted(allowed(sampler, sequence)))
            sequence.token_ids.append(token)
            if token in (END, OTHER_END):
                break


def _longest(make: Callable[[int], str]) -> str:
    """The longest text within the limit that `make` makes of a number."""
    least, most = 1, MAX_GRAMMAR_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if len(make(middle)) <= MAX_GRAMMAR_BYTES else (least, middle - 1)
    return make(least)


def _rules(body: str) -> Callable[[int], str]:
    return lambda n: f'start:a0\na{n}:"x"\n' + "\n".join(f"a{i}:{body.format(i + 1)}" for i in range(n))


def _schemas(body: str) -> Callable[[int], str]:
    def make(n: int) -> str:
        links = ",".join(f'"{i}":' + body.replace("@", f'{{"$ref":"#/d/{i + 1}"}}') for i in range(n))
        return f'{{"$ref":"#/d/0","d":{{{links},"{n}":{{}}}}}}'

    return make


FOLLOWED: dict[str, Grammar] = {
    "rules": Grammar("grammar", _longest(_rules("a{}"))),
    "rules with text before": Grammar("grammar", _longest(_rules('"y" a{}'))),
    "rules with text behind": Grammar("grammar", _longest(_rules('a{} "y"'))),
    "items": Grammar("json_schema", _longest(_schemas('{"items":@}'))),
    "properties": Grammar("json_schema", _longest(_schemas('{"properties":{"a":@},"required":["a"]}'))),
}
REFUSED: dict[str, Grammar] = {
    "references": Grammar("json_schema", _longest(_schemas("@"))),
    "anyOf": Grammar("json_schema", _longest(_schemas('{"anyOf":[@]}'))),
    "allOf": Grammar("json_schema", _longest(_schemas('{"allOf":[@]}'))),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_chain_of_thousands_of_rules_ends_no_process(sampler: Sampler, name: str) -> None:
    sequence = make_sequence(grammar=FOLLOWED[name])
    sampler.check(sequence.sampling)
    generate(sampler, sequence, limit=20)
    assert sampler.error(sequence) is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_chain_of_schemas_to_be_merged_is_refused_and_ends_no_process(sampler: Sampler, name: str) -> None:
    with pytest.raises(TriptychError, match="stack level exceeded"):
        sampler.check(SamplingParams(grammar=REFUSED[name]))


def test_where_no_thread_can_be_had_a_grammar_is_refused_as_overload(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = threading.stack_size()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(TriptychError, match="no thread with a stack of 256 MiB") as caught:
        sampler.check(SamplingParams(grammar=Grammar("regex", "never seen before")))
    assert caught.value.info.code == "overloaded"
    assert threading.stack_size() == size


def test_a_rule_that_no_grammar_holds_is_left_out_of_forced_calls_but_for_strict_tools(sampler: Sampler) -> None:
    """As Pydantic writes a set and bytes, and what is not a value."""
    colours = {"type": "array", "items": {"enum": ["red"]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    properties = {"colours": colours, "data": {"enum": ["x"], "format": "binary"}, "not_one": {"not": {"const": 1}}}
    tools = {"paint": {"properties": properties, "required": ["colours"]}, "now": None}
    for name in ("paint", None):
        sampler.check(SamplingParams(grammar=call_grammar(tools, name)))
        sampler.check(SamplingParams(grammar=call_grammar({"now": None}, strict={"now"})))
        with pytest.raises(TriptychError, match="Unimplemented keys"):
            sampler.check(SamplingParams(grammar=call_grammar(tools, name, strict={"paint"})))
    grammar = call_grammar(tools, "paint")
    found = json.loads(generate(sampler, make_sequence(grammar=grammar, max_tokens=5000), 0, limit=5000))
    assert found["colours"] in (["red"], ["red", "red"])


@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_valid_calls_of_the_tools(sampler: Sampler, seed: int) -> None:
    """Objects have no properties but those of the schema, which is silent about further ones."""
    person = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    referring = {"properties": {"who": {"$ref": "#/$defs/person"}}, "required": ["who"]}
    tools = {
        "ask": {**referring, "$defs": {"person": person}},
        "tell": {"type": "object", "properties": {}},
        "now": None,
    }

    def calls(grammar: Grammar) -> list[dict[str, Any]]:
        return json.loads(generate(sampler, make_sequence(grammar=grammar, max_tokens=5000), seed, limit=5000))

    found = calls(call_grammar(tools))
    assert 1 <= len(found) <= 16
    for call in found:
        assert set(call["parameters"]) == ({"who"} if call["name"] == "ask" else set())
    parts = CallList().feed(json.dumps(found), final=True)
    assert [part.text for part in parts if part.kind == "call"] == [call["name"] for call in found]
    assert len(calls(call_grammar(tools, single=True))) == 1
    named = calls(call_grammar(tools, "ask"))
    assert set(named["who"]) == {"name", "age"}
    assert calls(call_grammar(tools, "now")) == {}, "a tool without parameters takes no arguments"
