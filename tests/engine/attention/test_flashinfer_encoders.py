"""Encoders' attention is block-diagonal on every path that they take; encoders of transformers give the same rows with
FlashInfer's attention, computed by a fake, as with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.families import FAMILIES
from common.model_info import load_model_info
from common.text.prompts import encode_tokens, join_media
from engine import processors
from engine.attention.flashinfer.served import unserved
from engine.encoders.attention import CPU_NAME, flash_part, use_flashinfer, use_kernels
from engine.encoders.qwen_vl import QwenVisionEncoder, VisionAttention
from engine.models.base import EncoderModel
from engine.models.registry import load_encoder
from engine.native import ops as native_ops
from engine.state.spec import HeadSpec
from tests import fake_flashinfer, tiny_models
from tests.engine.attention.paged import assert_equal, dense
from tests.equality.conftest import MAKERS as FOLDERS
from tests.fake_flashinfer.dense import Wrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu, no_compiler
from tests.media_files import encoded, noise, sound_file, tone
from tests.tiny import encdec, florence2, gemma3, llava, qwen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_worker_left() -> Iterator[None]:
    yield
    processors._worker = None


def pictures() -> list[bytes]:
    return [encoded(noise(*size)) for size in ((56, 84), (112, 56), (140, 140))]


def sounds() -> list[bytes]:
    return [sound_file(tone(seconds)) for seconds in (0.5, 1.0)]


def texts() -> list[bytes]:
    """Padded to one batch by less than a quarter."""
    return [encode_tokens(list(range(10, 10 + length))) for length in (9, 10, 11)]


def texts_with_pictures() -> list[bytes]:
    """Pictures have equal sizes, the texts behind them do not."""
    image = encoded(noise(florence2.SIDE, florence2.SIDE))
    return [join_media([florence2.IMAGE_TOKEN_ID, *range(10, 10 + length)], image) for length in (9, 10, 11)]


ENCODERS = {
    "Whisper": (64, ["whisper"]),
    "LLaVA, LLaVA-NeXT (CLIP)": (64, ["llava", "llava_next"]),
    "SmolVLM 256M and 500M (SigLIP base)": (64, ["smolvlm"]),
    "Qwen3-VL 2B and 4B": (64, ["qwen3_vl"]),
    "Qwen2-Audio": (64, ["qwen2_audio"]),
    "Qwen3-ASR": (64, ["qwen3_asr"]),
    "BART, mBART": (64, ["bart", "mbart"]),
    "Florence-2: BART over image and text": (64, ["florence2"]),
    "Florence-2: DaViT": (32, ["florence2"]),
    "Idefics3, SmolVLM 2.2B, Gemma 3, LLaVA with SigLIP (so400m)": (
        72,
        ["idefics3", "smolvlm", "gemma3", "llava_siglip"],
    ),
    "Qwen3-VL 8B and larger": (72, ["qwen3_vl"]),
    "Qwen2-VL, Qwen2.5-VL": (80, ["qwen2_vl", "qwen2_5_vl"]),
    "Mllama": (80, ["mllama"]),
    "T5, Flan-T5": (64, ["t5", "flan_t5"]),
}
"""Rows of the table in docs/how-to/cuda.md: head sizes of published checkpoints, and models that have such encoders."""
SERVED = (64, 16)
"""Sizes of heads: tiny towers have 16, which the fake computes as well as any."""


def make_smolvlm(folder: Path) -> Path:
    """Has a name of its own, as processes that share these tests have to agree on their ids."""
    return llava.make_idefics3(folder, smolvlm=True)


MAKERS = [
    (tiny_models.make_whisper, "audio", sounds, 1),
    (tiny_models.make_qwen2_5_vl, "image", pictures, 2),  # windows and pictures
    (qwen.make_qwen2_vl, "image", pictures, 1),
    (qwen.make_qwen3_vl, "image", pictures, 1),
    (llava.make_llava, "image", pictures, 1),
    (llava.make_llava_next, "image", pictures, 1),
    (llava.make_idefics3, "image", pictures, 1),
    (gemma3.make_gemma3, "image", pictures, 1),
    (qwen.make_qwen3_asr, "audio", sounds, 1),
    (make_smolvlm, "image", pictures, 1),
    (qwen.make_qwen2_audio, "audio", sounds, 1),
    (encdec.make_bart, "text", texts, 1),
    (encdec.make_mbart, "text", texts, 1),
    (florence2.make_florence2, "image", texts_with_pictures, 1),
]
"""With the kinds of sequences that their layers look at; the last four pad."""


def loaded(folder: Path) -> EncoderModel:
    encoder, _ = load_encoder(load_model_info(str(folder)), CPU, torch.float32)
    processors.init_worker(str(folder), "float32")
    return encoder


@pytest.mark.parametrize("head_dims", [SERVED, (64,)], ids=["served", "heads for PyTorch"])
@pytest.mark.parametrize(("make", "kind", "media", "kinds"), MAKERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_encoders_give_the_same_rows_with_a_plan_for_each_kind_of_sequences(
    tmp_path: Path,
    make: Callable[[Path], Path],
    kind: Any,
    media: Callable[[], list[bytes]],
    kinds: int,
    head_dims: tuple[int, ...],
) -> None:
    encoder = loaded(make(tmp_path))
    items = [processors.process(kind, data) for data in media()]
    batches = [items, items[:1]]
    expected = [rows for batch in batches for rows in encoder.encode(batch)]
    part = flash_part(encoder)
    assert part is not None
    with flashinfer_on_cpu(head_dims), capture_logs() as logs:
        assert use_flashinfer(part, CPU)
        before = Wrapper.num_plans
        got = [rows for batch in batches for rows in encoder.encode(batch)]
    assert Wrapper.num_plans - before == (len(batches) * kinds if head_dims is SERVED else 0)
    told = [line for line in logs if line["event"] == "attention by PyTorch instead of FlashInfer"]
    assert len(told) == (head_dims is not SERVED), "once, not for each layer or batch"
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_page_says_which_encoders_flashinfer_computes(tmp_path: Path) -> None:
    """Tiny towers have small heads: the page has the published ones."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "cuda.md").read_text()
    table = page.partition("### Encoders by family\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table]
    assert [(name, int(size)) for name, size, _ in rows] == [(name, size) for name, (size, _) in ENCODERS.items()]
    with_encoder = {family.name for family in FAMILIES if family.encoder}
    infos = [load_model_info(str(FOLDERS[one](tmp_path / one))) for _, names in ENCODERS.values() for one in names]
    assert {info.family.name for info in infos} == with_encoder
    for name, head_dim, path in rows:
        heads = HeadSpec(num_heads=8, num_kv_heads=8, head_dim=int(head_dim))
        for one in ENCODERS[name][1]:
            has_part = flash_part(loaded(tmp_path / one)) is not None
            expected = "FlashInfer" if has_part and unserved(heads, torch.bfloat16) is None else "PyTorch"
            assert path == expected, one


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Any]]:
    """The functions that the layers of loaded encoders call: on a CPU in float32 and in bfloat16 (our kernel where it
    is plain attention), and with FlashInfer (several lengths, too)."""
    makers = {"float32": tiny_models.make_whisper, "bfloat16": llava.make_llava, "flashinfer": qwen.make_qwen2_vl}
    towers = {kind: loaded(make(tmp_path_factory.mktemp("m"))) for kind, make in makers.items()}
    use_kernels(towers["bfloat16"], CPU, torch.bfloat16, "auto")
    with flashinfer_on_cpu((16, 64)):
        use_flashinfer(cast(Any, towers["flashinfer"].unmasked), CPU)
    names = {kind: cast(Any, tower.unmasked).config._attn_implementation for kind, tower in towers.items()}
    assert names["bfloat16"] == CPU_NAME or not native_ops.is_enabled()
    return {kind: ALL_ATTENTION_FUNCTIONS[name] for kind, name in names.items()}


MASKS = ("none", "bool", "heads", "addends", "position_bias")
"""Of layers: none, bool alike for all heads or not, addends as a mask, addends as T5 passes its own."""


@pytest.mark.parametrize("path", ["float32", "bfloat16", "flashinfer", "flashinfer, laid end to end"])
@settings(max_examples=40)
@given(st.data(), st.sampled_from([16, 64, 72]), st.sampled_from([torch.bfloat16, torch.float32]), st.booleans())
def test_encoder_attention_is_block_diagonal_and_takes_masks_of_each_item(
    attention: dict[str, Callable[..., Any]],
    path: str,
    data: st.DataObject,
    head_dim: int,
    dtype: torch.dtype,
    scaled: bool,
) -> None:
    attend, is_ragged, num_heads = attention[path.split(",")[0]], "," in path, 4
    size = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)) if is_ragged else [size] * 3
    kind = "none" if is_ragged else data.draw(st.sampled_from(MASKS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    total, batch = sum(lengths), 1 if is_ragged else 3
    tokens = [torch.randn(total, num_heads, head_dim, generator=generator).to(dtype) for _ in range(3)]
    seen = torch.rand(batch, 1 if kind == "bool" else num_heads, size, size, generator=generator) < 0.5
    seen |= torch.eye(size, dtype=torch.bool)
    addends = torch.randn(seen.shape, generator=generator).to(dtype)
    mask = torch.zeros(num_heads, total, total, dtype=torch.float64)
    mask.masked_fill_(~torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool(), float("-inf"))
    told: dict[str, Any] = {}
    if kind != "none":
        told["position_bias" if kind == "position_bias" else "attention_mask"] = seen if kind in MASKS[1:3] else addends
        blocks = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")) if kind in MASKS[1:3] else addends
        for item, block in enumerate(blocks.double()):
            mask[:, item * size : (item + 1) * size, item * size : (item + 1) * size] += block
    if is_ragged:
        told["cu_seq_lens_q"] = torch.tensor([0, *accumulate(lengths)])
    scale = 0.3 if scaled else head_dim**-0.5
    layer = torch.nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    shaped = (x.view(batch, -1, num_heads, head_dim).transpose(1, 2) for x in tokens)
    with flashinfer_on_cpu((16, 64)):
        got, _ = attend(layer, *shaped, **{"attention_mask": None, "scaling": scale, **told})
    assert_equal(got.flatten(0, 1), dense(*tokens, mask, scale), dtype, biased=kind != "none")


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from([16, 64, 80]), st.integers(0, 2**32 - 1))
@torch.inference_mode()
def test_a_vision_tower_attends_within_each_picture_or_window(lengths: list[int], head_dim: int, seed: int) -> None:
    """They lie end to end; neighbours of one length are computed together."""
    torch.manual_seed(seed)
    num_heads, total = 2, sum(lengths)
    size = num_heads * head_dim
    config = SimpleNamespace(_attn_implementation="sdpa")
    theirs = {"qkv": torch.nn.Linear(size, 3 * size), "proj": torch.nn.Identity(), "config": config}
    module = VisionAttention(SimpleNamespace(**theirs, num_heads=num_heads, head_dim=head_dim))
    module.num_key_value_groups = 1  # type: ignore[assignment]
    hidden = torch.randn(total, size)
    rotation = torch.ones(total, head_dim), torch.zeros(total, head_dim)
    got = module(hidden, torch.tensor([0, *accumulate(lengths)]), rotation)
    mask = torch.zeros(1, total, total, dtype=torch.float64)
    mask.masked_fill_(~torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool(), float("-inf"))
    query, key, value = module.qkv(hidden).unflatten(-1, (3, num_heads, head_dim)).unbind(1)
    assert_equal(got.unflatten(-1, (num_heads, head_dim)), dense(query, key, value, mask), torch.float32)


@pytest.mark.parametrize("make", [tiny_models.make_qwen2_5_vl, qwen.make_qwen2_vl], ids=["windows", "pictures"])
@torch.inference_mode()
def test_a_tower_is_told_on_the_host_all_that_it_would_fetch_from_the_device(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Without the sizes of pictures it has nothing to fetch."""
    encoder = loaded(make(tmp_path))
    assert isinstance(encoder, QwenVisionEncoder)
    items = [processors.process("image", data).arrays for data in pictures()]
    pixels = torch.cat([torch.from_numpy(arrays["pixel_values"]) for arrays in items])
    sizes = torch.stack([torch.from_numpy(arrays["image_grid_thw"]) for arrays in items])
    told = encoder.module(pixels, grid_thw=None, **encoder.layout_of(sizes, CPU))
    assert torch.equal(told.pooler_output, encoder.module(pixels, grid_thw=sizes).pooler_output)


def test_an_encoder_keeps_to_pytorch_where_kernels_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = loaded(tiny_models.make_whisper(tmp_path))
    assert encoder.unmasked is not None
    before = encoder.unmasked.config._attn_implementation
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "plan", no_compiler)
    with flashinfer_on_cpu(SERVED):
        assert not use_flashinfer(encoder.unmasked, CPU)
    assert encoder.unmasked.config._attn_implementation == before
    said = capsys.readouterr()
    assert "Could not find nvcc" in said.out + said.err


def test_two_encoders_of_a_process_have_an_attention_each(tmp_path: Path) -> None:
    with flashinfer_on_cpu(SERVED):
        encoders = [loaded(make(tmp_path / make.__name__)) for make in (tiny_models.make_whisper, llava.make_llava)]
        for encoder in encoders:
            assert encoder.unmasked is not None
            use_flashinfer(encoder.unmasked, CPU)
    names = [encoder.unmasked.config._attn_implementation for encoder in encoders if encoder.unmasked is not None]
    assert len(set(names)) == 2
    assert all("flash" in name for name in names), "by this transformers sees that no mask is needed"
    first, second = (ALL_ATTENTION_FUNCTIONS[name] for name in names)
    assert first is not second
