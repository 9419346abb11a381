"""What transformers answers with models of their full sizes, in float32, and how far bfloat16 takes it from that.

Weights are random. They and the answers are made once, under `.cache/real-sizes/`: on two cores that takes an hour.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, GenerationConfig, GenerationMixin

from common.sampling_params import Grammar
from tests.equality.cases import Case
from tests.gpu.test_engine import MARGIN_FACTOR, check_strayed

DEVICE: Final = os.environ.get("TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
TOY: Final = DEVICE == "cpu" and not os.environ.get("REAL_SIZES")
MAX_TOKENS: Final = 16
_ROOT: Final = Path(__file__).resolve().parents[2] / ".cache" / "real-sizes"
_ANSWERS: Final = "answers.pt"
_DRAWN: Final = "weights.stamp"
_SUPPRESSED: Final = ("suppress_tokens", "begin_suppress_tokens")
"""Rules of a request for its tokens, which Whisper's have."""
Ask: TypeAlias = Callable[[Sequence[Case]], Sequence[Sequence[int]]]
"""Answers requests that come at once, each with MAX_TOKENS tokens."""


@dataclass(frozen=True)
class Known:
    """Requests, what transformers in float32 thinks of each token of its answers [num_tokens, vocab_size], and how far
    its log-probabilities in bfloat16 stray from that [all tokens of the requests that were asked again]."""

    folder: Path
    cases: list[Case]
    scores: list[torch.Tensor]
    rounding: npt.NDArray[np.float64]

    def check_all_tokens(self, ask: Ask) -> None:
        """Every token, of all requests at once. Behind another one that is as good, a request is asked again alone,
        and its answer goes on from float32's token."""
        for case, scores, answer in zip(self.cases, self.scores, ask(self.cases), strict=True):
            others = [self._first_other(case.expected, scores, answer)]
            while (given := others[-1] + 1) < len(case.expected):
                [answer] = ask([begun(case, case.expected[:given])])
                assert list(answer[:given]) == case.expected[:given], "begins otherwise than it was told"
                others.append(self._first_other(case.expected, scores, answer))
            ties = sum(other < len(case.expected) for other in others)
            print(f"{len(case.expected)} tokens, {ties} others as good")

    def _first_other(self, expected: Sequence[int], scores: torch.Tensor, answer: Sequence[int]) -> int:
        """Return the place of the first token that is not float32's but as good, the number of all without any."""
        pairs = list(zip(expected, answer, strict=False))
        first = next((number for number, (one, other) in enumerate(pairs) if one != other), len(expected))
        if first == len(expected):
            assert len(answer) == first
            return first
        preference = scores[first, expected[first]] - scores[first, answer[first]]
        assert preference <= MARGIN_FACTOR * self.rounding.max(), f"token {first} of {len(expected)}"
        return first

    def check_logprobs(self, got: npt.NDArray[np.float64]) -> None:
        """`got` are those of all tokens of all answers."""
        tokens = [torch.tensor(case.expected) for case in self.cases]
        sure = [scores.gather(1, ids[:, None])[:, 0] for scores, ids in zip(self.scores, tokens, strict=True)]
        check_strayed(np.abs(got - torch.cat(sure).double().numpy()), self.rounding)


def begun(case: Case, token_ids: Sequence[int]) -> Case:
    """The same request, whose answer has to begin with these tokens: a grammar says so, for `LLM` and over HTTP.

    A prompt that ends with them would be another request: rules for a first token would hold behind them. And texts in
    a conversation need not become the same tokens again. A clip is sent in a conversation, which takes a grammar.
    """
    grammar = f"start: {' '.join(f'<[{token}]>' for token in token_ids)} <[*]>*"
    http = dict(case.http)
    if "file" in http:
        clip = {"data": base64.b64encode(case.media[0]).decode(), "format": "wav"}
        messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": clip}]}]
        http = {"messages": messages, "extra_body": {"language": http["language"]}}
    http["extra_body"] = {**http.get("extra_body", {}), "structured_outputs": {"grammar": grammar}}
    return replace(case, rules={**case.rules, "grammar": Grammar("grammar", grammar)}, http=http)


def model_folder(name: str, temporary: Path) -> Path:
    """Where a model lies: for good, if it is large."""
    return temporary if TOY else _ROOT / f"{name}-{DEVICE}"


def draw_weights(folder: Path, loader: Any) -> None:
    """Write weights as transformers draws them for a training, in bfloat16, unless they are there."""
    if (folder / _DRAWN).exists():
        return
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = loader.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    small = {path: path.read_bytes() for path in folder.glob("*.json")}
    model.save_pretrained(folder)
    for path, content in small.items():  # transformers writes them in its own words, and the answers go by them
        path.write_bytes(content)
    (folder / _DRAWN).touch()


def known(
    folder: Path,
    loader: Any,
    make_inputs: Callable[[Any, Case], dict[str, Any]],
    cases: list[Case],
    asked_again: Sequence[int] | None = None,
) -> Known:
    """Ask transformers, or read what it said to the same requests of the same model.

    `asked_again`: the requests that bfloat16 is asked, too; all of them without it.
    """
    asked = _digest(folder, cases)
    if (folder / _ANSWERS).exists():
        kept = torch.load(folder / _ANSWERS)
        if kept.pop("asked") == asked:
            answered = [replace(case, expected=ids) for case, ids in zip(cases, kept["expected"], strict=True)]
            return Known(folder, answered, kept["scores"], kept["rounding"].numpy())
    answered, scores = _answers(_load(loader, folder, torch.float32), make_inputs, cases)
    release()
    again = range(len(cases)) if asked_again is None else asked_again
    pairs = [(answered[number], scores[number]) for number in again]
    rounding = _rounding(_load(loader, folder, torch.bfloat16), make_inputs, pairs)
    release()
    expected = [case.expected for case in answered]
    kept = {"asked": asked, "expected": expected, "scores": scores, "rounding": rounding}
    torch.save(kept, folder / _ANSWERS)
    return Known(folder, answered, scores, rounding.numpy())


def release() -> None:
    """Give back what is no longer used."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def _digest(folder: Path, cases: Iterable[Case]) -> str:
    """Of a model's small files and of the requests."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*config.json")):
        digest.update(path.read_bytes())
    for case in cases:
        for part in (repr((case.prompt, case.rules)).encode(), *case.media):
            digest.update(part)
    return digest.hexdigest()


def _load(loader: Any, folder: Path, dtype: torch.dtype) -> Any:
    return loader.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()


@torch.inference_mode()
def _answers(
    model: Any, make_inputs: Callable[[Any, Case], dict[str, Any]], cases: Iterable[Case]
) -> tuple[list[Case], list[torch.Tensor]]:
    answered, scores = [], []
    for case in cases:
        began_s = time.monotonic()
        never = {name: list(case.rules.get(name, ())) or None for name in _SUPPRESSED}
        rules = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, **never)
        options = {"generation_config": rules, "output_logits": True, "return_dict_in_generate": True}
        told = GenerationMixin.generate(model, **make_inputs(model, case), **options)
        answered.append(replace(case, expected=told.sequences[0, -MAX_TOKENS:].tolist()))
        scores.append(torch.cat(told.logits).float().log_softmax(-1).cpu())
        print(f"transformers, float32: request {len(scores)} in {time.monotonic() - began_s:.1f} s", flush=True)
    return answered, scores


@torch.inference_mode()
def _rounding(
    model: Any,
    make_inputs: Callable[[Any, Case], dict[str, Any]],
    answered: Iterable[tuple[Case, torch.Tensor]],
) -> torch.Tensor:
    """What the model in half precision thinks of the tokens, less what float32 thinks: [all tokens], at least 0."""
    rounding = []
    for case, sure in answered:
        began_s = time.monotonic()
        inputs = make_inputs(model, replace(case, prompt=[*case.prompt, *case.expected]))
        with _products_in_float32():
            logits = model(**inputs).logits[0, -MAX_TOKENS - 1 : -1]
        ids = torch.tensor(case.expected)[:, None]
        rounding.append((logits.float().log_softmax(-1).cpu().gather(1, ids) - sure.gather(1, ids)).abs()[:, 0])
        print(f"transformers, bfloat16: request {len(rounding)} in {time.monotonic() - began_s:.1f} s", flush=True)
    return torch.cat(rounding).double()


@contextmanager
def _products_in_float32() -> Iterator[None]:
    """Multiply bfloat16 in float32 and round the results, where PyTorch would multiply element by element (x86 without
    AVX-512): ten times as fast."""

    def widened(function: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        wide = [_float32(value) for value in args]
        return function(*wide, **{name: _float32(value) for name, value in options.items()}).to(args[0].dtype)

    with ExitStack() as stack:
        if DEVICE == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            for name in ("linear", "scaled_dot_product_attention"):
                function = partial(widened, getattr(torch.nn.functional, name))
                stack.enter_context(mock.patch.object(torch.nn.functional, name, function))
        yield


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
