"""The systems that are compared: `LLM`, a cluster of processes, servers that run already, transformers' `generate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

import torch

from common.config import Device, EngineConfig, Settings
from common.errors import TriptychError
from common.model_info import ModelInfo
from common.sampling_params import SamplingParams
from common.text import whisper_prompt
from engine.device.choice import DTYPES, choose_device, choose_dtype
from engine.llm import LLM, RequestOutput
from launch.cluster.local_cluster import LocalCluster
from launch.cluster.shares import available_cores
from services.process.handoff_trace import hop_latencies
from tools.bench.client import LoadClient, Outcome, payload_of
from tools.bench.measure import in_waves
from tools.bench.transformers_system import TransformersSystem
from tools.bench.workloads import BenchRequest, Workload
from tools.soak.leak_check import ask

LLM_SHARE: Final = 0.25
CLUSTER_SHARE: Final = 0.4
"""Of a GPU's memory; the rest is transformers'."""


class LLMSystem:
    """The engine in one process: encoder and decoder take turns on all the cores."""

    name = "LLM (one process)"

    def __init__(self, info: ModelInfo, dtype: str, num_threads: int, **engine: Any) -> None:
        """`engine` are further fields of EngineConfig."""
        self._llm = LLM(info.folder, dtype=dtype, num_threads=num_threads, **engine)
        self._rules: dict[str, Any] = {}
        if info.is_encoder_decoder:
            english = "en" if whisper_prompt.is_multilingual(info) else None
            _, self._rules = whisper_prompt.build(info, self._llm.text, language=english)

    def run(self, requests: Sequence[BenchRequest], in_flight: int) -> list[Outcome]:
        return in_waves(self._answer, requests, in_flight)

    def close(self) -> None:
        del self._llm

    def _answer(self, batch: Sequence[BenchRequest]) -> list[Outcome]:
        start_s = time.time()
        order = [self._llm.add(_prompt(request), self._sampling(request)) for request in batch]
        outcomes: dict[str, Outcome] = {}
        while len(outcomes) < len(batch):
            for output in self._llm.step():
                outcomes[output.request_id] = _outcome(output, start_s)
        return [outcomes[request_id] for request_id in order]

    def _sampling(self, request: BenchRequest) -> SamplingParams:
        own = {"temperature": 0.0, "max_tokens": request.max_tokens, "ignore_eos": request.ignore_eos}
        return SamplingParams(**{**self._rules, **own})


def _prompt(request: BenchRequest) -> Any:
    media = {"image": list(request.pictures), "audio": request.clip}
    return {"prompt_token_ids": request.prompt_token_ids, "multi_modal_data": {k: v for k, v in media.items() if v}}


def _outcome(output: RequestOutput, start_s: float) -> Outcome:
    [completion] = output.outputs
    first_s = min((span.end_s for span in output.spans if span.stage == "prefill"), default=None)
    ttft_s = None if first_s is None else first_s - start_s
    return Outcome(completion.text, len(completion.token_ids), time.time() - start_s, ttft_s, output.request_id)


class ServerSystem:
    """A server of OpenAI's API, asked over HTTP as any client would. A new request is sent when one has ended."""

    def __init__(self, name: str, base_url: str, model: str | None = None, language: str | None = "en") -> None:
        """`model` is the server's name for the model, `language` that of audio where a model wants it said."""
        self.name = name
        self._model, self._language = model, language
        self._runner = asyncio.Runner()  # one loop and one client for all turns: connections stay open
        self._client = LoadClient(base_url)

    def run(self, requests: Sequence[BenchRequest], in_flight: int) -> list[Outcome]:
        """Raise TriptychError("unavailable") where one is not answered."""
        made = [self._client.build(*payload_of(request, self._model, self._language)) for request in requests]
        outcomes = self._runner.run(self._client.keep_in_flight(made, in_flight))
        for outcome in outcomes:
            if outcome.status != 200:
                raise TriptychError("unavailable", f"{self.name} answered {outcome.status}: {outcome.error}")
        return outcomes

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class ClusterSystem(ServerSystem):
    """Encoder, prefill-decode worker, proxy and broker, each a process, on this machine; asked in waves."""

    def __init__(self, info: ModelInfo, dtype: str, topology: str | None = None, **engine: Any) -> None:
        """Start the cluster. `engine` are further fields of EngineConfig."""
        config = EngineConfig.model_validate({"dtype": dtype, **engine})
        settings = Settings(model=str(info.folder), port=0, log_level="warning", engine=config)
        self._cluster = LocalCluster(settings, topology)
        self._cluster.start()
        super().__init__(f"cluster {self._cluster.supervisor.plan.topology}", self._cluster.base_url)

    def run(self, requests: Sequence[BenchRequest], in_flight: int) -> list[Outcome]:
        return in_waves(partial(super().run, in_flight=in_flight), requests, in_flight)

    def hops(self, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
        """Return seconds of every hop of the handoffs of answered requests, by "moment -> moment"."""
        asked, settings = {outcome.request_id for outcome in outcomes}, self._cluster.supervisor.plan.settings
        workers = [instance for instance in self._cluster.instances.values() if instance.role != "proxy"]
        entries = [ask(worker, "/debug/handoffs", settings).json() for worker in workers]
        return hop_latencies(
            [[entry for entry in side if entry["request_id"].partition(".")[0] in asked] for side in entries]
        )

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._cluster.stop()


@contextmanager
def lineup(
    workload: Workload, dtype: str = "auto", device: Device = "auto", topology: str | None = None
) -> Iterator[tuple[TransformersSystem, LLMSystem, ClusterSystem]]:
    """transformers' generate, `LLM` and a cluster for the length of a `with` block, all there at once.

    `dtype` auto is what the engine would choose on this device, for transformers, too. Raises
    TriptychError("invalid_request") for a dtype that there is not.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise TriptychError("invalid_request", f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}", "dtype")
    where, cores, info = choose_device(device), available_cores(), workload.info
    chosen = DTYPES[dtype] if dtype != "auto" else choose_dtype("auto", where, info)
    name = str(chosen).removeprefix("torch.")
    with (
        closing(TransformersSystem(info, chosen, cores, where.type)) as theirs,
        closing(LLMSystem(info, name, cores, **share_of(where, LLM_SHARE))) as llm,
        closing(ClusterSystem(info, name, topology, **share_of(where, CLUSTER_SHARE))) as cluster,
    ):
        yield theirs, llm, cluster


def share_of(device: torch.device, fraction: float) -> dict[str, Any]:
    """Fields of EngineConfig: the device and, of a GPU, a part of its memory."""
    return {"device": device.type, **({"memory_fraction": fraction} if device.type == "cuda" else {})}
