"""Constrained output: tokens allowed by a JSON schema, a regular expression, a grammar or a list of choices.

The grammars are those of llguidance, which computes each step's mask when it is needed. Loaded at the first
constrained request; the tokenizer is read without transformers.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final, cast

import llguidance
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from common.errors import ErrorInfo, TriptychError
from common.model_info import ModelInfo
from common.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from engine.sampling.big_stack_thread import call_deep

MAX_CACHED: Final = 32
"""Compiled grammars kept for further requests, the least recently used go first."""
_COMPACT: Final[Any] = {"whitespace_flexible": False}
"""JSON without blanks: where they are allowed, a small model writes newlines to its limit. A schema's own `x-guidance`
wins."""

BoolArray = npt.NDArray[np.bool_]


class GrammarMatcher:
    """State of a sequence in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token_id: int) -> None:
        """Accept a generated token. Tokens after the end of the grammar are ignored."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def allowed(self) -> BoolArray:
        """Return the mask of allowed next tokens, [vocab_size]; end-of-sequence tokens if the grammar may end."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # A model may have more logits than its tokenizer has tokens, or fewer: unpackbits pads and cuts.
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def error(self) -> ErrorInfo | None:
        """Why the sequence cannot go on: a limit of the library was hit, or a token did not fit."""
        if not self._matcher.is_error():
            return None
        message = f"the output cannot follow the grammar any further: {_first_line(self._matcher.get_error())}"
        return ErrorInfo("invalid_request", message, "grammar")


class PieceTokenizer:
    """A SentencePiece vocabulary for llguidance: the bytes of every token. "▁" in a piece is a space."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        vocab = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = [b""] * (max(vocab.values()) + 1)
        for piece, token_id in vocab.items():
            self.tokens[token_id] = piece.replace("▁", " ").encode()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        specials = set(self.special_token_ids)
        self._ids = {piece: token_id for token_id, piece in enumerate(self.tokens) if token_id not in specials}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of forced text: the longest matches, byte for byte.

        The tokenizer itself would put a space before the text and normalise it.
        """
        token_ids, begin = [], 0
        while begin < len(text):
            sizes = range(min(self._longest, len(text) - begin), 0, -1)
            size = next((size for size in sizes if text[begin : begin + size] in self._ids), None)
            if size is None:  # no token has this byte: nothing leads on from here
                break
            token_ids.append(self._ids[text[begin : begin + size]])
            begin += size
        return token_ids


class GrammarCompiler:
    """Compile grammars for a model's tokenizer.

    The cost of a hostile grammar is bounded. MAX_GRAMMAR_BYTES limits its text, and the stack of `call_deep` the depth
    of references between rules. llguidance limits nesting, size (500,000 symbols), the building of the lexer (about
    20 ms), the work of each step (under 0.1 s at worst) and the lexer's states in memory (50,000, about 20 MB).
    A grammar over a limit is refused. A limit reached only while generating ends the request with an error.
    """

    def __init__(self, info: ModelInfo, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = _load_tokenizer(info, vocab_size)
        self._limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        self._compiled = lru_cache(MAX_CACHED)(lambda grammar: call_deep(lambda: self._compile(grammar)))

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the beginning of the grammar.

        Raises TriptychError: "invalid_request" saying what is wrong with the grammar, or that nothing matches it;
        "overloaded" where the system has no thread to compile it.
        """
        return self._compiled(grammar).copy()

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        size = len(grammar.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _refused(grammar, f"{size} bytes are over the limit of {MAX_GRAMMAR_BYTES}")
        matcher = llguidance.LLMatcher(self._tokenizer, _to_llguidance(grammar), log_level=0, limits=self._limits)
        started = GrammarMatcher(matcher, self._vocab_size)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error().strip())
        first = np.flatnonzero(started.allowed())
        # A vocabulary that lacks a byte of the grammar may get a mask, but no token of it is then taken.
        if not len(first) or matcher.is_error() or not matcher.validate_tokens([int(first[0])]):
            raise _refused(grammar, f"no output can match it ({_first_line(matcher.get_error()) or 'nothing allowed'})")
        return started


def _to_llguidance(grammar: Grammar) -> str:
    if grammar.kind == "choice":
        _check_choices(grammar)
    try:
        if grammar.kind in ("json_object", "json_schema"):
            schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
            schema = "{}" if schema.strip() == "true" else schema  # options need an object
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_COMPACT))
        is_lark = grammar.kind == "grammar" and "::=" not in grammar.text  # the library overlooks Lark's `?start`
        return llguidance.grammar_from("lark" if is_lark else cast(Any, grammar.kind), grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, str(error)) from error


def _check_choices(grammar: Grammar) -> None:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, f"not a JSON list of strings: {error}") from error
    if not (isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices)):
        raise _refused(grammar, "it must be a JSON list of at least one string, none of them empty")


def _refused(grammar: Grammar, why: str) -> TriptychError:
    return TriptychError("invalid_request", f"the {grammar.kind} of the request was refused: {why[:500]}", "grammar")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _load_tokenizer(info: ModelInfo, vocab_size: int) -> llguidance.LLTokenizer:
    path = info.folder / "tokenizer.json"
    eos_token_ids = [token for token in info.eos_token_ids if token < vocab_size]
    if not path.is_file() or not eos_token_ids:
        missing = "end-of-sequence token" if path.is_file() else "tokenizer.json"
        raise TriptychError("invalid_request", f"{info.name} has no {missing}: it cannot follow a grammar", "grammar")
    text = path.read_text()
    decoder = json.loads(text).get("decoder") or {}
    try:
        if decoder.get("type") == "Metaspace":  # T5, mBART: llguidance reads byte-level and byte-fallback ones itself
            wrapper = llguidance.TokenizerWrapper(PieceTokenizer(Tokenizer.from_str(text), eos_token_ids[0]))
            return llguidance.LLTokenizer(wrapper, eos_token=eos_token_ids)
        return llguidance.LLTokenizer(text, eos_token=eos_token_ids)
    except ValueError as error:
        message = f"the tokenizer of {info.name} cannot follow a grammar: {error}"
        raise TriptychError("invalid_request", message, "grammar") from error
