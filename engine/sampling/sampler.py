"""From logits to the next token of every sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import Request

_MIX = 0x9E3779B97F4A7C15  # odd, so that (seed, position) -> generator seed keeps neighbours apart
_MASK = (1 << 63) - 1


class Sampler:
    """Greedy and random choice. What a request draws depends on its seed and its position alone, never on the batch,
    so another instance that takes a request over goes on with the same tokens."""

    def __init__(self) -> None:
        self._generator = torch.Generator(device="cpu")

    def sample(self, logits: torch.Tensor, requests: Sequence[Request], seeds: Sequence[int]) -> list[int]:
        """logits [num_requests, vocab_size] (changed in place) -> one token id per request."""
        for row, request in enumerate(requests):
            _apply_rules(logits[row], request)
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for row, request in enumerate(requests):
            if not request.sampling.greedy:
                tokens[row] = self._draw(logits[row].float().cpu(), request, seeds[row])
        return tokens

    def _draw(self, logits: torch.Tensor, request: Request, seed: int) -> int:
        """Exponential race: argmax of p / e with e ~ Exp(1) draws from p (the Gumbel-max trick without logarithms)."""
        params = request.sampling
        probabilities = torch.softmax(_keep_likeliest(logits / params.temperature, params.top_k, params.top_p), dim=-1)
        self._generator.manual_seed((seed ^ (request.num_output_tokens + 1) * _MIX) & _MASK)
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int((probabilities / noise).argmax())


def _apply_rules(logits: torch.Tensor, request: Request) -> None:
    """Forced, allowed and suppressed tokens of one sequence; logits [vocab_size] in place."""
    params, position = request.sampling, request.num_output_tokens
    if position < len(params.prefix_allowed):
        allowed = torch.tensor(params.prefix_allowed[position], device=logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
        return
    if params.suppress_tokens:
        logits[torch.tensor(params.suppress_tokens, device=logits.device)] = float("-inf")
    if params.begin_suppress_tokens and position == len(params.prefix_allowed):
        logits[torch.tensor(params.begin_suppress_tokens, device=logits.device)] = float("-inf")


def _keep_likeliest(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """logits [vocab_size] with everything outside top-k and the nucleus (Holtzman et al., 2020) at -inf."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits = logits.index_fill(0, order[before >= top_p], float("-inf"))
    return logits
