"""A cluster of real processes with its OpenAI client, and a look at everything that it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from redis import Redis

from common.config import EngineConfig, Settings
from common.messages import Role
from common.model_info import ModelInfo, load_model_info
from common.text.processor import TextProcessor
from launch.cluster.instance import Instance
from launch.cluster.local_cluster import LocalCluster
from launch.cluster.plan import Plan
from tests.equality.cases import Case
from tests.equality.runs import strip
from tools.soak import leak_check
from tools.soak.asks import WITHOUT_RULES

START_TIMEOUT_S = 150.0
ANSWER_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Answer:
    """What a client sees of an answer. `num_tokens` counts the end-of-sequence token, `token_ids` are without it.

    None is what the API does not tell: of a transcription why it ended, of a streamed one its tokens, of one in one
    piece how many there were.
    """

    text: str
    token_ids: list[int] | None
    num_tokens: int | None
    num_prompt_tokens: int | None
    finish_reason: str | None
    request_id: str = ""


class Served:
    """A running cluster. Clients are made per call: each test has an event loop of its own."""

    def __init__(
        self, cluster: LocalCluster, redis: Redis, info: ModelInfo, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.cluster, self.redis, self.info, self.timeout_s = cluster, redis, info, timeout_s
        self.text = TextProcessor(info)
        self.prefix = cluster.supervisor.plan.settings.cluster

    def client(self) -> openai.AsyncOpenAI:
        local = openai.DefaultAsyncHttpxClient(trust_env=False)  # a proxy from the environment cannot reach us
        url, timeout = f"{self.cluster.base_url}/v1", self.timeout_s
        return openai.AsyncOpenAI(base_url=url, api_key="none", timeout=timeout, max_retries=0, http_client=local)

    async def answer_all(self, cases: Sequence[Case], max_tokens: int, *, one_by_one: bool = False) -> list[Answer]:
        """Every case at once; or each as soon as the one before it has its first token: arrivals meet decoding."""
        async with self.client() as client:
            if not one_by_one:
                return list(await asyncio.gather(*(self.answer(client, case, max_tokens) for case in cases)))
            tasks: list[asyncio.Task[Answer]] = []
            for case in cases:
                begun = asyncio.Event()
                tasks.append(asyncio.create_task(self.stream(client, case, max_tokens, begun)))
                await asyncio.wait_for(begun.wait(), self.timeout_s)
            return list(await asyncio.gather(*tasks))

    async def answer(self, client: openai.AsyncOpenAI, case: Case, max_tokens: int) -> Answer:
        """One request, its answer in one piece."""
        if "file" in case.http:
            return await self._transcribe(client, case, max_tokens)
        create, options = self._completion(client, case, max_tokens)
        completion = await create(**options)
        [choice] = completion.choices
        text = choice.text if "prompt" in case.http else choice.message.content
        usage = (completion.usage.completion_tokens, completion.usage.prompt_tokens)
        return Answer(text or "", strip(self.info, choice.token_ids), *usage, choice.finish_reason, completion.id)

    async def choices(self, case: Case, **options: Any) -> list[Any]:
        """All choices of one request to the end of its tokens, with further options of the API."""
        extra = {"ignore_eos": True, **options.pop("extra_body", {}), **case.http.get("extra_body", {})}
        async with self.client() as client:
            create, usual = self._completion(client, case, 0)
            extra |= usual.pop("extra_body")
            return list((await create(**{**usual, **options, "extra_body": extra})).choices)

    async def stream(self, client: openai.AsyncOpenAI, case: Case, max_tokens: int, begun: asyncio.Event) -> Answer:
        """One request, its answer in pieces; `begun` is set at the first one, and at the end at the latest."""
        try:
            if "file" in case.http:
                return await self._stream_transcription(client, case, max_tokens, begun)
            return await self._stream_completion(client, case, max_tokens, begun)
        finally:
            begun.set()

    async def _stream_completion(
        self, client: openai.AsyncOpenAI, case: Case, max_tokens: int, begun: asyncio.Event
    ) -> Answer:
        create, options = self._completion(client, case, max_tokens)
        text, finish, usage, request_id = "", None, (0, 0), ""
        token_ids: list[int] = []
        async for chunk in await create(**options, stream=True, stream_options={"include_usage": True}):
            request_id = chunk.id
            for choice in chunk.choices:
                begun.set()
                text += (choice.text if "prompt" in case.http else choice.delta.content) or ""
                token_ids += choice.token_ids
                finish = choice.finish_reason or finish
            if chunk.usage is not None:
                usage = (chunk.usage.completion_tokens, chunk.usage.prompt_tokens)
        return Answer(text, strip(self.info, token_ids), *usage, finish, request_id)

    def _completion(self, client: openai.AsyncOpenAI, case: Case, max_tokens: int) -> tuple[Any, dict[str, Any]]:
        """The call of OpenAI's client for a case of text or pictures, and its arguments."""
        options = {"model": self.info.name, "temperature": 0, "max_tokens": max_tokens}
        options["extra_body"] = {"return_token_ids": True, **case.http.get("extra_body", {})}
        create = client.completions.create if "prompt" in case.http else client.chat.completions.create
        return create, {**options, **case.http, "extra_body": options["extra_body"]}

    async def _stream_transcription(
        self, client: openai.AsyncOpenAI, case: Case, max_tokens: int, begun: asyncio.Event
    ) -> Answer:
        create: Any = client.audio.transcriptions.create
        extra = {"max_completion_tokens": max_tokens, **WITHOUT_RULES}
        async for event in await create(model=self.info.name, **case.http, stream=True, extra_body=extra):
            begun.set()
            if event.type == "transcript.text.done":
                return Answer(event.text, None, None, None, None)
        raise AssertionError("the stream ended before the transcript did")

    async def _transcribe(self, client: openai.AsyncOpenAI, case: Case, max_tokens: int) -> Answer:
        create: Any = client.audio.transcriptions.create
        extra = {"max_completion_tokens": max_tokens, "return_token_ids": True, **WITHOUT_RULES}
        result = await create(model=self.info.name, **case.http, extra_body=extra)
        return Answer(result.text, result.token_ids, None, None, None, result._request_id or "")

    # --- what is held

    def gauges(self, instance_id: str) -> dict[str, float]:
        """All metrics of one instance without labels, by name without the prefix."""
        return leak_check.gauges(self.cluster.instances[instance_id], self.cluster.supervisor.plan.settings)

    def total(self, role: Role, name: str) -> float:
        """A metric, added up over the instances of a role."""
        found = [self.gauges(one.id)[name] for one in self.cluster.instances.values() if one.role == role]
        assert found, f"no instance is a {role} worker"
        return sum(found)

    def keys(self) -> list[str]:
        """The cluster's keys in Redis."""
        return sorted(key.decode() for key in self.redis.scan_iter(match=f"{self.prefix}:*"))

    async def wait_until_nothing_is_held(self) -> None:
        """Everything must come back within seconds; AssertionError with what has not."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while found := await asyncio.to_thread(leak_check.held, self.cluster):
            assert time.monotonic() < deadline_s, f"still held after {IDLE_TIMEOUT_S} s: {found}"
            await asyncio.sleep(0.1)
        decoding = [one for one in self.cluster.instances.values() if one.role not in ("proxy", "encoder")]
        for instance in decoding:
            numbers = self.gauges(instance.id)
            assert numbers["kv_blocks_free"] == numbers["kv_blocks_usable"]
            if instance.role != "encode_prefill_decode":
                assert numbers["encoder_computations"] == 0


@dataclass(frozen=True)
class UnevenPlan(Plan):
    """A plan whose roles do not all have KV blocks of the same size, in tokens."""

    block_sizes: Mapping[Role, int] = field(default_factory=dict)

    def instances(self, broker_url: str, logs: Path) -> list[Instance]:
        instances = super().instances(broker_url, logs)
        for instance in instances:
            if instance.role in self.block_sizes:
                instance.command.environment["TRIPTYCH_ENGINE__BLOCK_SIZE"] = str(self.block_sizes[instance.role])
        return instances


@contextmanager
def serve(
    folder: Path,
    broker_url: str,
    cluster: str,
    *,
    topology: str | None = None,
    block_sizes: Mapping[Role, int] | None = None,
    lora_modules: Mapping[str, Path] | None = None,
    timeout_s: float | None = None,
    **engine: Any,
) -> Iterator[Served]:
    """A cluster for the length of a `with` block; afterwards its processes and its keys are gone.

    `block_sizes` are those of roles that do not have `block_size`; `lora_modules` are adapters by name. `timeout_s` is
    for slow models: the longest answer, and the longest step of an engine.
    """
    slow = {} if timeout_s is None else {"request_timeout_s": timeout_s, "step_timeout_s": timeout_s}
    info = load_model_info(str(folder))
    settings = Settings(
        model=str(folder),
        port=0,
        broker=broker_url,
        cluster=cluster,
        topology=topology,
        lora_modules=tuple(f"{name}={path}" for name, path in (lora_modules or {}).items()),
        log_level="warning",
        engine=EngineConfig(**{"num_threads": 1, **engine}),
        **slow,
    )
    redis = Redis.from_url(broker_url)
    running = LocalCluster(settings, start_timeout_s=START_TIMEOUT_S)
    running.supervisor.plan = UnevenPlan(**vars(running.supervisor.plan), block_sizes=block_sizes or {})
    try:
        with running:
            served = Served(running, redis, info, timeout_s or ANSWER_TIMEOUT_S)
            processes = [instance.child for instance in running.instances.values()]
            yield served
        assert served.keys() == []
        assert not any(child is not None and child.running for child in processes)
    finally:
        redis.close()
