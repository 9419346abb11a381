"""Settings as command-line options, each written once and taken by the commands that need it.

An option that is not given is None, so that environment and file count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from launch.cluster.configure import Flags

_SERVING, _KEYS, _ENGINE, _LIMITS = "Serving", "Keys", "Engine", "Logs and limits"


def parse_bytes(text: str) -> int:
    """A size such as `512MiB`, `2GiB` or a plain number of bytes. Raises typer.BadParameter."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size; write 512MiB, 2GiB or a number of bytes") from None


def _option(kind: Any, panel: str, help_text: str, default: str = "", names: tuple[str, ...] = (), **more: Any) -> Any:
    """The annotation of one option; `default` is what a person reads."""
    return Annotated[
        kind | None, typer.Option(*names, help=help_text, show_default=default or False, rich_help_panel=panel, **more)
    ]


def _size(panel: str, help_text: str, default: str) -> Any:
    return _option(int, panel, help_text, default, parser=parse_bytes, metavar="SIZE")


_OPTIONS: dict[str, Any] = {
    "topology": _option(
        str,
        _SERVING,
        "Instances of each role, e(ncode), p(refill), d(ecode), pd or epd in one: 2e1pd is two encoders, one worker.",
        "by the model: 1e1pd, 1pd for text, 2e1pd for speech",
    ),
    "host": _option(str, _SERVING, "Address to listen on.", "127.0.0.1"),
    "port": _option(int, _SERVING, "Port; 0 picks a free one.", "8000", min=0, max=65535, metavar="PORT"),
    "broker": _option(
        str,
        _SERVING,
        "URL of the broker, redis://host:6379 (with a password: by TRIPTYCH_BROKER); `serve` can start one.",
    ),
    "cluster": _option(str, _SERVING, "Key prefix in the broker: one for each cluster.", "triptych"),
    "served_model_name": _option(str, _SERVING, "Name in the API.", "the model's own"),
    "instance_id": _option(str, _SERVING, "Name of this process in the cluster.", "made up"),
    "advertise_host": _option(str, _SERVING, "Address under which other hosts reach this process.", "--host"),
    "cluster_key_file": _option(
        Path, _KEYS, "File with the key that the cluster's processes share.", "TRIPTYCH_CLUSTER_KEY; `serve` makes one"
    ),
    "api_key_file": _option(Path, _KEYS, "File with the keys that clients may send, one per line.", "TRIPTYCH_API_KEY"),
    "metrics_without_key": _option(bool, _KEYS, "Serve /metrics to everybody.", "no", ("--metrics-without-key",)),
    "engine.device": _option(str, _ENGINE, "Where the engine runs.", "auto", metavar="auto|cpu|cuda"),
    "engine.dtype": _option(
        str, _ENGINE, "auto: the checkpoint's own on CUDA, float32 on a CPU.", "auto", metavar="auto|float32|bfloat16|…"
    ),
    "engine.memory_fraction": _option(
        float,
        _ENGINE,
        "Share of the memory to take: of the GPU's, or of what is free on this machine.",
        "0.9 of a GPU, 0.5 on a CPU",
        min=0.01,
        max=1.0,
        metavar="SHARE",
    ),
    "engine.memory_bytes": _size(_ENGINE, "Memory of one worker beside its weights.", "by --memory-fraction"),
    "engine.kv_cache_bytes": _size(_ENGINE, "Budget of the KV cache.", "what is left"),
    "engine.encoder_cache_bytes": _size(
        _ENGINE, "Budget of encoder outputs on a prefill-decode worker.", "an eighth of what is left"
    ),
    "engine.encoder_output_cache_bytes": _size(
        _ENGINE,
        "Budget of outputs that an encoder keeps for the next ones; 0 keeps none.",
        "256MiB, a sixteenth at most on a CPU",
    ),
    "engine.swap_bytes": _size(_ENGINE, "Host memory for swapped KV blocks.", "a sixteenth, at most 128MiB on a CPU"),
    "engine.block_size": _option(int, _ENGINE, "Token slots in one KV block.", "16"),
    "engine.max_num_seqs": _option(int, _ENGINE, "Requests that run at once.", "64"),
    "engine.max_num_batched_tokens": _option(int, _ENGINE, "Token budget of one step.", "1024"),
    "engine.max_model_len": _option(int, _ENGINE, "Context length.", "the model's own"),
    "engine.encoder_batch_items": _option(int, _ENGINE, "Media items in one encoder batch.", "8"),
    "engine.num_threads": _option(int, _ENGINE, "CPU threads of a worker.", "a share of the cores"),
    "engine.attention_backend": _option(str, _ENGINE, "Attention backend.", "auto: by device, dtype and phase"),
    "engine.async_scheduling": _option(
        bool,
        _ENGINE,
        "Launch a step before the tokens of the last one are known.",
        "on CUDA",
        ("--async-scheduling/--no-async-scheduling",),
    ),
    "engine.enforce_eager": _option(bool, _ENGINE, "No CUDA graphs.", "no", ("--enforce-eager",)),
    "encoder_fallback": _option(
        bool,
        _ENGINE,
        "Encode media where the prompt is prefilled while there is no encoder.",
        "no",
        ("--encoder-fallback",),
    ),
    "preprocess_workers": _option(int, _ENGINE, "Processes that preprocess media on an encoder.", "1"),
    "max_inflight": _option(int, _LIMITS, "Requests in the proxy at once; more get 429.", "1024"),
    "max_inflight_bytes": _size(
        _LIMITS, "Bodies and media in the proxy at once; more get 429.", "a quarter of the free memory"
    ),
    "max_queue_s": _option(
        float, _LIMITS, "Longest expected wait for a first token, in seconds; new requests get 429 meanwhile.", "10"
    ),
    "max_connections": _option(int, _LIMITS, "Connections to one process at once; beyond, idle ones end.", "4096"),
    "client_timeout_s": _option(
        float, _LIMITS, "Longest time, in seconds, in which a client gets no further with what it sends.", "20"
    ),
    "max_body_bytes": _size(_LIMITS, "Largest HTTP request body.", "128MiB"),
    "max_media_bytes": _size(_LIMITS, "Largest picture or audio file.", "32MiB"),
    "max_media_items": _option(int, _LIMITS, "Pictures and clips in one request.", "16"),
    "allowed_media_schemes": _option(
        str, _LIMITS, "Schemes that media URLs may have.", "data,http,https", metavar="SCHEME,…"
    ),
    "allowed_media_folder": _option(Path, _LIMITS, "Let file: URLs name media below this folder.", "none"),
    "allow_private_media_urls": _option(
        bool, _LIMITS, "Let media URLs point into private networks.", "no", ("--allow-private-media-urls",)
    ),
    "transport": _option(
        str,
        _SERVING,
        "How tensors travel; auto: CUDA or RDMA (NIXL) between GPUs, shared memory on one host, ZMQ between hosts.",
        "auto",
        metavar="auto|shm|zmq|redis|nixl|cuda",
    ),
    "handoff_timeout_s": _option(float, _LIMITS, "Longest wait for one step of a handoff, in seconds.", "30"),
    "step_timeout_s": _option(
        float, _LIMITS, "Longest step of an engine, in seconds; a worker that is longer in one starts again.", "300"
    ),
    "request_timeout_s": _option(float, _LIMITS, "Longest life of a request, in seconds.", "600"),
    "log_level": _option(str, _LIMITS, "What is logged.", "info", metavar="debug|info|warning|error"),
    "log_format": _option(str, _LIMITS, "How it is logged.", "text", metavar="text|json"),
}
NETWORK = ("host", "port", "cluster")
KEYS = ("cluster_key_file", "api_key_file", "metrics_without_key")
ENGINE = (
    *(name for name in _OPTIONS if name.startswith("engine.")),
    "preprocess_workers",
    "encoder_fallback",
    "transport",
    "handoff_timeout_s",
    "step_timeout_s",
)
PROXY = (
    "served_model_name",
    "max_inflight",
    "max_inflight_bytes",
    "max_queue_s",
    "request_timeout_s",
    "max_connections",
    "client_timeout_s",
    "max_body_bytes",
    "max_media_bytes",
    "max_media_items",
    "allowed_media_schemes",
    "allowed_media_folder",
    "allow_private_media_urls",
)
LOGS = ("log_level", "log_format")


def takes_settings(*settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: adds an option for each of these settings to a command, which gets them as its argument `flags`."""
    names = {setting: setting.rpartition(".")[2] for setting in settings}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            flags: Flags = {setting: given.pop(name) for setting, name in names.items()}
            command(flags=flags, **given)

        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "flags"
        ]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_OPTIONS[setting])
            for setting, name in names.items()
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return run

    return decorate
