"""Mllama's three panels compute what transformers' model does: tiles, encoder outputs, logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import MllamaForConditionalGeneration, MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from common.errors import TriptychError
from common.model_info import load_model_info
from engine import processors
from engine.attention.backend import PagedAttentionContext
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_backend import TorchBackend
from engine.models.base import DecoderModel
from engine.models.registry import load_encoder
from engine.processors import ProcessedInput
from engine.state.cross_ranges import CrossInput, table_rows, write_ranges
from tests.engine.models.dense import decoder_of
from tests.media_files import encoded, noise
from tests.tiny.mllama import IMAGE_TOKEN, ROWS_PER_TILE, TILE_SIZE, make_mllama

SIZES = ((28, 28), (60, 20), (57, 200), (9, 150), (300, 300), (1, 40))
MAX_TILES, BLOCK_SIZE = 4, 4


@pytest.fixture(scope="module")
def mllama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mllama(tmp_path_factory.mktemp("models") / "mllama")


@pytest.fixture(scope="module")
def theirs(mllama: Path) -> Any:
    return MllamaForConditionalGeneration.from_pretrained(mllama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def items(mllama: Path) -> Iterator[list[ProcessedInput]]:
    processors.init_worker(str(mllama), "float32")
    yield [processors.process("image", encoded(noise(*size, seed=seed))) for seed, size in enumerate(SIZES)]
    processors._worker = None


@pytest.fixture(scope="module")
def outputs(mllama: Path, items: list[ProcessedInput]) -> list[torch.Tensor]:
    encoder, _ = load_encoder(load_model_info(str(mllama)), torch.device("cpu"), torch.float32)
    return encoder.encode(items)


# --- images


def test_a_preprocessor_for_another_encoder_is_refused(mllama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_mllama(folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 56, "width": 56}}')
    with pytest.raises(TriptychError, match="up to 4 tiles of 56 x 56 pixels, its encoder takes 4 of 28 x 28"):
        processors.init_worker(str(folder), "float32")


def test_a_picture_is_one_token_and_announces_its_rows(mllama: Path, items: list[ProcessedInput]) -> None:
    assert load_model_info(str(mllama)).max_encoder_tokens == MAX_TILES * ROWS_PER_TILE
    for item in items:
        tiles = item.arrays["num_tiles"].item()
        assert item.layout.expansion == [(IMAGE_TOKEN, 1)]
        assert item.layout.num_encoder_tokens == item.shape[0] == MAX_TILES * ROWS_PER_TILE
        assert item.layout.num_visible_tokens == tiles * ROWS_PER_TILE
    assert {item.arrays["num_tiles"].item() for item in items} == {1, 2, 3, 4}


# --- the encoder


@torch.inference_mode()
def test_pictures_equal_transformers_alone_and_together(
    mllama: Path, theirs: Any, items: list[ProcessedInput], outputs: list[torch.Tensor]
) -> None:
    encoder, _ = load_encoder(load_model_info(str(mllama)), torch.device("cpu"), torch.float32)
    for size, seed, item, output in zip(SIZES, range(len(SIZES)), items, outputs, strict=True):
        features = _features([noise(*size, seed=seed)])
        states = theirs.model.vision_model(**features).last_hidden_state
        expected = theirs.model.multi_modal_projector(states).flatten(0, 3)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output, encoder.encode([item])[0], rtol=1e-4, atol=1e-4)
        assert tuple(output.shape) == item.shape
        assert output.nbytes == item.size_bytes


# --- the decoder

PROMPTS: list[tuple[list[int], list[int]]] = [
    ([7, 8, 9, 10, 11], []),
    ([IMAGE_TOKEN, 7, 8, 9], [1]),
    ([7, 8, IMAGE_TOKEN, 9, 10, 11], [3]),
    ([7, IMAGE_TOKEN, 8, 9, IMAGE_TOKEN, 10, 11], [0, 4]),
    ([7, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 8, 9], [1, 0, 2]),
    ([7, 8, IMAGE_TOKEN, IMAGE_TOKEN, 9, IMAGE_TOKEN], [5, 1, 0]),
]
"""Prompts and the pictures in them."""


@pytest.mark.parametrize(("prompt", "pictures"), PROMPTS, ids=str)
def test_logits_equal_transformers(
    mllama: Path,
    theirs: Any,
    items: list[ProcessedInput],
    outputs: list[torch.Tensor],
    prompt: list[int],
    pictures: list[int],
) -> None:
    [ours] = step_logits(decoder_of(mllama), items, outputs, [(prompt, pictures)])
    _assert_equal(ours, their_logits(theirs, prompt, pictures))


def test_requests_in_one_batch_do_not_see_each_others_pictures(
    mllama: Path, theirs: Any, items: list[ProcessedInput], outputs: list[torch.Tensor]
) -> None:
    together = step_logits(decoder_of(mllama), items, outputs, PROMPTS)
    for ours, (prompt, pictures) in zip(together, PROMPTS, strict=True):
        _assert_equal(ours, their_logits(theirs, prompt, pictures))


def test_bfloat16_is_close_to_float32(mllama: Path, items: list[ProcessedInput], outputs: list[torch.Tensor]) -> None:
    full, half = (
        torch.cat(step_logits(decoder_of(mllama, dtype), items, outputs, PROMPTS[:3])).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < (half - full).norm() < 0.1 * full.norm()


def test_a_picture_changes_the_answer_before_and_behind_it(
    mllama: Path, items: list[ProcessedInput], outputs: list[torch.Tensor]
) -> None:
    prompt = [7, IMAGE_TOKEN, 8]
    one, other = (step_logits(decoder_of(mllama), items, outputs, [(prompt, [picture])])[0] for picture in (1, 3))
    assert ((one - other).abs().amax(dim=-1) > 0.01).all()


def test_tokens_that_are_only_read_have_embeddings_but_no_logits(mllama: Path) -> None:
    model = decoder_of(mllama)
    assert model.spec.num_embeddings == model.spec.vocab_size + 8
    assert model.embed(torch.tensor([IMAGE_TOKEN])).shape == (1, model.spec.hidden_size)
    assert model.logits(torch.zeros(1, model.spec.hidden_size)).shape == (1, IMAGE_TOKEN)


def test_layers_of_either_kind_are_counted_apart(mllama: Path) -> None:
    spec = decoder_of(mllama).spec
    assert (spec.num_layers, spec.num_cross_layers, spec.num_caches) == (3, 2, 3)


@pytest.mark.parametrize("layers", [[1, 7], [0, 1, 2, 3, 4]])
def test_impossible_layers_of_cross_attention_are_refused(tmp_path: Path, layers: list[int]) -> None:
    folder = make_mllama(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("[\n      1,\n      3\n    ]", str(layers)))
    with pytest.raises(TriptychError, match=r"cross_attention_layers .* of 5 layers are not supported"):
        decoder_of(folder)


@torch.inference_mode()
def step_logits(
    model: DecoderModel,
    items: list[ProcessedInput],
    outputs: list[torch.Tensor],
    requests: list[tuple[list[int], list[int]]],
) -> list[torch.Tensor]:
    """The logits of whole prompts, computed in one step over a paged cache as the engine does: request by request."""
    spec, backend, dtype = model.spec, TorchBackend(), model.get_parameter("lm_head.weight").dtype
    shape = (2, 200, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_caches)]
    blocks = iter(range(1, 200))
    lengths = [len(prompt) for prompt, _ in requests]
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    tables, cross_tables, cross_lens = [], [], []
    ranges, behind = np.zeros((starts[-1], 2), np.int64), np.zeros(starts[-1], np.bool_)
    for (prompt, pictures), start in zip(requests, starts, strict=False):
        places = [index for index, token in enumerate(prompt) if token == IMAGE_TOKEN]
        inputs = [
            CrossInput(place, items[index].shape[0], items[index].layout.num_visible_tokens or 0)
            for place, index in zip(places, pictures, strict=True)
        ]
        tables.append([next(blocks) for _ in range(-(-len(prompt) // BLOCK_SIZE))])
        cross_lens.append(sum(item.num_rows for item in inputs))
        cross_tables.append([next(blocks) for _ in range(-(-cross_lens[-1] // BLOCK_SIZE))])
        tokens = slice(start, start + len(prompt))
        write_ranges(inputs, 0, ranges[tokens], behind[tokens])
        if inputs:
            rows = table_rows([outputs[index] for index in pictures], inputs).to(dtype)
            for layer in range(spec.num_cross_layers):
                backend.write(caches[layer], *model.project_cross(layer, rows), _slots(cross_tables[-1], len(rows)))
    own = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=_padded(tables),
        slot_mapping=torch.cat([_slots(table, length) for table, length in zip(tables, lengths, strict=True)]),
        causal=True,
        num_decodes=0,
    )
    cross = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=cross_lens,
        block_table=_padded(cross_tables),
        slot_mapping=None,
        causal=False,
        num_decodes=0,
        key_ranges=ranges,
        after_input=behind,
    )
    context = PagedAttentionContext.of_step(backend, caches, own, cross if any(cross_lens) else None)
    ids = torch.tensor([token for prompt, _ in requests for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return list(model.logits(model(model.embed(ids), positions, context)).split(lengths))


@torch.inference_mode()
def their_logits(theirs: Any, prompt: list[int], pictures: list[int]) -> torch.Tensor:
    inputs: dict[str, torch.Tensor] = {}
    if pictures:
        inputs = _features([noise(*SIZES[index], seed=index) for index in pictures])
        num_tiles = [inputs["aspect_ratio_mask"][0].sum(-1).tolist()]
        sparse = [get_cross_attention_token_mask(prompt, IMAGE_TOKEN)]
        mask = convert_sparse_cross_attention_mask_to_dense(sparse, num_tiles, MAX_TILES, len(prompt))
        inputs["cross_attention_mask"] = torch.from_numpy(mask)
    logits: torch.Tensor = theirs(input_ids=torch.tensor([prompt]), **inputs).logits[0]
    return logits


def _features(images: list[Image.Image]) -> dict[str, torch.Tensor]:
    size = {"height": TILE_SIZE, "width": TILE_SIZE}
    features = MllamaImageProcessorPil(size=size)(images=images, return_tensors="pt")
    features.pop("num_tiles")
    return dict(features)


def _assert_equal(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def _slots(table: list[int], length: int) -> torch.Tensor:
    steps = torch.arange(length)
    return torch.tensor(table, dtype=torch.long)[steps // BLOCK_SIZE] * BLOCK_SIZE + steps % BLOCK_SIZE


def _padded(tables: list[list[int]]) -> torch.Tensor:
    padded = torch.zeros(len(tables), max(1, *map(len, tables)), dtype=torch.long)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)
    return padded
