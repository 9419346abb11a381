"""Weights come straight from the files, whatever the layout; what does not fit is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import TriptychError
from common.model_info import load_model_info
from engine.encoders.text import T5Encoder
from engine.models.checkpoint_index import CheckpointError
from engine.models.registry import load_decoder, load_encoder
from tests.engine.models.dense import decoder_of, edit_json, logits_of
from tests.engine.models.reads import noted_reads, reads_of_both
from tests.engine.models.test_decoders import assert_equal_logits, transformers_logits
from tests.tiny import encdec, florence2
from tests.tiny_models import make_llama, make_whisper

CPU = torch.device("cpu")
INPUT_IDS = torch.arange(20)
Tensors = dict[str, torch.Tensor]


def rewritten(source: Path, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a model folder with other tensors in its file."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_loads_equal(ours: Path, original: Path) -> None:
    assert torch.equal(logits_of(decoder_of(ours), INPUT_IDS), logits_of(decoder_of(original), INPUT_IDS))


def renamed(old: str, new: str, tensors: Tensors) -> Tensors:
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


def parameters_of(folder: Path) -> Tensors:
    """The parameters of the decoder, and of the encoder if there is one."""
    info = load_model_info(str(folder))
    found = dict(load_decoder(info, CPU, torch.float32)[0].named_parameters())
    if info.media_kind:
        encoder = load_encoder(info, CPU, torch.float32)[0].module
        found |= {f"encoder.{name}": parameter for name, parameter in encoder.named_parameters()}
    return found


def test_shards_are_read_as_one_file_is(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_loads_equal(folder, llama)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "whisper"])
def test_encoder_and_decoder_share_out_the_checkpoint(family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    tensors = load_file(folder / "model.safetensors")
    encoder, decoder = reads_of_both(folder)
    assert encoder.keys().isdisjoint(decoder)
    assert encoder | decoder == {name: tensor.nbytes for name, tensor in tensors.items()}
    assert all("visual." in name or ".encoder." in name for name in encoder)


def test_todays_names_of_qwen2_5_vl_load_as_the_older_ones(qwen2_5_vl: Path, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> Tensors:
        renamed = {}
        for name, tensor in tensors.items():
            new = name.replace("visual.", "model.visual.").replace("model.layers.", "model.language_model.layers.")
            new = new.replace("model.embed_tokens", "model.language_model.embed_tokens")
            renamed[new.replace("model.norm.", "model.language_model.norm.")] = tensor
        assert set(renamed).isdisjoint(tensors)
        return renamed

    folder = rewritten(qwen2_5_vl, tmp_path / "renamed", rename)
    assert_loads_equal(folder, qwen2_5_vl)
    assert sum(reads_of_both(folder)[0].values()) == sum(reads_of_both(qwen2_5_vl)[0].values())


def test_whisper_loads_without_the_outer_prefix(whisper: Path, tmp_path: Path) -> None:
    folder = rewritten(
        whisper, tmp_path / "bare", lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()}
    )
    assert sum(reads_of_both(folder)[1].values()) == sum(reads_of_both(whisper)[1].values())


@pytest.mark.parametrize(
    ("family", "head", "embedding"),
    [
        ("llama", "lm_head.weight", "model.embed_tokens.weight"),
        ("whisper", "proj_out.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_a_head_beside_a_tied_embedding_is_read_only_where_it_differs(
    family: str, head: str, embedding: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for differs in (False, True):
        folder = rewritten(
            request.getfixturevalue(family),
            tmp_path / str(differs),
            lambda tensors, differs=differs: {**tensors, head: tensors[embedding] + 0.5 * differs},  # type: ignore[misc]
        )
        with noted_reads() as sizes:
            decoder_of(folder)
        assert (head in sizes) == differs


def test_a_head_that_config_json_calls_tied_and_is_not_counts_as_in_transformers(llama: Path, tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}

    folder = rewritten(llama, tmp_path / "untied", add_head)
    assert_equal_logits(logits_of(decoder_of(folder), INPUT_IDS), transformers_logits(folder, INPUT_IDS))


@pytest.mark.parametrize(
    ("make", "embedding", "alone"),
    [
        (make_llama, "model.embed_tokens", "lm_head"),
        (make_whisper, "model.decoder.embed_tokens", "proj_out"),
        (encdec.make_bart, "model.shared", "lm_head"),
        (encdec.make_bart, "model.shared", "model.decoder.embed_tokens"),
        (encdec.make_bart, "model.shared", "model.encoder.embed_tokens"),
        (encdec.make_t5, "shared", "lm_head"),
        (encdec.make_t5, "shared", "encoder.embed_tokens"),
        (encdec.make_t5, "shared", "decoder.embed_tokens"),
        (florence2.make_florence2, "model.language_model.shared", "lm_head"),
        (florence2.make_florence2, "model.language_model.shared", "model.language_model.decoder.embed_tokens"),
        (florence2.make_florence2, "model.language_model.shared", "model.language_model.encoder.embed_tokens"),
    ],
)
def test_a_tied_embedding_is_read_by_whichever_name_it_was_saved(
    make: Callable[[Path], Path], embedding: str, alone: str, tmp_path: Path
) -> None:
    original = make(tmp_path / "original")
    folder = rewritten(original, tmp_path / "alone", partial(renamed, f"{embedding}.weight", f"{alone}.weight"))
    expected, got = (parameters_of(path) for path in (original, folder))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_an_encoder_leaves_the_scales_of_a_quantised_head_alone() -> None:
    names = ("lm_head.weight", "lm_head.weight_scale", "shared.weight")
    local = [T5Encoder.layout.local_name(name) for name in names]
    assert local == ["embed_tokens.weight", None, "embed_tokens.weight"]


def test_a_head_is_not_the_embedding_where_config_json_has_them_apart(llama: Path, tmp_path: Path) -> None:
    only_head = partial(renamed, "model.embed_tokens.weight", "lm_head.weight")
    folder = rewritten(llama, tmp_path / "model", only_head)
    edit_json(folder / "config.json", lambda content: {**content, "tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"missing embed_tokens\.weight"):
        decoder_of(folder)


def test_an_untied_head_is_read(qwen2: Path) -> None:
    with noted_reads() as sizes:
        decoder_of(qwen2)
    assert "lm_head.weight" in sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_converted(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = rewritten(llama, tmp_path / "other", lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    tensor = decoder_of(folder).get_parameter("layers.1.o_proj.weight")
    original = decoder_of(llama).get_parameter("layers.1.o_proj.weight")
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, original.to(dtype).float())


def test_missing_and_unexpected_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    def swap(tensors: Tensors) -> Tensors:
        tensors["model.layers.1.self_attn.surplus.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")
        return tensors

    folder = rewritten(llama, tmp_path / "swapped", swap)
    with pytest.raises(CheckpointError) as caught:
        decoder_of(folder)
    message = str(caught.value)
    assert "missing layers.1.self_attn.k_proj.weight" in message
    assert "unexpected model.layers.1.self_attn.surplus.weight" in message
    assert str(folder) in message


def test_a_checkpoint_of_another_size_is_refused_with_both_shapes(llama: Path, tmp_path: Path) -> None:
    cut = rewritten(
        llama,
        tmp_path / "cut",
        lambda tensors: {n: t[:, :-1] if n == "model.layers.0.mlp.down_proj.weight" else t for n, t in tensors.items()},
    )
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight in .* has shape \(64, 95\), the model needs \(64, 96\)"
    ):
        decoder_of(cut)
    narrow = rewritten(
        llama,
        tmp_path / "narrow",
        lambda tensors: {n: t[:-1] if n == "model.layers.0.mlp.up_proj.weight" else t for n, t in tensors.items()},
    )
    with pytest.raises(CheckpointError, match=r"up_proj.weight have 191 rows, the model needs 192"):
        decoder_of(narrow)


def test_integers_are_no_weights(llama: Path, tmp_path: Path) -> None:
    folder = rewritten(llama, tmp_path / "integers", lambda tensors: {n: t.to(torch.int8) for n, t in tensors.items()})
    with pytest.raises(CheckpointError, match="has dtype I8; supported: F32, F16, BF16, F64"):
        decoder_of(folder)


def test_a_cut_off_file_is_refused_before_anything_is_read(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(llama, folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size, message in (
        (len(content) - 1, "is cut off"),
        (5, "not a safetensors file"),
        (40, "not a safetensors file"),
    ):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=message):
            decoder_of(folder)
    path.write_bytes((3).to_bytes(8, "little") + b"{]}")
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        decoder_of(folder)


def test_a_folder_without_weights_says_what_is_expected(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        decoder_of(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"not in its folder: \.\./model.safetensors, model-1.safetensors"):
        decoder_of(folder)


def test_a_text_model_has_no_encoder(llama: Path) -> None:
    with pytest.raises(TriptychError, match="is a text model"):
        load_encoder(load_model_info(str(llama)), CPU, torch.float32)


def test_a_header_whose_bytes_are_not_those_of_its_shape_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "odd")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header["model.norm.weight"]["data_offsets"][1] -= 4
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[size:])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has 252 bytes, its shape needs 256"):
        decoder_of(folder)
