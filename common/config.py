"""Configuration: command-line flags over environment (TRIPTYCH_*) over one file (triptych.toml) over defaults."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

_NAME: Final = re.compile("[A-Za-z0-9_.-]+")

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
MediaScheme = Literal["data", "http", "https"]
PreemptionPolicy = Literal["auto", "recompute", "swap"]
Transport = Literal["auto", "shm", "zmq", "redis", "nixl", "cuda"]


class EngineConfig(BaseModel):
    """Sizes of one worker's engine. Bytes and tokens, never blocks of unknown size."""

    device: Device = "auto"
    dtype: DType = Field("auto", description="auto: the checkpoint's own on CUDA, float32 on a CPU.")
    load_format: LoadFormat = Field(
        "auto", description="dummy: random weights instead of the checkpoint's, to measure speed and memory."
    )
    block_size: int = Field(16, ge=1, le=256, description="Token slots in one KV block.")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the memory that a worker takes: of the device on CUDA (0.9 if not given, weights "
        "included), of what is free once the weights are loaded on a CPU (0.5).",
    )
    memory_bytes: int | None = Field(
        None, ge=1, description="Memory of a worker beside its weights, instead of a share of what there is."
    )
    process_bytes: int | None = Field(
        None,
        ge=0,
        description="What a worker takes of a GPU beside torch's tensors: CUDA itself, and the memory that tensors "
        "travel by; if not given, 768 MiB, and what NIXL takes for tensors between GPUs.",
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="Budget of the KV block pool; if not given, what is left, measured at start."
    )
    encoder_cache_bytes: int | None = Field(
        None, ge=1, description="Budget of encoder outputs not yet consumed; if not given, an eighth of what is left."
    )
    encoder_output_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="Budget of outputs that an encoder worker keeps for the next ones who need them; if not given, "
        "256 MiB, on a CPU at most a sixteenth of what it may take. 0 keeps none.",
    )
    prefix_caching: bool = Field(True, description="Find the KV blocks of prompts that begin alike.")
    preemption: PreemptionPolicy = Field(
        "auto", description="What happens to a request that loses its blocks: swapped to the host, or computed again."
    )
    swap_bytes: int | None = Field(
        None,
        ge=0,
        description="Host memory for swapped KV blocks, taken when needed; if not given, a sixteenth of what is free, "
        "at most 128 MiB on a CPU and 4 GiB on CUDA.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at once; a request has n, or its beams.")
    max_num_batched_tokens: int = Field(
        1024, ge=1, description="Token budget of one step, prefill and decode together."
    )
    async_scheduling: bool | None = Field(
        None,
        description="Schedule and launch a step before it is known what the last one has given; if not given, on CUDA.",
    )
    max_model_len: int | None = Field(None, ge=1, description="Context length; the model's own if not given.")
    max_waiting: int = Field(4096, ge=1, description="Requests that may wait; more are refused as overloaded.")
    encoder_batch_items: int = Field(8, ge=1, description="Items in one encoder batch.")
    encoder_batch_bytes: int | None = Field(
        None, ge=1, description="Output bytes of one encoder batch; if not given, 2 MiB on a CPU and 64 MiB on CUDA."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the engine.")
    attention_backend: str = Field(
        "auto", description="Name of the attention backend; auto chooses by device, dtype and phase."
    )
    enforce_eager: bool = Field(
        False, description="Compute every step anew: no CUDA graphs for decode steps. Slower, and starts sooner."
    )


class Settings(BaseSettings):
    """Everything a Triptych process can be told. Nested values: TRIPTYCH_ENGINE__MAX_NUM_SEQS=32."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_", env_nested_delimiter="__", extra="forbid")

    model: str = Field("signpost", description="Hub id, folder, or the name of a bundled model.")
    served_model_name: str | None = Field(None, description="Name in the API; the model's own if not given.")
    topology: str | None = Field(None, description="Such as 1e1pd, 1e1p1d or 1epd; the model's usual one if not given.")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI API; 0 picks a free one.")
    broker: str | None = Field(
        None,
        description="redis:// or rediss:// URL, with its password if it has one; an embedded broker is started if not "
        "given. Secret: comes from the environment or the file where it has a password.",
        repr=False,
    )
    cluster: str = Field("triptych", max_length=64, description="Key prefix in the broker: one per cluster.")
    cluster_key: SecretStr | None = Field(
        None, min_length=1, description="64 hexadecimal digits that all processes of the cluster share."
    )
    cluster_key_file: Path | None = Field(None, description="File with the cluster key instead.")
    api_key: SecretStr | None = Field(None, min_length=1, description="Key that clients of the API must send.")
    api_key_file: Path | None = Field(None, description="File with such keys, one per line.")
    metrics_without_key: bool = Field(False, description="Serve /metrics to everybody, whatever keys there are.")
    instance_id: str | None = Field(
        None, max_length=128, description="Name of this process in the cluster; one is made up if not given."
    )
    advertise_host: str | None = Field(None, description="Address under which other hosts reach this process.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    preprocess_workers: int = Field(1, ge=1, description="Processes that preprocess media on an encoder.")
    encoder_fallback: bool = Field(
        False, description="Let a worker that prefills encode the inputs of its requests while there is no encoder."
    )
    transport: Transport = Field(
        "auto",
        description="How tensors travel; auto: CUDA between GPUs of a host, NIXL where RDMA is between them, "
        "shared memory between processes of a host, else ZMQ.",
    )
    handoff_timeout_s: float = Field(30.0, gt=0, description="Longest wait for one step of a handoff.")
    step_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest step of an engine, loading not included: a worker that is longer in one has hung. It "
        "leaves the cluster, and ends with status 1.",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Longest life of a request in the proxy.")
    max_inflight: int = Field(1024, ge=1, description="Requests in the proxy at once; more get 429.")
    max_inflight_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of request bodies and media in the proxy at once; more get 429. If not given, a quarter of "
        "the memory that is free at start.",
    )
    max_queue_s: float = Field(
        10.0,
        gt=0,
        description="Longest expected wait for a first token, in seconds; while it is longer, new requests get 429. "
        "Bursts are taken in whole. For good answers under overload: half of what a user would wait.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="HTTP connections of a process at once, at most half of its descriptors; beyond it an idle one is "
        "closed for a new one.",
    )
    client_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Longest wait for the head of an HTTP request, and period in which at least 500 bytes per second "
        "of its body come.",
    )
    max_body_bytes: int = Field(128 * 2**20, ge=1, description="Largest HTTP request body.")
    max_media_bytes: int = Field(32 * 2**20, ge=1, description="Largest picture or audio file.")
    max_media_items: int = Field(16, ge=1, description="Pictures and clips in one request.")
    media_timeout_s: float = Field(10.0, gt=0, description="Longest fetch of one media URL.")
    allowed_media_schemes: Annotated[tuple[MediaScheme, ...], NoDecode] = Field(
        ("data", "http", "https"), description="Schemes that media URLs may have, separated by commas."
    )
    allowed_media_folder: Path | None = Field(
        None, description="file: URLs may name media below this folder; without it, they may name none."
    )
    allow_private_media_urls: bool = Field(False, description="Let media URLs point into private networks.")
    engine: EngineConfig = EngineConfig()

    @field_validator("instance_id", mode="before")
    @classmethod
    def _none_if_empty(cls, given: object) -> object:
        """As in an environment that passes on a variable which is not set."""
        return given or None

    @field_validator("cluster", "instance_id")
    @classmethod
    def _part_of_keys(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("has to consist of letters, digits, '_', '.' and '-', for it becomes part of keys")
        return name

    @field_validator("allowed_media_schemes", mode="before")
    @classmethod
    def _separated_by_commas(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = Path(os.environ.get("TRIPTYCH_CONFIG", "triptych.toml"))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)
