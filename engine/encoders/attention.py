"""Kernels for transformers' encoders: C++ for bfloat16 on a CPU, and FlashInfer's attention on CUDA.

transformers asks a registered function for attention by the name in the module's configuration. A name with "flash" in
it makes the towers of Qwen2-VL and its successors report the starts of images and windows (`cu_seq_lens_q`), instead of
calling once for neighbours of a length. All sequences of a batch then run in a single launch.

Layers pass the mask or bias of each item as transformers' own do: `attention_mask` [batch, 1 or num_heads, size, size],
bool (True: seen) or addends, and T5's as `position_bias`. PyTorch computes these; on CUDA FlashInfer takes bool masks
that are the same for all heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.errors import how_to_install
from common.telemetry import get_logger
from engine.attention.flashinfer.paged_batch import RaggedBatch
from engine.attention.flashinfer.ragged import KEPT_PLANS, FlashInferRagged
from engine.attention.flashinfer.wrappers import RAGGED_WORKSPACE_BYTES, Workspace, load_flashinfer
from engine.attention.select import kernels_missing
from engine.models.base import EncoderModel
from engine.models.layers import Linear
from engine.native import ops
from engine.native.build import KernelsUnavailableError
from engine.state.spec import HeadSpec

CPU_NAME: Final = "triptych_encoder"
FLASH_NAME: Final = "triptych_flash_encoder"
"""With a number behind it for each encoder: transformers finds attention by name, once for the whole process."""
_numbers: Final = itertools.count(1)
log = get_logger()


def use_kernels(encoder: EncoderModel, device: torch.device, dtype: torch.dtype, attention_backend: str) -> bool:
    """Let an encoder use C++ kernels on a CPU, FlashInfer's on CUDA; the attention backend `torch` opts out.

    Return False, with a warning, where kernels would serve and do not run.
    """
    if attention_backend == "torch":
        return True
    if device.type == "cuda" and dtype != torch.float32:
        if (part := flash_part(encoder)) is not None:
            return use_flashinfer(part, device)
        log.info("the encoder computes attention with PyTorch", reason="it masks more than padding, or adds a bias")
    if device.type == "cpu" and dtype == torch.bfloat16:
        try:
            ops.enable()
        except KernelsUnavailableError as error:
            log.warning("CPU kernels not available: the encoder computes with PyTorch alone", reason=str(error))
            return False
        _replace_products(encoder.module.modules())
        if encoder.unmasked is not None:
            _call(encoder.unmasked, CPU_NAME, attend)
    return True


def _replace_products(layers: Iterable[Any]) -> None:
    """Let linear layers use the kernels, and convolutions compute in float32 where PyTorch is slow in bfloat16."""
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
        elif isinstance(layer, nn.Conv1d | nn.Conv2d) and ops.pytorch_is_slow:
            layer._conv_forward = partial(_in_float32, layer._conv_forward)  # type: ignore[method-assign]


def _in_float32(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return convolve(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query, key, value [batch, num_heads, size, head_dim] -> [batch, size, num_heads, head_dim].

    What the kernel does not serve goes to PyTorch's attention, as without us.
    """
    plain = attention_mask is None and more.get("position_bias") is None
    if plain and ops.serves_dense(query, key, value):
        return ops.dense_attention(query, key, value, scaling or query.shape[-1] ** -0.5), None
    attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    return attended, None


def use_flashinfer(module: PreTrainedModel, device: torch.device) -> bool:
    """Let FlashInfer compute the attention of a transformers module without masks; return whether FlashInfer serves.

    Its kernels are tried; a warning where they do not run, or where FlashInfer is not installed.
    """
    try:
        ragged = FlashInferRagged(Workspace(load_flashinfer(), device, RAGGED_WORKSPACE_BYTES))
    except ImportError as error:
        _warn(f"FlashInfer cannot be imported ({error}); install it: {how_to_install('cuda')}")
        return False
    try:
        _try(ragged, module, device)
    except Exception as error:  # of compilers, of a loader or of a driver: what these raise is documented nowhere
        _warn(kernels_missing(error))
        return False
    _call(module, f"{FLASH_NAME}_{next(_numbers)}", EncoderAttention(ragged, device))
    return True


def _call(module: PreTrainedModel, name: str, function: Any) -> None:
    """Let the layers of a module call the function under the name, in every forward pass from now on.

    Not when the module is made: transformers would look for the package flash_attn.
    """
    AttentionInterface.register(name, function)
    module.config._attn_implementation = name


def flash_part(encoder: EncoderModel) -> nn.Module | None:
    """Return the part of an encoder whose layers may call FlashInfer."""
    return encoder.padded if encoder.unmasked is None else encoder.unmasked


def rows_and_padding(module: Any, lengths: Sequence[int], size: int) -> dict[str, Tensor]:
    """Return what tells FlashInfer where `lengths` end in a batch of rows [n, size]; nothing for PyTorch's attention.

    Padding is a sequence of its own behind each row: no token of a row sees it, and nobody reads what comes of it.
    """
    if not module.config._attn_implementation.startswith(FLASH_NAME):
        return {}
    parts = (part for length in lengths for part in (length, size - length) if part)
    return {"cu_seq_lens_q": torch.tensor([0, *itertools.accumulate(parts)])}


def head_sizes(module: nn.Module) -> set[tuple[int, int]]:
    """Return the heads and head size of each kind of layer, from transformers' attention modules."""
    layers: list[Any] = [one for one in module.modules() if hasattr(one, "num_heads") and hasattr(one, "head_dim")]
    return {(layer.num_heads, layer.head_dim) for layer in layers}


def _warn(reason: str) -> None:
    log.warning("the encoder computes attention with PyTorch alone", reason=reason)


def _try(ragged: FlashInferRagged, module: PreTrainedModel, device: torch.device) -> None:
    """Run a sequence of two tokens for each kind of heads."""
    for num_heads, head_dim in head_sizes(module):
        tokens = torch.zeros(2, num_heads, head_dim, dtype=module.dtype, device=device)
        ragged.run(tokens, tokens, tokens, RaggedBatch([2], device), scale=head_dim**-0.5)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _adds(mask: Tensor | None, position_bias: Tensor | None) -> bool:
    """Return whether layers add to scores, or mask each head in another way: more than a mask of FlashInfer says."""
    return position_bias is not None or (mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1))


class EncoderAttention:
    """The attention function for transformers' layers. Sequences of a forward pass are planned once for all layers,
    which pass the same tensors: masks, and boundaries of images or, in Qwen2.5-VL, windows."""

    def __init__(self, ragged: FlashInferRagged, device: torch.device) -> None:
        def rows(batch: int, size: int, mask: Tensor | None) -> RaggedBatch:
            """`mask` [batch or 1, 1, size, size]."""
            flat = None if mask is None else mask.expand(batch, 1, size, size).reshape(-1)
            return RaggedBatch([size] * batch, device, flat)

        self._ragged = ragged
        self._rows = lru_cache(KEPT_PLANS)(rows)
        self._between = lru_cache(KEPT_PLANS)(lambda starts: RaggedBatch(starts.diff().tolist(), device))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value [batch, num_heads, size, head_dim] -> [batch, size, num_heads, head_dim].

        `cu_seq_lens_q` [n + 1]: where sequences begin in the batch laid end to end, and the last one ends.
        """
        batch, num_heads, size, head_dim = query.shape
        heads = HeadSpec(num_heads, key.shape[1], head_dim, biased=_adds(attention_mask, more.get("position_bias")))
        masked = attention_mask is not None or heads.biased
        if masked and not self._ragged.serves(heads, query.dtype):
            return attend(module, query, key, value, attention_mask, scaling, **more)
        if attention_mask is None and cu_seq_lens_q is not None:
            sequences = self._between(cu_seq_lens_q)
        else:
            sequences = self._rows(batch, size, attention_mask)
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = self._ragged.run(query, key, value, sequences, scale=scaling)
        return out.view(batch, size, *out.shape[1:]), None
