"""Qwen2-VL, Qwen3-VL and Qwen2-Audio: each part computes what transformers' does, from folders as published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from common.errors import TriptychError
from common.media.video_rules import read_rules
from common.model_info import load_model_info
from engine import processors
from engine.models.config import read_text_config
from engine.processors import ProcessedInput, make_processor
from engine.processors.qwen2_audio import num_output_tokens
from engine.state.inputs import EncoderRows
from tests.engine.models.dense import DenseAttention, decoder_of, edit_json, logits_of
from tests.engine.models.encoders import PATCHES_ATOL, QWEN_SIZES, assert_outputs_equal, encoder_of, pictures
from tests.engine.models.test_decoders import assert_equal_logits
from tests.equality.conftest import MAKERS
from tests.equality.processors import image_processor
from tests.media_files import encoded, noise, sound_file, tone
from tests.tiny import qwen

SECONDS = (0.05, 0.7, 2.345, float(qwen.CLIP_SECONDS))
MODELS: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
}
VISUAL = ("qwen2_vl", "qwen3_vl")
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("qwen")
    return {name: MAKERS[name](root / name) for name in (*MODELS, "qwen2_5_vl")}


def reference(folders: Folders, name: str) -> Any:
    return MODELS[name].from_pretrained(folders[name], dtype=torch.float32).eval()


def clips(folder: Path, dtype: str = "float32") -> list[ProcessedInput]:
    processors.init_worker(str(folder), dtype)
    return [processors.process("audio", sound_file(samples_of(seconds), subtype="FLOAT")) for seconds in SECONDS]


def samples_of(seconds: float) -> Any:
    rng = np.random.default_rng(round(seconds * 1000))
    samples = tone(seconds)[:, 0]
    return (samples + rng.normal(0, 0.05, len(samples))).astype(np.float32)


# --- preprocessing


@pytest.mark.parametrize("name", ["qwen2_5_vl", *VISUAL])
@pytest.mark.parametrize("size", [*QWEN_SIZES, (640, 480), (3, 500), (1, 1)], ids=str)
def test_pictures_are_processed_as_by_transformers(folders: Folders, name: str, size: tuple[int, int]) -> None:
    info = load_model_info(str(folders[name]))
    processors.init_worker(str(folders[name]), "float32")
    image = noise(*size)
    item = processors.process("image", encoded(image))
    expected = image_processor(info.folder)(images=image, return_tensors="np")
    assert np.array_equal(item.arrays["pixel_values"], expected["pixel_values"])
    time, height, width = expected["image_grid_thw"][0].tolist()
    num_tokens = time * height * width // 4
    assert item.layout.grid == (time, height // 2, width // 2)
    assert item.layout.expansion == [(info.placeholder_token_id, num_tokens)]
    assert item.layout.num_encoder_tokens == num_tokens
    assert item.shape == (num_tokens, 64 * 3 if name == "qwen3_vl" else 64)


@pytest.mark.parametrize("seconds", [*SECONDS, 0.0301, 0.04, 1.00001])
def test_clips_are_processed_as_by_transformers(folders: Folders, seconds: float) -> None:
    processors.init_worker(str(folders["qwen2_audio"]), "float32")
    samples = samples_of(seconds)
    item = processors.process("audio", sound_file(samples, subtype="FLOAT"))
    extract = AutoFeatureExtractor.from_pretrained(folders["qwen2_audio"])
    expected = extract(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    assert np.array_equal(item.arrays["input_features"], expected["input_features"][0])
    assert np.array_equal(item.arrays["feature_attention_mask"], expected["attention_mask"][0])
    [(token_id, count)] = item.layout.expansion
    assert (token_id, item.layout.grid) == (261, None)
    assert item.shape == (count, 64) == (item.layout.num_encoder_tokens, 64)


def test_clips_have_as_many_tokens_as_transformers_makes(folders: Folders) -> None:
    tower = reference(folders, "qwen2_audio").model.audio_tower
    frames = torch.arange(0, 3001)
    _, expected = tower._get_feat_extract_output_lengths(frames)
    assert [num_output_tokens(count) for count in frames.tolist()] == expected.clamp(min=0).tolist()


def test_a_clip_without_a_token_is_refused(folders: Folders) -> None:
    processors.init_worker(str(folders["qwen2_audio"]), "float32")
    with pytest.raises(TriptychError, match=r"the clip is 0\.020 s long; it must be longer than 0\.02 s") as caught:
        processors.process("audio", sound_file(tone(0.02)))
    assert caught.value.info.code == "bad_media"
    with pytest.raises(TriptychError, match="at most 5 s are accepted"):
        processors.process("audio", sound_file(tone(5.1)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3_vl", {"patch_size": 14}, "makes patches of 14 pixels and merges squares of 2, its encoder takes 16"),
        ("qwen2_vl", {"merge_size": 1}, "makes patches of 14 pixels and merges squares of 1, its encoder takes 14"),
        ("qwen2_audio", {"chunk_length": 30}, "makes 40 mel bins of 3000 frames, its encoder takes 40 of 500"),
        ("qwen2_audio", {"feature_size": 80}, "makes 80 mel bins of 500 frames, its encoder takes 40 of 500"),
    ],
)
def test_a_preprocessor_of_another_model_is_refused(
    folders: Folders, tmp_path: Path, name: str, settings: dict[str, int], message: str
) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / "model"))
    edit_json(folder / "preprocessor_config.json", lambda json: json | settings)
    with pytest.raises(TriptychError, match=message):
        processors.init_worker(str(folder), "float32")


# --- encoders


@pytest.mark.parametrize("name", VISUAL)
def test_pictures_equal_transformers_alone_and_together(folders: Folders, name: str) -> None:
    model = reference(folders, name).double().model

    def expected(item: ProcessedInput) -> torch.Tensor:
        pixels = torch.from_numpy(item.arrays["pixel_values"]).double()
        features = model.get_image_features(pixels, torch.from_numpy(item.arrays["image_grid_thw"])[None])
        layers = getattr(features, "deepstack_features", None) or []
        # Of the one picture; transformers 5.17 does not split them by picture.
        stacked = [layer if torch.is_tensor(layer) else layer[0] for layer in layers]
        return torch.cat((features.pooler_output[0], *stacked), dim=-1).float()

    assert_outputs_equal(folders[name], pictures(folders[name]), expected, atol=PATCHES_ATOL)


def test_clips_equal_transformers_alone_and_together(folders: Folders) -> None:
    folder, model = folders["qwen2_audio"], reference(folders, "qwen2_audio")
    heard: list[torch.Tensor] = []
    model.model.multi_modal_projector.register_forward_hook(lambda module, args, output: heard.append(output[0]))

    def expected(item: ProcessedInput) -> torch.Tensor:
        features = torch.from_numpy(item.arrays["input_features"])[None]
        mask = torch.from_numpy(item.arrays["feature_attention_mask"])[None]
        input_ids = torch.tensor([[5, *[261] * item.layout.num_encoder_tokens]])
        model(input_ids, features, attention_mask=torch.ones_like(input_ids), feature_attention_mask=mask)
        return heard.pop()[: item.shape[0]]

    assert_outputs_equal(folder, clips(folder), expected, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_do_not_share_memory_and_keep_their_dtype(folders: Folders, name: str) -> None:
    folder = folders[name]
    items = (clips if name == "qwen2_audio" else pictures)(folder, "bfloat16")
    encoder = encoder_of(folder, torch.bfloat16)
    for batch in (items, items[1:2]):
        for item, output in zip(batch, encoder.encode(batch), strict=True):
            assert output.dtype == torch.bfloat16
            assert output.is_contiguous()
            assert output.nbytes == item.size_bytes


# --- decoders


@torch.inference_mode()
@pytest.mark.parametrize("name", VISUAL)
def test_decoders_turn_by_time_height_and_width(folders: Folders, input_ids: torch.Tensor, name: str) -> None:
    positions = torch.randint(0, 60, (3, len(input_ids)), generator=torch.Generator().manual_seed(2))
    expected = reference(folders, name)(input_ids=input_ids[None], position_ids=positions[:, None]).logits[0]
    assert_equal_logits(logits_of(decoder_of(folders[name]), input_ids, positions), expected)


@torch.inference_mode()
def test_qwen3_vl_adds_the_deep_stacked_outputs_behind_its_first_layers(folders: Folders) -> None:
    folder, model = folders["qwen3_vl"], reference(folders, "qwen3_vl")
    items = pictures(folder)[1:3]
    outputs = torch.cat(encoder_of(folder).encode(items))
    ids = [9, 8, *[261] * items[0].layout.num_encoder_tokens, 7, *[261] * items[1].layout.num_encoder_tokens, 6, 5]
    input_ids = torch.tensor(ids)
    pixels = {
        "pixel_values": torch.from_numpy(np.concatenate([item.arrays["pixel_values"] for item in items])),
        "image_grid_thw": torch.from_numpy(np.stack([item.arrays["image_grid_thw"] for item in items])),
    }
    kinds = input_ids[None].eq(261).long()
    expected = model(input_ids=input_ids[None], mm_token_type_ids=kinds, **pixels).logits[0]
    positions, _ = model.model.get_rope_index(input_ids[None], kinds, image_grid_thw=pixels["image_grid_thw"])

    ours = decoder_of(folder)
    assert ours.spec.encoder_width == 3 * 64
    rows = input_ids.eq(261).nonzero()[:, 0]
    embeddings = ours.embed(input_ids)
    embeddings[rows] = outputs[:, :64]
    attention = DenseAttention(ours)
    without = ours.logits(ours(embeddings, positions[:, 0], attention))
    attention.encoder_rows = EncoderRows(rows, outputs)
    logits = ours.logits(ours(embeddings, positions[:, 0], attention))
    assert_equal_logits(logits, expected)
    assert not torch.allclose(without[rows[-1] :], expected[rows[-1] :], atol=1e-2)


@torch.inference_mode()
def test_the_decoder_of_qwen2_audio_equals_transformers(folders: Folders, input_ids: torch.Tensor) -> None:
    expected = reference(folders, "qwen2_audio")(input_ids=input_ids[None]).logits[0]
    assert_equal_logits(logits_of(decoder_of(folders["qwen2_audio"]), input_ids), expected)


# --- folders as they are published


def split_weights(folder: Path, rename: Callable[[str], str] = str) -> None:
    """Two shards with an index instead of one file, each tensor under the name that `rename` makes of it."""
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        part = {name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % 2 == number - 1}
        save_file(part, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_same_model(folder: Path, original: Path, input_ids: torch.Tensor) -> None:
    assert torch.equal(logits_of(decoder_of(folder), input_ids), logits_of(decoder_of(original), input_ids))
    audio = load_model_info(str(folder)).media_kind == "audio"
    ours, theirs = ((clips if audio else pictures)(place)[:1] for place in (folder, original))
    assert torch.equal(encoder_of(folder).encode(ours)[0], encoder_of(original).encode(theirs)[0])


def test_qwen2_vl_as_published(folders: Folders, tmp_path: Path, input_ids: torch.Tensor) -> None:
    """Flat config, M-RoPE in `rope_scaling`, `visual.` and `model.` names, pixels named in the preprocessor."""

    def flat(config: dict[str, Any]) -> dict[str, Any]:
        text = config.pop("text_config")
        section = text.pop("rope_parameters")["mrope_section"]
        scaling = {"type": "mrope", "mrope_section": section}
        vision = {**config["vision_config"], "model_type": "qwen2_vl", "in_chans": 3, "spatial_patch_size": 14}
        extra = {"model_type": "qwen2_vl", "vision_config": vision, "rope_theta": 1e4, "rope_scaling": scaling}
        return {**text, **config, **extra}

    folder = Path(shutil.copytree(folders["qwen2_vl"], tmp_path / "model"))
    edit_json(folder / "config.json", flat)
    split_weights(folder)
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"visual.merger.ln_q.weight", "model.layers.0.self_attn.q_proj.bias"} <= names.keys()
    assert decoder_of(folder).spec.mrope_section == (2, 3, 3)
    assert_same_model(folder, folders["qwen2_vl"], input_ids)


def test_settings_in_processor_config_go_before_an_older_file_beside_it(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen2_vl"], tmp_path / "model"))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    smaller = {**settings, "min_pixels": 28 * 28, "max_pixels": 56 * 84}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": smaller}))
    info, image = load_model_info(str(folder)), noise(300, 200)
    theirs = AutoImageProcessor.from_pretrained(folder, backend="pil")(images=[image], return_tensors="np")
    assert len(theirs["pixel_values"]) == 24
    assert np.array_equal(make_processor(info)(encoded(image))[0]["pixel_values"], theirs["pixel_values"])
    assert read_rules(info).image_pixels == 56 * 84


def test_qwen2_vl_as_transformers_saves_it_today(folders: Folders, tmp_path: Path, input_ids: torch.Tensor) -> None:
    """New names of the tensors; settings of the preprocessor in processor_config.json; tied in the text part only."""
    folder = Path(shutil.copytree(folders["qwen2_vl"], tmp_path / "model"))
    prefixes = {"visual.": "model.visual.", "model.": "model.language_model."}
    split_weights(
        folder, lambda name: next(new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old))
    )
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    edit_json(
        folder / "config.json",
        lambda config: {
            **config,
            "tie_word_embeddings": False,
            "text_config": {**config["text_config"], "tie_word_embeddings": True},
        },
    )
    assert_same_model(folder, folders["qwen2_vl"], input_ids)


def test_qwen3_vl_as_published(tmp_path: Path, input_ids: torch.Tensor) -> None:
    """`rope_theta` and `rope_scaling` in the text part; the larger ones have an output head of their own."""
    original = qwen.make_qwen3_vl(tmp_path / "original")
    folder = Path(shutil.copytree(original, tmp_path / "model"))

    def older(config: dict[str, Any]) -> dict[str, Any]:
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "model_type": "qwen3_vl_text"}
        return {**config, "vision_config": {**config["vision_config"], "model_type": "qwen3_vl"}}

    edit_json(folder / "config.json", older)
    split_weights(folder)
    assert_same_model(folder, original, input_ids)

    untied = load_file(original / "model.safetensors")
    untied["lm_head.weight"] = 2 * untied["model.language_model.embed_tokens.weight"]
    save_file(untied, original / "model.safetensors", metadata={"format": "pt"})
    edit_json(original / "config.json", lambda config: config | {"tie_word_embeddings": False})
    assert torch.equal(logits_of(decoder_of(original), input_ids), 2 * logits_of(decoder_of(folder), input_ids))


PUBLISHED_NAMES = ("language_model.model.", "language_model.lm_head.", "audio_tower.", "multi_modal_projector.")


@pytest.mark.parametrize(
    "prefixes",
    [
        PUBLISHED_NAMES,
        ("language_model.model.model.", *PUBLISHED_NAMES[1:]),
        ("model.language_model.", "lm_head.", "model.audio_tower.", "model.multi_modal_projector."),
    ],
    ids=["as published", "as transformers 5.17 to 5.22 save them", "new names"],
)
def test_qwen2_audio_loads_by_all_its_names(
    folders: Folders, tmp_path: Path, input_ids: torch.Tensor, prefixes: tuple[str, ...]
) -> None:
    def rename(name: str) -> str:
        name = name.replace("language_model.model.model.", "language_model.model.")
        index = next(index for index, prefix in enumerate(PUBLISHED_NAMES) if name.startswith(prefix))
        return prefixes[index] + name.removeprefix(PUBLISHED_NAMES[index])

    folder = Path(shutil.copytree(folders["qwen2_audio"], tmp_path / "model"))
    split_weights(folder, rename)
    assert_same_model(folder, folders["qwen2_audio"], input_ids)


def test_the_sparse_config_of_qwen2_audio_is_filled_in(folders: Folders, tmp_path: Path) -> None:
    """The 7B model's config.json names of its decoder only what is not a default."""
    folder = Path(shutil.copytree(folders["qwen2_audio"], tmp_path / "model"))
    text = {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rope_theta": 10000,
        "rms_norm_eps": 1e-05,
        "sliding_window": 32768,
        "use_mrope": False,
        "vocab_size": 156032,
    }
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32, "d_model": 1280}
    config = {"model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"]}
    sparse = {**config, "audio_config": audio, "text_config": text, "audio_token_index": 151646, "vocab_size": 156032}
    edit_json(folder / "config.json", lambda _: sparse)
    edit_json(folder / "preprocessor_config.json", lambda json: json | {"feature_size": 128, "chunk_length": 30})
    info = load_model_info(str(folder))
    decoder = read_text_config(info)
    assert (decoder.hidden_size, decoder.num_layers, decoder.num_heads, decoder.num_kv_heads) == (4096, 32, 32, 32)
    assert (decoder.intermediate_size, decoder.head_dim, decoder.tied) == (11008, 128, False)
    assert set(decoder.windows) == {None}
    assert (info.max_model_len, info.vocab_size, info.placeholder_token_id) == (8192, 156032, 151646)
    processors.init_worker(str(folder), "bfloat16")
    item = processors.process("audio", sound_file(tone(30.0)))
    assert (item.shape, item.size_bytes) == ((750, 4096), 750 * 4096 * 2)
