"""Make requests of incoming messages: checked, and reduced to this engine's share of the work."""

from __future__ import annotations

import random
from collections.abc import Sequence as ListOf

import msgspec

from common.messages import InputSlot, Resumed
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from engine.core.request_limits import RequestLimits
from engine.sampling.sampler import Sampler
from engine.state.request import Request
from engine.state.spec import DecoderSpec


class RequestFactory:
    """Make the requests of an engine; `instance` names their spans."""

    def __init__(
        self, info: ModelInfo, spec: DecoderSpec, check: RequestLimits, sampler: Sampler, instance: str
    ) -> None:
        self._info = info
        self._spec = spec
        self._check = check
        self._sampler = sampler
        self._instance = instance

    def create(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        inputs: list[InputSlot],
        sampling: SamplingParams,
        arrival: int,
        priority: int,
        resumed: ListOf[Resumed],
        *,
        attempt: int,
        prefill_only: bool,
        prefilled: bool,
    ) -> Request:
        """Raises TriptychError where the request cannot be served, naming the value and the rule."""
        if sampling.uses_beams:
            resumed = ()  # nothing of a beam search has been told
        if prefill_only:
            sampling, resumed = _before_the_last_token(sampling), _known_to_all(resumed)
        elif prefilled:  # the log-probabilities of a prompt are known where it is computed
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self._check.check(prompt_token_ids, inputs, sampling)
        self._check.check_resumed(resumed, sampling, len(prompt_token_ids))
        self._sampler.check(sampling)
        return Request.create(
            request_id,
            prompt_token_ids,
            inputs,
            sampling=sampling,
            arrival=arrival,
            priority=priority,
            seed=sampling.seed if sampling.seed is not None else random.getrandbits(62),
            is_encoder_decoder=self._info.is_encoder_decoder,
            cross_attention=self._info.has_cross_attention,
            uses_mrope=self._spec.mrope_section is not None,
            instance=self._instance,
            resumed=tuple(resumed),
            prefill_only=prefill_only,
            prefilled=prefilled,
            attempt=attempt,
        )


def _known_to_all(resumed: ListOf[Resumed]) -> list[Resumed]:
    """Return the tokens beyond the prompt to prefill: the output of the only resumed sequence."""
    return [msgspec.structs.replace(resumed[0], index=0)] if len(resumed) == 1 else []


def _before_the_last_token(sampling: SamplingParams) -> SamplingParams:
    """Reduce sampling for a prefill-only request: a single sequence, without output rules."""
    return msgspec.structs.replace(sampling, n=1, beam_width=1, grammar=None)
