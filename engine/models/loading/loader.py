"""Load a checkpoint's tensors into a module built without memory: each weight is allocated once, in place."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
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
_LISTED: Final = 8


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
    layers = {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
    with Checkpoint(info.folder) as checkpoint:
        check_quantised(info, checkpoint.entries, as_int8=as_int8)
        names = _local_names(checkpoint, layout)
        if tied and "lm_head.weight" in names:
            names.setdefault("embed_tokens.weight", names.pop("lm_head.weight"))
        weights = _Weights(checkpoint, names, info, device, dtype, as_int8)
        weights.check_names(sources, layers)
        state, small_bytes = {}, 0
        for number, (name, parts) in enumerate(sources.items()):
            if 10 * number // len(sources) > 10 * (number - 1) // len(sources):
                tell_phase("reading weights", 100 * number // len(sources))
            if name in layers and weights.are_small(parts):
                weight = weights.load_small(parts, shapes[name])
                layers[name].replace_weight(weight)
                small_bytes += weight.nbytes
                continue
            state[name] = weights.load(parts, shapes[name])
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


@dataclass(frozen=True)
class _Weights:
    """The weights of a module in a checkpoint, where each has the name in `names`; those of linear layers may be kept
    small."""

    checkpoint: Checkpoint
    names: dict[str, str]
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    as_int8: bool

    def check_names(self, sources: Sources, layers: Container[str]) -> None:
        """Raise CheckpointError for tensors that are missing or too many; `layers` may have quantised weights."""
        needed = set[str]()
        for name, parts in sources.items():
            for part in parts:
                if isinstance(part, str):
                    roles = self._quantised(part) if name in layers else {}
                    needed.update(roles.values() or [part])
        surplus = self.names.keys() - needed
        if self.info.quantisation is not None:
            surplus = {ours for ours in surplus if not ours.endswith(UNREAD) and not self._adds_nothing(ours)}
        missing = sorted(needed - self.names.keys())
        unknown = sorted(self.names[ours] for ours in surplus)
        if missing or unknown:
            raise CheckpointError(
                f"the weights in {self.info.folder} are not those of {self.info.architecture} as its config.json "
                f"describes it: missing {_listed(missing)}; unexpected {_listed(unknown)}"
                f"{_ONLY_LINEAR if any(map(is_quantised, unknown)) else ''}"
            )

    def _adds_nothing(self, ours: str) -> bool:
        """Return whether a tensor is a bias of zeros, which older AutoGPTQ writes for layers without a bias."""
        base, _, role = ours.rpartition(".")
        return role == "bias" and f"{base}.qweight" in self.names and not self.checkpoint.read(self.names[ours]).any()

    def _quantised(self, part: str) -> dict[str, str]:
        """Return the local names of a part's quantised tensors by role; nothing for a plain part."""
        return {} if self.info.quantisation is None else parts_of(part.removesuffix(".weight"), self.names)

    def are_small(self, parts: tuple[str | Zeros, ...]) -> bool:
        """Return whether the weight of a linear layer, made of these parts, is kept small."""
        return self.as_int8 or any(self._quantised(part) for part in parts if isinstance(part, str))

    def load_small(self, parts: tuple[str | Zeros, ...], shape: torch.Size) -> SmallWeight:
        """Load a layer's weight; parts that the checkpoint has unquantised stay so, in `dtype`."""
        loaded = [self._load_part(part) for part in parts if isinstance(part, str)]
        found = [tuple(one.shape) for one in loaded]
        if sum(rows for rows, _ in found) != shape[0] or any(columns != shape[1] for _, columns in found):
            needed = f"the model needs {tuple(shape)} for all together"
            raise CheckpointError(f"{' + '.join(map(str, parts))} have shapes {found}, {needed}")
        return stacked(loaded)

    def _load_part(self, part: str) -> CodedWeight | Tensor:
        how, tensors = self.info.quantisation, self._quantised(part)
        if how is not None and tensors:
            read = {role: self.checkpoint.read(self.names[name]) for role, name in tensors.items()}
            return decode_weight(part.removesuffix(".weight"), read, how).to(self.device)
        plain = self.checkpoint.read(self.names[part]).to(self.device)
        return quantise_int8(plain) if self.as_int8 else plain.to(self.dtype)

    def load(self, parts: tuple[str | Zeros, ...], shape: torch.Size) -> Tensor:
        """Load a parameter, reading its parts below each other."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            if isinstance(part, Zeros):
                out[row : row + part.rows].zero_()
                row += part.rows
                continue
            entry = self.checkpoint.entries[self.names[part]]
            rows = entry.shape[0] if len(parts) > 1 and entry.shape else len(out)
            self.checkpoint.read_into(self.names[part], out[row : row + rows])
            row += rows
        if row != len(out):
            raise CheckpointError(f"{' + '.join(map(str, parts))} have {row} rows, the model needs {len(out)}")
        return out


def _local_names(checkpoint: Checkpoint, layout: CheckpointLayout) -> dict[str, str]:
    """Return the checkpoint's name of each tensor of the module, by local name; the earlier prefix wins."""
    prefixes = tuple(layout.prefixes)

    def rank(name: str) -> int:
        return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))

    local = ((layout.local_name(name), name) for name in sorted(checkpoint.entries, key=rank, reverse=True))
    return {ours: name for ours, name in local if ours is not None}


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
