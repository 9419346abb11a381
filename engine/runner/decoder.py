"""Runs the decoder: one forward pass over the tokens of many requests, laid end to end."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.config import EngineConfig
from common.model_info import ModelInfo
from common.telemetry import get_logger
from engine.attention.context import PagedAttentionContext
from engine.attention.metadata import AttentionMetadata
from engine.attention.select import choose_backend
from engine.cache.block_manager import BlockManager, BlockMove
from engine.cache.encoder_cache import EncoderCacheManager
from engine.cross_ranges import CrossInput, after_input, key_ranges, table_rows
from engine.device import choose_device, choose_dtype
from engine.inputs import InputBuffers, IntArray, StepInputs
from engine.memory import DecoderNeeds, MemoryReport, all_pools_given, size_decoder, zeros
from engine.models.base import SplicedRows
from engine.models.registry import load_decoder
from engine.request import Request, Sequence
from engine.runner.kv_transfer import read_tokens, write_tokens
from engine.runner.profile import measure_step
from engine.scheduler.decoder import ScheduledStep
from engine.scheduler.kv_expectation import Table

log = get_logger()


@dataclass(frozen=True)
class StepOutput:
    """What a step has computed: `logits` [k, vocab_size] in float32 for the next token of each of k `sequences`, and
    the hidden states of prompt tokens whose logits are wanted."""

    sequences: list[Sequence]
    logits: torch.Tensor
    prompt_rows: list[PromptRows]


@dataclass(frozen=True)
class PromptRows:
    """`hidden` [m, hidden_size] of the tokens of `sequence` from position `first` on."""

    sequence: Sequence
    first: int
    hidden: torch.Tensor


class DecoderRunner:
    """The decoder's weights, its KV cache and the buffers of a step."""

    def __init__(self, info: ModelInfo, config: EngineConfig) -> None:
        self.info = info
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device, info)
        self.model, self.load_report = load_decoder(info, self.device, self.dtype, config.load_format)
        self.spec = self.model.spec
        self.max_model_len = min(config.max_model_len or self.spec.max_model_len, self.spec.max_model_len)
        self.block_size = config.block_size
        self.buffers = InputBuffers(config.max_num_seqs, self.max_model_len, self.block_size)
        self.backend = choose_backend(self.device, self.dtype, config.attention_backend, self.spec.head_dim)
        self.memory = self._divide_memory(config)
        self.num_blocks = self.memory.kv_cache // self.block_bytes + 1  # block 0 is never handed out
        shape = (2, self.num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        # Zeros, not empty: padding reads block 0, and 0 * NaN would be NaN.
        self.caches = [zeros(shape, self.dtype, self.device) for _ in range(self.spec.num_caches)]
        self.num_host_blocks = min(self.memory.swap // self.block_bytes, self.num_blocks)
        self._host_caches: list[torch.Tensor] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        slots = 2 * self.spec.num_caches * self.block_size
        return slots * self.spec.num_kv_heads * self.spec.head_dim * self.dtype.itemsize

    def _divide_memory(self, config: EngineConfig) -> MemoryReport:
        """Sizes of the pools, and no KV cache larger than all sequences at full length could use."""
        activation = None if all_pools_given(config) else measure_step(self, config)
        weights = self.load_report.parameter_bytes
        report = size_decoder(config, self._memory_needs(config), self.device, weights, activation)
        log.info("memory", **report.describe(), device=self.device.type)
        return report

    def _memory_needs(self, config: EngineConfig) -> DecoderNeeds:
        info, spec = self.info, self.spec
        input_rows = info.max_encoder_tokens if info.has_cross_attention else self.max_model_len
        input_bytes = input_rows * spec.encoder_width * self.dtype.itemsize if info.media_kind else 0
        cross = -(-info.max_encoder_tokens // self.block_size) if spec.has_cross_attention else 0
        shortest = cross if info.is_encoder_decoder and info.media_kind != "text" else min(cross, 1)
        full = -(-self.max_model_len // self.block_size) + cross
        return DecoderNeeds(
            block=self.block_bytes,
            request=(shortest + 1) * self.block_bytes,
            all_requests=full * config.max_num_seqs * self.block_bytes,
            input=input_bytes,
            all_inputs=input_bytes * config.max_num_seqs,
            decode_share=self.backend.gathered_share / spec.num_caches,
        )

    @torch.inference_mode()
    def move(self, moves: ListOf[BlockMove]) -> None:
        """Carry out block moves in their order. The host's copy of the cache is made when it is first needed."""
        for kind, group in groupby(moves, key=lambda move: move.kind):
            for batch in _independent(list(group)):
                sources = torch.tensor([move.source for move in batch])
                targets = torch.tensor([move.target for move in batch])
                for layer, cache in enumerate(self.caches):
                    source = self._host_cache(layer) if kind == "in" else cache
                    target = self._host_cache(layer) if kind == "out" else cache
                    target[:, targets.to(target.device)] = source[:, sources.to(source.device)].to(target.device)

    def read_tokens(self, table: Table, block_table: list[int], first: int, last: int) -> torch.Tensor:
        """Keys and values of tokens of a block table: [last - first, layers, 2, num_kv_heads, head_dim], on the CPU."""
        return read_tokens(self._caches_of(table), block_table, first, last)

    def write_tokens(self, table: Table, block_table: list[int], first: int, tokens: torch.Tensor) -> None:
        """Write what `read_tokens` has read elsewhere, from token `first` on."""
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
        """Run one step; returns logits of every sequence whose last known token was computed."""
        # Not the admitted ones alone: beams that begin again wait a step, which may be one without any tokens.
        for request in dict.fromkeys(sequence.request for sequence in step.sequences):
            if blocks.needs_writing(request.request_id):
                self._write_cross(request, blocks, cache)
                blocks.mark_written(request.request_id)
        inputs = self._prepare(step, blocks)
        embeddings = self.model.embed(torch.from_numpy(inputs.input_ids).to(self.device))
        spliced = self._splice(embeddings, step, inputs, cache)
        context = self._attention_context(step, inputs, blocks)
        hidden = self.model(embeddings, self._positions(step, inputs), context, spliced)
        return self._select(hidden, step, inputs)

    def _prepare(self, step: ScheduledStep, blocks: BlockManager) -> StepInputs:
        slots = [sequence.slot_index for sequence in step.sequences]
        self.buffers.update_all(
            slots,
            [sequence.token_ids for sequence in step.sequences],
            [blocks.get_block_table(sequence.sequence_id) for sequence in step.sequences],
            [sequence.num_computed_tokens for sequence in step.sequences],
        )
        return self.buffers.prepare(slots, step.num_tokens)

    def _positions(self, step: ScheduledStep, inputs: StepInputs) -> torch.Tensor:
        """[num_tokens], or [3, num_tokens] with M-RoPE: the prompt's own grid, then one step per generated token."""
        if self.spec.mrope_section is None:
            return torch.from_numpy(inputs.positions).to(self.device)
        requests = [sequence.request for sequence in step.sequences]
        deltas = [request.mrope_next - len(request.prompt) for request in requests]
        positions = np.tile(inputs.positions + np.repeat(deltas, step.num_tokens), (3, 1))
        for index, (sequence, request) in enumerate(zip(step.sequences, requests, strict=True)):
            first = sequence.num_computed_tokens
            known = request.prompt_positions()[:, first : first + step.num_tokens[index]]
            start = int(inputs.query_start_loc[index])
            positions[:, start : start + known.shape[1]] = known
        return torch.from_numpy(positions).to(self.device)

    def _splice(
        self, embeddings: torch.Tensor, step: ScheduledStep, inputs: StepInputs, cache: EncoderCacheManager
    ) -> SplicedRows | None:
        """Replace the embeddings of placeholder tokens by the first columns of the encoder outputs' rows.

        Returns the whole rows where they have more columns than that.
        """
        if self.spec.has_cross_attention:
            return None
        rows, outputs = [], []
        for index, sequence in enumerate(step.sequences):
            first = sequence.num_computed_tokens
            last = first + step.num_tokens[index]
            offset = int(inputs.query_start_loc[index]) - first
            for item in sequence.request.inputs:
                if item.start is None or item.start >= last or item.start + item.num_prompt_tokens <= first:
                    continue
                assert item.metadata is not None
                places = _embedding_rows(item.metadata.layout.expansion, self.info.placeholder_token_id) + item.start
                begin, end = np.searchsorted(places, (first, last))
                if begin < end:
                    rows.append(torch.from_numpy(places[begin:end] + offset))
                    outputs.append(cache.get(item.metadata.content_hash)[begin:end].to(self.device, self.dtype))
        if not rows:
            return None
        spliced = SplicedRows(torch.cat(rows).to(self.device), torch.cat(outputs))
        embeddings[spliced.rows] = spliced.outputs[:, : self.spec.hidden_size]
        return spliced if self.spec.encoder_width > self.spec.hidden_size else None

    def _write_cross(self, request: Request, blocks: BlockManager, cache: EncoderCacheManager) -> None:
        """Project the encoder output to each layer's cross keys and values, once per content."""
        outputs = [
            cache.get(item.metadata.content_hash).to(self.device, self.dtype)
            for item in request.inputs
            if item.metadata is not None
        ]
        encoder_output = table_rows(outputs, _cross_inputs(request))
        table = torch.tensor(blocks.get_cross_block_table(request.request_id), device=self.device)
        steps = torch.arange(len(encoder_output), device=self.device)
        slots = table[steps // self.block_size] * self.block_size + steps % self.block_size
        for layer, kv_cache in enumerate(self.caches[: self.spec.num_cross_layers]):
            key, value = self.model.project_cross(layer, encoder_output)
            self.backend.write(kv_cache, key, value, slots)

    def _attention_context(
        self, step: ScheduledStep, inputs: StepInputs, blocks: BlockManager
    ) -> PagedAttentionContext:
        tables = [blocks.get_block_table(sequence.sequence_id) for sequence in step.sequences]
        query_start_loc = inputs.query_start_loc.tolist()
        self_metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=inputs.seq_lens.tolist(),
            block_table=torch.from_numpy(inputs.block_table).to(self.device),
            block_lists=tables,
            slot_mapping=torch.from_numpy(inputs.slot_mapping).to(self.device),
            causal=True,
            num_decodes=step.num_decodes,
        )
        reads_inputs = any(sequence.request.num_encoder_tokens for sequence in step.sequences)
        cross_metadata = self._cross_metadata(step, inputs, query_start_loc, blocks) if reads_inputs else None
        return PagedAttentionContext.of_step(self.backend, self.caches, self_metadata, cross_metadata)

    def _cross_metadata(
        self, step: ScheduledStep, inputs: StepInputs, query_start_loc: list[int], blocks: BlockManager
    ) -> AttentionMetadata:
        requests = [sequence.request for sequence in step.sequences]
        tables = [blocks.get_cross_block_table(request.request_id) for request in requests]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        ranges = after = None
        if not self.info.is_encoder_decoder:  # what a token reads depends on where it stands
            ranges, after = _cross_ranges(requests, inputs)
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=[request.num_encoder_tokens for request in requests],
            block_table=torch.from_numpy(padded).to(self.device),
            block_lists=tables,
            slot_mapping=None,
            causal=False,
            num_decodes=step.num_decodes,
            key_ranges=ranges,
            after_input=None if after is None else torch.from_numpy(after).to(self.device),
        )

    def _select(self, hidden: torch.Tensor, step: ScheduledStep, inputs: StepInputs) -> StepOutput:
        finished, prompt_rows = [], []
        for index, sequence in enumerate(step.sequences):
            request = sequence.request
            whole = request.is_prompt_known and inputs.seq_lens[index] == len(sequence.token_ids)
            if whole and not request.prefill_only:
                finished.append(index)
            wanted = request.sampling.prompt_logprobs is not None and not request.prompt_logprobs_told
            if wanted and sequence.num_computed_tokens < len(request.prompt):
                start, end = inputs.query_start_loc[index : index + 2].tolist()
                prompt_rows.append(PromptRows(sequence, sequence.num_computed_tokens, hidden[start:end]))
        rows = torch.from_numpy(inputs.query_start_loc[1:][finished] - 1).to(self.device)
        sequences = [step.sequences[index] for index in finished]
        return StepOutput(sequences, self.logits(hidden[rows]), prompt_rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[k, hidden_size] -> float32 [k, vocab_size]."""
        if len(hidden) == 0:
            return torch.empty(0, self.spec.vocab_size)
        return self.model.logits(hidden).float()  # argmax over bfloat16 is six times slower on a CPU


def _cross_inputs(request: Request) -> list[CrossInput]:
    """The inputs of a request as the rows of its cross table, in the order of the prompt."""
    inputs = []
    for item in request.inputs:
        assert item.metadata is not None
        layout = item.metadata.layout
        visible = layout.num_encoder_tokens if layout.num_visible_tokens is None else layout.num_visible_tokens
        inputs.append(CrossInput(item.start or 0, layout.num_encoder_tokens, visible))
    return inputs


def _cross_ranges(requests: ListOf[Request], inputs: StepInputs) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Of each token of the step: the rows that it reads of its request's table, and whether it stands behind an input.

    Returns int64 [num_tokens, 2] and bool [num_tokens].
    """
    ranges, after = [], []
    for request, start, end in zip(requests, inputs.query_start_loc, inputs.query_start_loc[1:], strict=False):
        known, positions = _cross_inputs(request), inputs.positions[start:end]
        ranges.append(key_ranges(known, positions))
        after.append(after_input(known, positions))
    return np.concatenate(ranges), np.concatenate(after)


def _independent(moves: list[BlockMove]) -> Iterator[list[BlockMove]]:
    """Runs of moves of one kind that can be done at once: none reads what another one of its run writes."""
    batch: list[BlockMove] = []
    written: set[int] = set()
    for move in moves:
        if move.target in written or (move.kind == "copy" and move.source in written):
            yield batch
            batch, written = [], set()
        batch.append(move)
        written.add(move.target)
    if batch:
        yield batch


def _embedding_rows(expansion: ListOf[tuple[int, int]], placeholder: int | None) -> Any:
    """Which tokens of an expansion are replaced by encoder outputs: those with the placeholder's id."""
    flags = np.concatenate([np.full(count, token_id == placeholder) for token_id, count in expansion])
    return np.flatnonzero(flags)
