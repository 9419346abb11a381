"""Configuration: command-line flags over environment (TRIPTYCH_*) over one file (triptych.toml) over defaults.

The only definition of the settings: `launch.cli.options` derives flags and help from these fields,
`tools.house.pages` the reference page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from common.errors import closest

ENV_PREFIX: Final = "TRIPTYCH_"
DEFAULT_FILE: Final = "triptych.toml"
_SECRETS: Final = ("api_key", "cluster_key", "broker")
_NAME: Final = re.compile("[A-Za-z0-9_.-]+")

Device = Literal["auto", "cpu", "cuda"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "qwen3_coder"]
ReasoningParser = Literal["auto", "none", "think"]
GenerationConfigSource = Literal["auto", "none"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["int8"]
MediaScheme = Literal["data", "http", "https"]
AttentionBackendName = Literal["auto", "flashinfer", "native", "torch"]
PreemptionPolicy = Literal["auto", "recompute", "swap"]
Transport = Literal["auto", "shm", "zmq", "redis", "nixl", "cuda"]
Size = Annotated[ByteSize, AfterValidator(int)]
"""Bytes, written `512MiB`, `2GiB` or as a number; a plain int once read: MessagePack takes no subclass of int."""


def _setting(
    default: Any, meaning: str, panel: str | None = None, *, shown: str = "", metavar: str = "", **rules: Any
) -> Any:
    """Describe a setting.

    `panel` groups flags in the help; without a panel there is no flag. `shown` is the default for a person where the
    value None says too little.
    """
    extra: dict[str, Any] = {"panel": panel, "shown": shown, "metavar": metavar}
    return Field(default, description=meaning, json_schema_extra=extra, **rules)


class EngineConfig(BaseModel):
    """Sizes of a worker's engine, in bytes and tokens, never in blocks of unknown size."""

    model_config = ConfigDict(extra="forbid")

    device: Device = _setting("auto", "Device of the engine.", "Engine")
    dtype: DType = _setting("auto", "Precision; auto: the checkpoint's own on CUDA, float32 on a CPU.", "Engine")
    load_format: LoadFormat = _setting(
        "auto", "dummy: random weights instead of the checkpoint's, to measure speed and memory."
    )
    quantization: Quantization | None = _setting(
        None,
        "int8: keep the weights of the decoder's linear layers, the output head included, as 8-bit integers.",
        "Engine",
        shown="as the checkpoint has them",
    )
    block_size: int = _setting(16, "Token slots in one KV block.", "Engine", ge=1, le=256)
    memory_fraction: float | None = _setting(
        None,
        "Share of the memory for one worker: of the GPU's, weights included, or of the memory that is free on a CPU "
        "once the weights are loaded.",
        "Engine",
        shown="0.9 of a GPU, 0.5 on a CPU",
        metavar="SHARE",
        gt=0,
        le=1,
    )
    memory_bytes: Size | None = _setting(
        None, "Memory of one worker beside its weights, instead of a share.", "Engine", shown="by memory_fraction", ge=1
    )
    process_bytes: Size | None = _setting(
        None,
        "GPU memory of a worker beside torch's tensors: CUDA itself, and the buffers in which tensors travel.",
        shown="768MiB, and NIXL's buffers for tensors between GPUs",
        ge=0,
    )
    kv_cache_bytes: Size | None = _setting(
        None, "Budget of the KV cache.", "Engine", shown="the memory left, measured at start", ge=1
    )
    encoder_cache_bytes: Size | None = _setting(
        None,
        "Budget of encoder outputs not yet consumed on a prefill-decode worker.",
        "Engine",
        shown="an eighth of the memory left",
        ge=1,
    )
    encoder_output_cache_bytes: Size | None = _setting(
        None,
        "Budget of outputs that an encoder keeps for later requests; 0 keeps none.",
        "Engine",
        shown="256MiB, on a CPU at most a sixteenth of the worker's memory",
        ge=0,
    )
    prefix_caching: bool = _setting(True, "Reuse the KV blocks of prompts that begin alike.")
    preemption: PreemptionPolicy = _setting(
        "auto", "Treatment of a request that loses its blocks: swap them to the host, or recompute them."
    )
    swap_bytes: Size | None = _setting(
        None,
        "Host memory for swapped KV blocks, taken when needed.",
        "Engine",
        shown="a sixteenth of the memory left, at most 128MiB on a CPU and 4GiB on CUDA",
        ge=0,
    )
    max_loras: int = _setting(
        8, "LoRA adapters in memory, and so in one step; a request with another one waits.", "Engine", ge=1
    )
    max_num_seqs: int = _setting(64, "Sequences that run at once; a request has n, or its beams.", "Engine", ge=1)
    max_num_batched_tokens: int = _setting(
        1024, "Token budget of one step, prefill and decode together.", "Engine", ge=1
    )
    itl_objective_ms: float | None = _setting(
        None,
        "Longest step with decoding requests, in ms: prompts beside them are cut into chunks. 0: no limit.",
        "Engine",
        shown="four times a step without prompts, up to ten times while prompts wait; 0 in LLM",
        ge=0,
    )
    async_scheduling: bool | None = _setting(
        None, "Launch a step before the tokens of the last step are known.", "Engine", shown="on CUDA"
    )
    max_model_len: int | None = _setting(None, "Context length.", "Engine", shown="the model's own", ge=1)
    max_waiting: int = _setting(4096, "Requests that may wait; more are refused as overloaded.", ge=1)
    encoder_batch_items: int = _setting(8, "Media items in one encoder batch.", "Engine", ge=1)
    encoder_batch_bytes: Size | None = _setting(
        None, "Output bytes of one encoder batch.", shown="2MiB on a CPU, 64MiB on CUDA", ge=1
    )
    num_threads: int | None = _setting(
        None, "CPU threads of one worker.", "Engine", shown="under `serve` a share of the cores, else all cores", ge=1
    )
    attention_backend: AttentionBackendName = _setting(
        "auto", "Attention by flashinfer (CUDA), native (CPU) or torch; auto: by device, dtype and heads.", "Engine"
    )
    enforce_eager: bool = _setting(
        False, "Record no steps (CUDA graphs; calls on a CPU): slower, and starts sooner.", "Engine"
    )


class Settings(BaseSettings):
    """All settings of a Triptych process. Nested values: TRIPTYCH_ENGINE__MAX_NUM_SEQS=32."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid")

    model: str = _setting("signpost", "Hub id, folder, or name of a bundled model.")
    topology: str | None = _setting(
        None,
        "Instances of each role, e(ncode), p(refill), d(ecode), pd or epd in one: 2e1pd is two encoders, one worker.",
        "Serving",
        shown="by the model: 1e1pd, 1pd for text, 2e1pd for speech",
    )
    lora_modules: Annotated[tuple[str, ...], NoDecode] = _setting(
        (),
        "LoRA adapters, folders saved by PEFT, with names for the API: a request chooses one by model=MODEL:NAME.",
        "Engine",
        metavar="NAME=FOLDER,…",
    )
    host: str = _setting("127.0.0.1", "Address to listen on.", "Serving")
    port: int = _setting(
        8000, "Port of the OpenAI API; 0 picks a free port.", "Serving", metavar="PORT", ge=0, le=65535
    )
    broker: str | None = _setting(
        None,
        "URL of the broker: redis://host:6379, rediss:// or redis+sentinel://host:26379,host:26379/NAME. A URL with "
        "a password is a secret: give it by environment or file.",
        "Serving",
        shown="`serve` starts its own broker",
        repr=False,
    )
    cluster: str = _setting("triptych", "Key prefix in the broker, one per cluster.", "Serving", max_length=64)
    instance_id: str | None = _setting(
        None, "Name of this process in the cluster.", "Serving", shown="made up", max_length=128
    )
    advertise_host: str | None = _setting(
        None, "Address under which other hosts reach this process.", "Serving", shown="host"
    )
    cluster_key: SecretStr | None = _setting(
        None, "64 hexadecimal digits shared by all processes of the cluster.", shown="`serve` makes one", min_length=1
    )
    cluster_key_file: Path | None = _setting(None, "File with the cluster key instead.", "Keys")
    api_key: SecretStr | None = _setting(
        None, "Key that clients of the API must send.", shown="no key needed", min_length=1
    )
    api_key_file: Path | None = _setting(
        None, "File with the keys that clients may send, one per line; read again when it changes.", "Keys"
    )
    metrics_without_key: bool = _setting(False, "Serve /metrics to everybody, whatever keys there are.", "Keys")
    served_model_name: Annotated[tuple[str, ...] | None, NoDecode] = _setting(
        None,
        "Names of the model in the API, separated by commas or given several times; answers have the first.",
        "API",
        shown="the model's own",
        metavar="NAME,…",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = _setting(
        (),
        "Origins of web pages that may call the API from a browser (CORS), such as https://chat.example; * for all.",
        "API",
        metavar="ORIGIN,…",
    )
    chat_template: str | None = _setting(
        None,
        "Jinja template of conversations: a file, or the template itself.",
        "API",
        shown="the model's own",
        metavar="FILE|TEMPLATE",
    )
    tool_call_parser: ToolCallParser = _setting(
        "auto",
        "Form in which the model writes tool calls; auto: as its chat template shows them, none: as text.",
        "API",
    )
    reasoning_parser: ReasoningParser = _setting(
        "auto",
        "Form of reasoning; think: <think>…</think>, auto: by the chat template, none: reasoning stays text.",
        "API",
    )
    response_store_bytes: Size = _setting(
        ByteSize(0),
        "Memory for answers of /v1/responses that later requests continue; 0 keeps none.",
        "API",
        ge=0,
    )
    generation_config: GenerationConfigSource = _setting(
        "auto",
        "Temperature, top_p, top_k, min_p and repetition_penalty of requests without these; auto: the values of the "
        "model's generation_config.json, none: OpenAI's defaults.",
        "API",
    )
    max_inflight: int = _setting(
        1024, "Requests in all proxies of the cluster at once, shared out evenly; more get 429.", "API", ge=1
    )
    max_inflight_bytes: Size | None = _setting(
        None,
        "Request bodies and media in the proxy at once; more get 429.",
        "API",
        shown="a quarter of the memory free at start",
        ge=1,
    )
    max_queue_s: float = _setting(
        10.0,
        "Longest expected wait for a first token, in seconds; beyond, new requests get 429. For good answers under "
        "overload: half of the wait that a user accepts.",
        "API",
        gt=0,
    )
    request_timeout_s: float = _setting(600.0, "Longest life of a request in the proxy, in seconds.", "API", gt=0)
    max_connections: int = _setting(
        4096,
        "HTTP connections of a process at once, at most half of its descriptors; beyond, idle connections are closed.",
        "API",
        ge=1,
    )
    client_timeout_s: float = _setting(
        20.0,
        "Longest wait for the head of an HTTP request, in seconds, and the period in which at least 500 bytes per "
        "second of its body come.",
        "API",
        gt=0,
    )
    max_body_bytes: Size = _setting(ByteSize(128 * 2**20), "Largest HTTP request body.", "API", ge=1)
    max_media_bytes: Size = _setting(ByteSize(32 * 2**20), "Largest image or audio file, 64MiB at most.", "API", ge=1)
    max_media_items: int = _setting(16, "Images and audio files in one request.", "API", ge=1)
    max_video_bytes: Size = _setting(ByteSize(64 * 2**20), "Largest video file, 64MiB at most.", "API", ge=1)
    max_video_seconds: float = _setting(3600.0, "Longest video.", gt=0)
    max_video_frames: int = _setting(768, "Frames of one video that a model may be shown.", ge=1)
    max_video_pixels: int = _setting(3840 * 2160, "Pixels of one frame of a video.", ge=1)
    media_timeout_s: float = _setting(10.0, "Longest fetch of one media URL, in seconds.", gt=0)
    allowed_media_schemes: Annotated[tuple[MediaScheme, ...], NoDecode] = _setting(
        ("data", "http", "https"), "Schemes that media URLs may have, separated by commas.", "API", metavar="SCHEME,…"
    )
    allowed_media_folder: Path | None = _setting(
        None, "Folder below which file: URLs may name media.", "API", shown="file: URLs are refused"
    )
    allow_private_media_urls: bool = _setting(False, "Let media URLs point into private networks.", "API")
    preprocess_workers: int = _setting(1, "Processes that preprocess media on an encoder.", "Engine", ge=1)
    encoder_fallback: bool = _setting(
        False, "Let workers that prefill encode media while there is no encoder.", "Engine"
    )
    transport: Transport = _setting(
        "auto",
        "Transport of tensors; auto: CUDA or RDMA (NIXL) between GPUs, shared memory on one host, ZMQ between hosts.",
        "Engine",
    )
    handoff_timeout_s: float = _setting(30.0, "Longest wait for one step of a handoff, in seconds.", "Engine", gt=0)
    step_timeout_s: float = _setting(
        300.0,
        "Longest step of an engine, in seconds, loading not included; a worker beyond has hung, and is started again.",
        "Engine",
        gt=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least level of logged events.", "Logs")
    log_format: Literal["text", "json"] = _setting("text", "Format of the log.", "Logs")
    engine: EngineConfig = EngineConfig()

    @field_validator("instance_id", "served_model_name", "topology")
    @classmethod
    def _none_if_empty(cls, given: Any) -> Any:
        """Read an empty variable as none: Compose passes on unset variables as empty."""
        return given or None

    @field_validator("cluster", "instance_id")
    @classmethod
    def _part_of_keys(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("has to consist of letters, digits, '_', '.' and '-', for it becomes part of keys")
        return name

    @field_validator("allowed_media_schemes", "allowed_origins", "lora_modules", "served_model_name", mode="before")
    @classmethod
    def _separated_by_commas(cls, value: object) -> object:
        given = [value] if isinstance(value, str) else value
        if not (isinstance(given, list | tuple) and all(isinstance(text, str) for text in given)):
            return value
        return [part.strip() for text in given for part in text.split(",") if part.strip()]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = Path(os.environ.get(ENV_PREFIX + "CONFIG", DEFAULT_FILE))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


@dataclass(frozen=True)
class SettingInfo:
    """A setting as shown to a person: in the help and on the reference page."""

    name: str
    """Dotted, such as `engine.max_num_seqs`."""
    kind: Any
    """The type of a given value."""
    default: str
    meaning: str
    panel: str | None
    """Group of the flag; None for a setting without a flag."""
    metavar: str

    @property
    def parameter(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.parameter.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "__").upper()


def describe_settings(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[SettingInfo]:
    """Yield every setting in the order of the definition, the engine's last."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from describe_settings(field.annotation, f"{name}.")
            continue
        extra = cast(dict[str, Any], field.json_schema_extra)
        kind = field.annotation
        if get_origin(kind) in (Union, UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else ""
        metavar = "SIZE" if kind in (ByteSize, Size) else metavar
        default = extra["shown"] or _shown(field.default)
        yield SettingInfo(
            prefix + name, kind, default, field.description or "", extra["panel"], extra["metavar"] or metavar
        )


def explain(error: ValidationError, model: type[BaseModel], given: Container[str]) -> str:
    """Name all wrong values of a `model` in a single line: name, value, rule.

    Names not in `given` are from the environment or the file.
    """
    found = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            siblings = (EngineConfig if "." in name else model).model_fields
            where = "" if name in given else f" in {os.environ.get(ENV_PREFIX + 'CONFIG', DEFAULT_FILE)}"
            found.append(f"unknown setting {name!r}{where}{closest(str(detail['loc'][-1]), siblings)}")
        elif detail["type"] in ("byte_size", "byte_size_unit"):
            found.append(f"{name} = {detail['input']!r} is not a size; write 512MiB, 2GiB or a number of bytes")
        else:
            value = "(secret)" if name in _SECRETS else repr(detail["input"])
            found.append(f"{name} = {value}: {detail['msg'][0].lower()}{detail['msg'][1:]}")
    return "; ".join(found)


def _shown(value: Any) -> str:
    if isinstance(value, ByteSize):
        return value.human_readable(separator="").replace(".0", "")
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if value is None or isinstance(value, bool):
        return "yes" if value else "no" if value is False else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
