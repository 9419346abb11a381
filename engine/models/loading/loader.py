"""Load a checkpoint's tensors into a module built without memory: each weight is allocated once, in place."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from common.model_info import ModelInfo
from common.process.start_phase import tell_phase
from engine.models.base import CheckpointLayout, Sources, Zeros
from engine.models.checkpoint import Checkpoint
from engine.models.checkpoint_index import CheckpointError
from engine.models.layers import Linear
from engine.models.quantised.formats import decode_weight
from engine.models.quantised.names import UNREAD, check_quantised, is_quantised, parts_of
from engine.models.quantised.weight import CodedWeight, SmallWeight, quantise_int8, stacked

_ONLY_LINEAR: Final = "; only the linear layers of decoders may be quantised"


def load_weights(
    module: nn.Module,
    sources: Sources,
    layout: CheckpointLayout,
    info: ModelInfo,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tied: bool = False,
    as_int8: bool = False,
) -> int:
    """Replace the module's parameters (on the meta device) by the checkpoint's, converted to `dtype` on `device`.

    Returns their bytes. Reads only the tensors of this module. Of a `tied` embedding the checkpoint may hold the output
    head as well, or the head alone. Weights of `Linear` layers stay as small as the checkpoint has them, or with
    `as_int8` become 8-bit integers. Raises CheckpointError naming every tensor that is missing or that the module does
    not know.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    with Checkpoint(info.folder) as checkpoint:
        check_quantised(info, checkpoint.entries, as_int8=as_int8)
        names = _local_names(checkpoint, layout)
        if tied and "lm_head.weight" in names:
            names.setdefault("embed_tokens.weight", names.pop("lm_head.weight"))
        small = _SmallWeights(checkpoint, names, info, as_int8=as_int8)
        layers = {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
        _check_names(checkpoint, names, _replaced(sources, layers, small), info)
        state, small_bytes = {}, 0
        for number, (name, parts) in enumerate(sources.items()):
            if 10 * number // len(sources) > 10 * (number - 1) // len(sources):
                tell_phase("reading weights", 100 * number // len(sources))
            if name in layers and small.has(parts):
                weight = small.load(parts, shapes[name], device, dtype)
                layers[name].replace_weight(weight)
                small_bytes += weight.nbytes
                continue
            state[name] = _load_parameter(checkpoint, names, parts, shapes[name], device, dtype)
        module.load_state_dict(state, assign=True)
    tell_phase("measuring memory, warming up")
    module.requires_grad_(False).eval()
    return sum(tensor.nbytes for tensor in state.values()) + small_bytes


def has_own_head(info: ModelInfo, layout: CheckpointLayout) -> bool:
    """Return whether the checkpoint holds an output head that differs from the embedding, which it holds, too."""
    with Checkpoint(info.folder) as checkpoint:
        names = _local_names(checkpoint, layout)
        pair = [names[name] for name in ("lm_head.weight", "embed_tokens.weight") if name in names]
        return len(pair) == 2 and not checkpoint.are_equal(*pair)


class _SmallWeights:
    """The weights of linear layers that are kept small."""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, str], info: ModelInfo, *, as_int8: bool) -> None:
        self._checkpoint, self._names, self._how, self._as_int8 = checkpoint, names, info.quantisation, as_int8

    def tensors(self, part: str) -> dict[str, str]:
        """Return the local names of a part's quantised tensors by role; nothing for a plain part."""
        return {} if self._how is None else parts_of(part.removesuffix(".weight"), self._names)

    def has(self, parts: tuple[str | Zeros, ...]) -> bool:
        return self._as_int8 or any(self.tensors(part) for part in parts if isinstance(part, str))

    def load(
        self, parts: tuple[str | Zeros, ...], shape: torch.Size, device: torch.device, dtype: torch.dtype
    ) -> SmallWeight:
        """Load a layer's weight; parts that the checkpoint has unquantised stay so, in `dtype`."""
        loaded = [self._load(part, device, dtype) for part in parts if isinstance(part, str)]
        found = [tuple(one.shape) for one in loaded]
        if sum(rows for rows, _ in found) != shape[0] or any(columns != shape[1] for _, columns in found):
            needed = f"the model needs {tuple(shape)} for all together"
            raise CheckpointError(f"{' + '.join(map(str, parts))} have shapes {found}, {needed}")
        return stacked(loaded)

    def _load(self, part: str, device: torch.device, dtype: torch.dtype) -> CodedWeight | Tensor:
        tensors = self.tensors(part)
        if self._how is not None and tensors:
            read = {role: self._checkpoint.read(self._names[name]) for role, name in tensors.items()}
            return decode_weight(part.removesuffix(".weight"), read, self._how).to(device)
        plain = self._checkpoint.read(self._names[part]).to(device)
        return quantise_int8(plain) if self._as_int8 else plain.to(dtype)


def _replaced(sources: Sources, layers: dict[str, Linear], small: _SmallWeights) -> Sources:
    """Return the sources with the quantised tensors of linear layers in place of their weights."""
    named: Sources = {}
    for name, parts in sources.items():
        inner = [small.tensors(part) if name in layers and isinstance(part, str) else {} for part in parts]
        named[name] = tuple(
            one for part, roles in zip(parts, inner, strict=True) for one in (roles.values() or (part,))
        )
    return named


def _local_names(checkpoint: Checkpoint, layout: CheckpointLayout) -> dict[str, str]:
    """Return the checkpoint's name of each tensor of the module, by local name; the earlier prefix wins."""
    prefixes = tuple(layout.prefixes)

    def rank(name: str) -> int:
        return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))

    local = ((layout.local_name(name), name) for name in sorted(checkpoint.entries, key=rank, reverse=True))
    return {ours: name for ours, name in local if ours is not None}


def _check_names(checkpoint: Checkpoint, names: dict[str, str], sources: Sources, info: ModelInfo) -> None:
    needed = {part for parts in sources.values() for part in parts if isinstance(part, str)}
    surplus = names.keys() - needed
    if info.quantisation is not None:
        surplus = {ours for ours in surplus if not ours.endswith(UNREAD) and not _adds_nothing(checkpoint, names, ours)}
    missing = sorted(needed - names.keys())
    unknown = sorted(names[ours] for ours in surplus)
    if missing or unknown:
        raise CheckpointError(
            f"the weights in {info.folder} are not those of {info.architecture} as its config.json describes it: "
            f"missing {_listed(missing)}; unexpected {_listed(unknown)}"
            f"{_ONLY_LINEAR if any(map(is_quantised, unknown)) else ''}"
        )


def _adds_nothing(checkpoint: Checkpoint, names: dict[str, str], ours: str) -> bool:
    """Return whether a tensor is a bias of zeros, which older AutoGPTQ writes for layers without a bias."""
    base, _, role = ours.rpartition(".")
    return role == "bias" and f"{base}.qweight" in names and not checkpoint.read(names[ours]).any()


def _load_parameter(
    checkpoint: Checkpoint,
    names: dict[str, str],
    parts: tuple[str | Zeros, ...],
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Load a parameter, reading its parts below each other."""
    out = torch.empty(shape, dtype=dtype, device=device)
    row = 0
    for part in parts:
        if isinstance(part, Zeros):
            out[row : row + part.rows].zero_()
            row += part.rows
            continue
        entry = checkpoint.entries[names[part]]
        rows = entry.shape[0] if len(parts) > 1 and entry.shape else len(out)
        checkpoint.read_into(names[part], out[row : row + rows])
        row += rows
    if row != len(out):
        raise CheckpointError(f"{' + '.join(map(str, parts))} have {row} rows, the model needs {len(out)}")
    return out


def _listed(names: list[str], limit: int = 8) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
