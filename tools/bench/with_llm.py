"""The same engine in one process: `LLM`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from common.text import whisper_prompt
from engine.llm import LLM, RequestOutput
from tools.bench.client import Outcome
from tools.bench.workloads import BenchRequest


class LLMSystem:
    """Encoder and decoder take turns on all the cores; no process boundary, no network."""

    name = "LLM (one process)"

    def __init__(self, info: ModelInfo, dtype: str, num_threads: int, **engine: Any) -> None:
        """`engine` are further fields of EngineConfig."""
        self.llm = LLM(info.folder, dtype=dtype, num_threads=num_threads, **engine)
        self._rules: dict[str, Any] = {}
        if info.is_encoder_decoder:
            english = "en" if whisper_prompt.is_multilingual(info) else None
            _, self._rules = whisper_prompt.build(info, self.llm.text, language=english)

    def run(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        start_s = time.time()
        order = [self.llm.add(self._prompt(request), self._sampling(request)) for request in batch]
        outcomes: dict[str, Outcome] = {}
        while len(outcomes) < len(batch):
            for output in self.llm.step():
                outcomes[output.request_id] = _outcome(output, start_s)
        return [outcomes[request_id] for request_id in order]

    def close(self) -> None:
        del self.llm

    def _prompt(self, request: BenchRequest) -> Any:
        media: dict[str, Any] = {}
        if request.pictures:
            media["image"] = list(request.pictures)
        if request.clip:
            media["audio"] = request.clip
        return {"prompt_token_ids": request.prompt_token_ids, "multi_modal_data": media}

    def _sampling(self, request: BenchRequest) -> SamplingParams:
        own = {"temperature": 0.0, "max_tokens": request.max_tokens, "ignore_eos": request.ignore_eos}
        return SamplingParams(**{**self._rules, **own})


def _outcome(output: RequestOutput, start_s: float) -> Outcome:
    [completion] = output.outputs
    first_s = min((span.end_s for span in output.spans if span.stage == "prefill"), default=None)
    ttft_s = None if first_s is None else first_s - start_s
    return Outcome(completion.text, len(completion.token_ids), time.time() - start_s, ttft_s, output.request_id)
