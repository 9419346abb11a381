"""Load a checkpoint's tensors into a module built without memory: each weight is allocated once, in place."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from common.model_info import ModelInfo
from engine.models.base import CheckpointLayout, LoadReport, Sources, Zeros
from engine.models.checkpoint import Checkpoint
from engine.models.checkpoint_index import CheckpointError


def load_weights(
    module: nn.Module,
    sources: Sources,
    layout: CheckpointLayout,
    info: ModelInfo,
    device: torch.device,
    dtype: torch.dtype,
    *,
    unused: tuple[str, ...] = (),
) -> LoadReport:
    """Replace the module's parameters (on the meta device) by the checkpoint's, converted to `dtype` on `device`.

    Reads only the tensors of this module. `unused` are local names that a checkpoint may have and that are not
    needed, such as a tied head. Raises CheckpointError naming every tensor that is missing or that the module does
    not know.
    """
    start_s = time.perf_counter()
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    with Checkpoint(info.folder) as checkpoint:
        names = _local_names(checkpoint, layout)
        _check_names(names, sources, unused, info)
        state = {}
        for name, parts in sources.items():
            state[name] = _load_parameter(checkpoint, names, parts, shapes[name], device, dtype)
        module.load_state_dict(state, assign=True)
        read_bytes = checkpoint.read_bytes
    module.requires_grad_(False).eval()
    wanted = {names[part] for parts in sources.values() for part in parts if isinstance(part, str)}
    return LoadReport(
        names=tuple(sorted(wanted)),
        read_bytes=read_bytes,
        parameter_bytes=sum(tensor.nbytes for tensor in state.values()),
        seconds=time.perf_counter() - start_s,
    )


def _local_names(checkpoint: Checkpoint, layout: CheckpointLayout) -> dict[str, str]:
    """Return the checkpoint's name of each tensor of the module, by local name; the earlier prefix wins."""
    prefixes = tuple(layout.prefixes)

    def rank(name: str) -> int:
        return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))

    local = ((layout.local_name(name), name) for name in sorted(checkpoint.entries, key=rank, reverse=True))
    return {ours: name for ours, name in local if ours is not None}


def _check_names(names: dict[str, str], sources: Sources, unused: tuple[str, ...], info: ModelInfo) -> None:
    needed = {part for parts in sources.values() for part in parts if isinstance(part, str)}
    missing = sorted(needed - names.keys())
    unknown = sorted(names[ours] for ours in names.keys() - needed - set(unused))
    if missing or unknown:
        raise CheckpointError(
            f"the weights in {info.folder} are not those of {info.architecture} as its config.json describes it: "
            f"missing {_listed(missing)}; unexpected {_listed(unknown)}"
        )


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
