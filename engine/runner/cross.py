"""Cross-attention of a step: KV of encoder outputs, written once per content, and the readers of each table."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.cache.block_manager import BlockManager
from engine.cache.encoder_cache import EncoderCacheManager
from engine.device.h2d import send_tensor
from engine.models.base import DecoderModel
from engine.runner.moves import slots_of
from engine.state.cross_ranges import CrossInput, table_rows, write_ranges
from engine.state.inputs import ScheduledStep, Staging, StepInputs
from engine.state.request import Request


def write_cross(
    request: Request,
    block_table: ListOf[int],
    cache: EncoderCacheManager,
    model: DecoderModel,
    backend: AttentionBackend,
    caches: ListOf[Tensor],
) -> None:
    """Project the encoder outputs of a request to each layer's cross KV, into the blocks of the request's table."""
    device, dtype = caches[0].device, caches[0].dtype
    outputs = [
        send_tensor(cache.get(item.offer.content_hash), device, dtype)
        for item in request.inputs
        if item.offer is not None
    ]
    encoder_output = table_rows(outputs, _cross_inputs(request))
    slots = slots_of(caches[0], block_table, 0, len(encoder_output))
    for layer, kv_cache in enumerate(caches[: model.spec.num_cross_layers]):
        key, value = model.project_cross(layer, encoder_output)
        backend.write(kv_cache, key, value, slots)


class CrossBatch:
    """The cross-attention reads of a step.

    Their block tables, as one array, are kept while the batch stays as it is: in steady decoding nothing is prepared,
    and nothing sent to the device. The array lies in `memory`, which has room for `max_num_seqs` requests of an input
    each; where a batch has so many inputs that this is too small (Mllama), larger memory takes its place for good.
    `inputs_in_prompt`: what a token reads depends on where it stands (Mllama). `biased`: so does an addend or mask,
    which may differ by request.
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_blocks: int, *, inputs_in_prompt: bool, biased: bool
    ) -> None:
        self._device, self._biased = device, biased
        self._inputs_in_prompt = inputs_in_prompt
        self._lists: list[list[int]] = []
        self.memory = Staging(device, max_num_seqs * max_blocks)
        self._table = self.memory.take(0, 0)
        self._sent: Tensor | None = None

    def metadata(
        self, step: ScheduledStep, inputs: StepInputs, blocks: BlockManager, *, on_device: bool
    ) -> AttentionMetadata | None:
        """Return the metadata, or None if no request of the step reads cross KV. Without `on_device` all tensors stay
        on the host."""
        requests = [sequence.request for sequence in step.sequences]
        seq_lens = [request.num_encoder_tokens for request in requests]
        if not any(seq_lens):
            return None
        self._update([blocks.get_cross_block_table(request.request_id) for request in requests])
        if on_device and self._sent is None:
            [self._sent] = self.memory.send(self._table)
        table = self._sent if on_device else None
        ranges = after = None
        if self._inputs_in_prompt:
            ranges, after = inputs.key_ranges, inputs.after_input
            starts, first = inputs.query_start_loc.tolist(), inputs.num_computed_tokens.tolist()
            for index, request in enumerate(requests):
                own = slice(starts[index], starts[index + 1])
                write_ranges(_cross_inputs(request), first[index], ranges[own], after[own])
        return AttentionMetadata(
            query_start_loc=inputs.query_start_loc.tolist(),
            seq_lens=seq_lens,
            block_table=torch.from_numpy(self._table) if table is None else table,
            slot_mapping=None,
            causal=False,
            num_decodes=step.num_decodes,
            key_ranges=ranges,
            after_input=after,
            host_table=self._table,
            num_computed_tokens=inputs.num_computed_tokens.tolist() if self._biased else None,
            requests=requests if self._biased else (),
        )

    def _update(self, lists: list[list[int]]) -> None:
        """Compare tables by identity: the block manager never changes a list after handing it out."""
        if len(lists) == len(self._lists) and all(map(operator.is_, lists, self._lists)):
            return
        self._lists, self._sent = lists, None
        shape = len(lists), max(map(len, lists))
        if math.prod(shape) > self.memory.num_values:
            self.memory = Staging(self._device, math.prod(shape))
        self.memory.begin()
        self._table = self.memory.take(*shape)
        for row, blocks in zip(self._table, lists, strict=True):
            row[: len(blocks)], row[len(blocks) :] = blocks, 0


def _cross_inputs(request: Request) -> list[CrossInput]:
    """Return the inputs of a request as rows of its cross table, in prompt order."""
    inputs = []
    for item in request.inputs:
        assert item.offer is not None
        layout = item.offer.layout
        visible = layout.num_encoder_tokens if layout.num_visible_tokens is None else layout.num_visible_tokens
        inputs.append(CrossInput(item.start or 0, layout.num_encoder_tokens, visible))
    return inputs
