"""The `quantization_config` of a model's config.json: which formats of quantised weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import TriptychError

SUPPORTED: Final = "awq, gptq, fp8, compressed-tensors"
_PACKED: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Quantisation:
    """How weights are stored. `bits` of integers that a checkpoint does not tell by itself, else 0.

    `zero_offset` is added to stored zero points. `block` holds the rows and columns that share a scale of fp8 weights,
    where these are blocks.
    """

    method: str
    bits: int = 0
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_quantisation(config: Mapping[str, Any], name: str) -> Quantisation | None:
    """Return the format of a model's weights; None for plain ones.

    Raises TriptychError("model_not_found") naming what is not supported.
    """
    given = {**(config.get("text_config") or {}), **config}.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "unknown"))
    reader = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}.get(method)
    if reader is None:
        raise _refused(name, f"quantization_config method {method} is not supported; supported: {SUPPORTED}")
    try:
        return reader(given)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise _refused(name, f"{method} {error}") from error


def _refused(name: str, why: str) -> TriptychError:
    return TriptychError("model_not_found", f"the weights of {name} are quantised: {why}", "model")


def _need(given: Mapping[str, Any], key: str, default: Any, supported: tuple[Any, ...]) -> Any:
    value = default if given.get(key) is None else given[key]
    if value not in supported:
        words = ", ".join(map(str, supported))
        raise ValueError(f"with {key} {value} is not supported; supported: {words}")
    return value


def _awq(given: Mapping[str, Any]) -> Quantisation:
    _need(given, "version", given.get("format") or "gemm", ("gemm", "GEMM"))
    return Quantisation("awq", bits=_need(given, "bits", given.get("w_bit"), (4,)))


def _gptq(given: Mapping[str, Any]) -> Quantisation:
    if given.get("dynamic"):
        raise ValueError("with other settings for some layers (dynamic) is not supported")
    is_v1 = _need(given, "checkpoint_format", given.get("format") or "gptq", ("gptq", "gptq_v2")) == "gptq"
    return Quantisation("gptq", bits=_need(given, "bits", None, (4, 8)), zero_offset=int(is_v1))


def _fp8(given: Mapping[str, Any]) -> Quantisation:
    _need(given, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    return Quantisation("fp8", block=_block(given.get("weight_block_size")))


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    rows, columns = (int(one) for one in size)
    if rows < 1 or columns < 1 or columns % 32:
        raise ValueError(f"with blocks of {size} weights is not supported; supported: a multiple of 32 columns")
    return rows, columns


def _compressed(given: Mapping[str, Any]) -> Quantisation:
    _need(given, "format", None, _PACKED)
    _need(given, "quantization_status", "compressed", ("compressed", "frozen"))
    groups = [group["weights"] for group in given["config_groups"].values() if group.get("weights")]
    for weights in groups:
        _need(weights, "num_bits", None, (4, 8))
        _need(weights, "strategy", None, ("tensor", "channel", "group", "block"))
    blocks = {_block(weights.get("block_structure")) for weights in groups} or {None}
    if len(blocks) > 1:
        raise ValueError("with blocks of several sizes is not supported")
    return Quantisation("compressed-tensors", block=blocks.pop())
