"""Run the decoder: one forward pass over the tokens of many requests, laid end to end."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from common.config import EngineConfig
from common.errors import TriptychError
from common.model_info import ModelInfo
from common.telemetry import get_logger
from engine.attention.backend import PagedAttentionContext
from engine.attention.select import choose_backend
from engine.cache.block_manager import BlockManager, BlockMove
from engine.cache.encoder_cache import EncoderCacheManager
from engine.device.choice import choose_device, choose_dtype
from engine.device.gpu_memory import in_words
from engine.device.memory import MemoryReport, zeros
from engine.device.pending_tensor import PendingTensor
from engine.device.recorder import CudaRecorder, Recorder
from engine.models.layers import use_layer_kernels
from engine.models.lora.pool import AdapterPool
from engine.models.registry import load_decoder
from engine.native.calls import CallRecorder
from engine.runner.alignment import alignment_heads, first_frames, gather_heads
from engine.runner.cross import CrossBatch, write_cross
from engine.runner.graphs import GraphParts, StepGraphs, UnrecordableError, graph_sizes
from engine.runner.last_tokens import LastTokens
from engine.runner.moves import move_blocks, read_tokens, slots_of, write_tokens
from engine.runner.step import (
    MergedRows,
    WantedRows,
    find_pieces,
    merge_embeddings,
    positions_of,
    self_metadata,
    wanted_rows,
)
from engine.state.inputs import InputBuffers, ScheduledStep, StepInputs
from engine.state.request import Request, Sequence
from engine.state.spec import DecoderSpec, HeadSpec, Table

log = get_logger()

MAX_CALLED_BYTES: Final = 2**30
"""Larger weights take a CPU so long that Python's part of a step is lost in it: nothing is recorded."""


@dataclass(frozen=True)
class StepOutput:
    """Result of a step: `logits` [k, vocab_size] in float32, on the device, for the next token of each of k
    `sequences`, and the hidden states of prompt tokens with wanted logits."""

    sequences: list[Sequence]
    logits: torch.Tensor
    prompt_rows: list[PromptRows]


@dataclass(frozen=True)
class PromptRows:
    """`hidden` [m, hidden_size] of the tokens of `sequence` from position `first` on, and the queries of
    cross-attention by layer, [m, num_heads, head_dim], where an alignment needs these."""

    sequence: Sequence
    first: int
    hidden: torch.Tensor
    queries: dict[int, torch.Tensor] = field(default_factory=dict)


class DecoderRunner:
    """The decoder's weights, KV cache and step buffers.

    On CUDA nothing here waits for the device. Steps are replayed from `graphs` where there are such; the eager
    path beside it computes the same.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig) -> None:
        """Load the model. The runner runs steps after `allocate`."""
        self.info = info
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device, info)
        self.model, self.weight_bytes = load_decoder(
            info, self.device, self.dtype, config.load_format, as_int8=config.quantization == "int8"
        )
        self.spec = self.model.spec
        where = self.device, self.dtype
        self.adapters = AdapterPool(self.model, info, config.max_loras, *where) if info.adapters else None
        _check_room(self.spec, config)
        self.max_model_len = min(config.max_model_len or self.spec.max_model_len, self.spec.max_model_len)
        self.block_size = config.block_size
        self.buffers = InputBuffers(
            config.max_num_seqs, self.max_model_len, self.block_size, config.max_num_batched_tokens, self.device
        )
        self.last_tokens = LastTokens(config.max_num_seqs, self.device)
        self.backend = choose_backend(self.device, self.dtype, config.attention_backend, HeadSpec.of(self.spec))
        self.layers_are_fallback = not use_layer_kernels(self.device, config.attention_backend)
        self._uses_mrope = self.spec.mrope_section is not None
        # The kernels of layers take bfloat16 alone.
        called = self.backend.calls_kernels and self.dtype == torch.bfloat16
        by_calls = called and self.weight_bytes <= MAX_CALLED_BYTES
        self.records_graphs = not config.enforce_eager and (self.device.type == "cuda" or by_calls)
        # Qwen3-VL's layers get a share of encoder outputs, which no recording has.
        self._replays_prompts = self.spec.encoder_width == self.spec.hidden_size
        only_decodes = self.device.type == "cuda" and not self._replays_prompts
        most = config.max_num_seqs if only_decodes else config.max_num_batched_tokens
        self.graph_sizes = graph_sizes(self.device, config.max_num_seqs, most)
        self.graphs: StepGraphs | None = None
        self._cross: CrossBatch | None = None
        if self.spec.has_cross_attention:
            in_prompt, biased = not info.is_encoder_decoder, "cross" in self.spec.biased
            room = config.max_num_seqs, self.max_cross_blocks
            self._cross = CrossBatch(self.device, *room, inputs_in_prompt=in_prompt, biased=biased)
        self.caches: list[torch.Tensor] = []

    def allocate(self, memory: MemoryReport) -> None:
        """Allocate pools of the given sizes, and record steps."""
        self.memory = memory
        self.num_blocks = memory.kv_cache // self.block_bytes + 1  # block 0 is never handed out
        shape = (2, self.num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        # Zeros, not empty: padding reads block 0, and 0 * NaN would be NaN.
        self.caches = [zeros(shape, self.dtype, self.device) for _ in range(self.spec.num_caches)]
        self.num_host_blocks = min(memory.swap // self.block_bytes, self.num_blocks)
        self._host_caches: list[torch.Tensor] = []
        if self.records_graphs:
            self.record_graphs(self.make_recorder())

    @property
    def max_cross_blocks(self) -> int:
        """Most blocks of an input, where cross-attention reads it."""
        return -(-self.info.max_encoder_tokens // self.block_size) if self.spec.has_cross_attention else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        slots = 2 * self.spec.num_caches * self.block_size
        return slots * self.spec.num_kv_heads * self.spec.head_dim * self.dtype.itemsize

    def record_graphs(self, recorder: Recorder) -> None:
        """Let steps be replayed from now on, where the model and the attention backend can be recorded."""
        began_s = time.monotonic()
        try:
            self.graphs = StepGraphs.record(self.graph_parts(), self.graph_sizes, recorder)
        except UnrecordableError as reason:
            log.warning("steps run eagerly", reason=str(reason))
            return
        seconds, memory = round(time.monotonic() - began_s, 1), in_words(recorder.size_bytes)
        log.info("steps recorded", sizes=self.graphs.sizes, seconds=seconds, memory=memory)

    def make_recorder(self) -> Recorder:
        return CudaRecorder(self.device) if self.device.type == "cuda" else CallRecorder()

    def graph_parts(self) -> GraphParts:
        """Return the parts of a recorded step, over the present caches."""
        return GraphParts(
            self.model,
            self.backend,
            self.caches,
            self.last_tokens,
            max_blocks=self.buffers.max_blocks_per_seq,
            max_cross_blocks=self.max_cross_blocks,
            inputs_in_prompt=not self.info.is_encoder_decoder,
        )

    @torch.inference_mode()
    def move(self, moves: ListOf[BlockMove]) -> None:
        """Carry out block moves in order. The host copy of the cache is allocated on first use."""
        move_blocks(moves, self.caches, self._host_cache)

    def read_tokens(self, table: Table, block_table: list[int], first: int, last: int) -> PendingTensor:
        """Gather KV of tokens of a table: [last - first, layers, 2, num_kv_heads, head_dim], on this device."""
        return read_tokens(self._caches_of(table), block_table, first, last)

    def write_tokens(self, table: Table, block_table: list[int], first: int, tokens: torch.Tensor) -> None:
        """Write KV read by `read_tokens` of another engine, from token `first` on. The tensor is on this device."""
        write_tokens(self._caches_of(table), block_table, first, tokens)

    def _caches_of(self, table: Table) -> list[torch.Tensor]:
        return self.caches[: self.spec.num_layers if table == "self" else self.spec.num_cross_layers]

    def _host_cache(self, layer: int) -> torch.Tensor:
        if not self._host_caches:
            shape = (2, self.num_host_blocks + 1, *self.caches[0].shape[2:])
            pin = self.device.type == "cuda"
            host = torch.device("cpu")
            self._host_caches = [
                torch.zeros(shape, dtype=self.dtype, pin_memory=True) if pin else zeros(shape, self.dtype, host)
                for _ in self.caches
            ]
        return self._host_caches[layer]

    @torch.inference_mode()
    def run(self, step: ScheduledStep, blocks: BlockManager, cache: EncoderCacheManager) -> StepOutput:
        """Run a step; return logits of every sequence with its last known token computed."""
        if self._cross is not None:
            # Not the admitted ones alone: beams that begin again wait a step, which may be one without any tokens.
            for request in dict.fromkeys(sequence.request for sequence in step.sequences):
                if blocks.needs_writing(request.request_id):
                    table = blocks.get_cross_block_table(request.request_id)
                    write_cross(request, table, cache, self.model, self.backend, self.caches)
                    blocks.mark_written(request.request_id)
        slots = [sequence.slot_index for sequence in step.sequences]
        self.buffers.update_all(
            slots,
            [sequence.token_ids for sequence in step.sequences],
            [blocks.tables[sequence.sequence_id] for sequence in step.sequences],
            [sequence.num_computed_tokens for sequence in step.sequences],
        )
        inputs = self.buffers.prepare(slots, step.num_tokens)
        if self.adapters is not None:
            self.adapters.select(step, inputs)
        pieces = [] if self._cross is not None else find_pieces(step, inputs, cache, self.info)
        wanted = wanted_rows(step, inputs)
        hidden, queries = None, dict[int, torch.Tensor]()
        adapted = self.adapters is not None and bool(self.adapters.groups)  # no recording has their products
        if not (wanted.prompts or adapted):
            read = self.buffers.staging.take(min(len(inputs.input_ids), max(1, len(wanted.last_rows))))
            read[:] = wanted.last_rows or 0
            inputs = replace(inputs, read=read)
            hidden = self._replay(step, inputs, blocks, pieces)
        if hidden is None:
            aligns = any(step.sequences[index].sampling.alignment for index, _, _ in wanted.prompts)
            hidden = self._compute(step, inputs, blocks, pieces, queries if aligns else None)
        return self._select(hidden, step, wanted, queries)

    def _replay(
        self, step: ScheduledStep, inputs: StepInputs, blocks: BlockManager, pieces: ListOf[MergedRows]
    ) -> torch.Tensor | None:
        """Return hidden states by a recorded step; None if no recording fits."""
        graphs, num_tokens = self.graphs, len(inputs.input_ids)
        if graphs is None or num_tokens > graphs.sizes[-1]:
            return None
        if not self._replays_prompts and (pieces or num_tokens > len(step.sequences)):
            return None
        block_table, whole_inputs = torch.from_numpy(inputs.block_table), bool(self.spec.whole_input_tokens)
        own = self_metadata(step, inputs, block_table, None, whole_inputs=whole_inputs)
        cross = None if self._cross is None else self._cross.metadata(step, inputs, blocks, on_device=False)
        return graphs.run(inputs, positions_of(step, inputs, uses_mrope=self._uses_mrope), own, cross, pieces)

    def _compute(
        self,
        step: ScheduledStep,
        inputs: StepInputs,
        blocks: BlockManager,
        pieces: ListOf[MergedRows],
        queries: dict[int, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Hidden states of any step, kernel by kernel; `queries` get those of cross-attention by layer."""
        all_read = len(inputs.read) == len(inputs.input_ids)
        input_ids, positions, slot_mapping, block_table, slots, *read = self.buffers.staging.send(
            inputs.input_ids,
            positions_of(step, inputs, uses_mrope=self._uses_mrope),
            inputs.slot_mapping,
            inputs.block_table,
            inputs.request_indices,
            *(() if all_read else (inputs.read,)),
        )
        if inputs.input_ids.min() < 0:
            input_ids = self.last_tokens.fill(input_ids, slots)
        embeddings = self.model.embed(input_ids)
        encoder_rows = merge_embeddings(embeddings, pieces, self.dtype)
        slot_mapping = slot_mapping.to(self.backend.slot_dtype)
        whole_inputs = bool(self.spec.whole_input_tokens)
        own = self_metadata(step, inputs, block_table, slot_mapping, whole_inputs=whole_inputs)
        cross = None if self._cross is None else self._cross.metadata(step, inputs, blocks, on_device=True)
        context = PagedAttentionContext.of_step(self.backend, self.caches, own, cross)
        select = partial(torch.index_select, dim=0, index=read[0]) if read else None
        context = replace(context, encoder_rows=encoder_rows, cross_queries=queries, select=select)
        hidden: torch.Tensor = self.model(embeddings, positions, context)
        return hidden[read[0]] if read and len(hidden) > len(read[0]) else hidden

    def align(self, request: Request, parts: ListOf[dict[int, torch.Tensor]], blocks: BlockManager) -> list[int]:
        """Return the first frames of a request's tokens, from the queries of its prompt in `parts`, for `alignment`.

        The queries of the last token are not looked at, and need not be there.
        """
        wanted = request.sampling.alignment
        assert wanted is not None
        heads = alignment_heads(self.info, self.spec)
        num_frames = min(wanted.num_frames, request.num_encoder_tokens)
        table = blocks.get_cross_block_table(request.request_id)
        slots = slots_of(self.caches[0], table, 0, num_frames)
        keys = {layer: self.caches[layer][0].flatten(0, 1)[slots] for layer, _ in heads}
        queries = gather_heads(parts, heads)[:, : len(request.prompt) - 1]
        return first_frames(queries, gather_heads([keys], heads), wanted.first_token - 1)

    def _select(
        self, hidden: torch.Tensor, step: ScheduledStep, wanted: WantedRows, queries: dict[int, torch.Tensor]
    ) -> StepOutput:
        prompts = []
        for index, start, end in wanted.prompts:
            sequence = step.sequences[index]
            kept = {layer: rows[start:end] for layer, rows in queries.items()} if sequence.sampling.alignment else {}
            prompts.append(PromptRows(sequence, sequence.num_computed_tokens, hidden[start:end], kept))
        if len(wanted.finished) < len(hidden):
            rows = self.buffers.staging.take(len(wanted.finished))
            rows[:] = wanted.last_rows
            hidden = hidden[self.buffers.staging.send(rows)[0]]
        return StepOutput([step.sequences[index] for index in wanted.finished], self.logits(hidden), prompts)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[k, hidden_size] -> float32 [k, vocab_size]."""
        if len(hidden) == 0:
            return torch.empty(0, self.spec.vocab_size, device=hidden.device)
        return self.model.logits(hidden).float()  # argmax over bfloat16 is six times slower on a CPU


def _check_room(spec: DecoderSpec, config: EngineConfig) -> None:
    """Raise TriptychError("invalid_request") where a whole input does not fit into a step beside the decodes."""
    least = spec.whole_input_tokens + config.max_num_seqs
    if spec.whole_input_tokens and config.max_num_batched_tokens < least:
        message = (
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: this model computes an image in one step, "
            f"{spec.whole_input_tokens} tokens beside {config.max_num_seqs} sequences (max_num_seqs): give at least "
            f"{least}"
        )
        raise TriptychError("invalid_request", message, "max_num_batched_tokens")
