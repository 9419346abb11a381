"""LLaVA-1.5 and Idefics3: pixels, prompts and encoder outputs are transformers', and published folders load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    SiglipImageProcessorPil,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)

from common.errors import TriptychError
from common.media.video_rules import scaled_size
from common.model_info import ModelInfo, load_model_info
from common.text.processor import TextProcessor
from engine import processors
from engine.encoders import idefics3
from engine.encoders.idefics3 import Idefics3Encoder
from engine.encoders.llava import LlavaEncoder
from engine.models.base import EncoderModel
from engine.models.checkpoint_index import CheckpointError
from engine.models.llama import MULTIMODAL_LAYOUT, build
from engine.processors import ProcessedInput
from engine.processors.idefics3 import Idefics3Processor, PieceSettings, image_to_pieces, whole_pieces
from engine.processors.llava import CropSettings, LlavaProcessor, image_to_square
from tests.engine.models.dense import decoder_of, logits_of
from tests.engine.models.encoders import assert_bfloat16_close, assert_outputs_equal, encoder_of, pictures
from tests.engine.models.reads import reads_of_both
from tests.equality.processors import expand, make_processor
from tests.media_files import encoded, noise
from tests.tiny.llava import make_idefics3, make_llava

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llava": make_llava,
    "siglip": partial(make_llava, siglip=True),
    "idefics3": make_idefics3,
    "smolvlm": partial(make_idefics3, smolvlm=True),
}
SIZES = ((42, 42), (84, 140), (30, 29), (28, 196), (150, 75), (3, 90))
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    base = tmp_path_factory.mktemp("models")
    return lambda name: base / name if (base / name).exists() else MAKERS[name](base / name)


def processed(folder: Path, dtype: str = "float32") -> list[ProcessedInput]:
    return pictures(folder, dtype, SIZES)


# --- pixels

CROPS: list[tuple[type[Any], dict[str, Any]]] = [
    (CLIPImageProcessorPil, {}),
    (CLIPImageProcessorPil, {"size": 42, "crop_size": 42}),
    (CLIPImageProcessorPil, {"size": {"shortest_edge": 33}, "crop_size": {"height": 48, "width": 27}}),
    (CLIPImageProcessorPil, {"size": {"height": 30, "width": 50}, "do_center_crop": False, "resample": 2}),
    (CLIPImageProcessorPil, {"image_mean": [0.4] * 3, "image_std": [0.3] * 3, "rescale_factor": 0.01, "resample": 0}),
    (LlavaImageProcessorPil, {"size": {"shortest_edge": 40}, "crop_size": 40, "do_pad": True}),
    (SiglipImageProcessorPil, {}),
    (SiglipImageProcessorPil, {"size": {"height": 42, "width": 42}}),
]
PIECES: list[dict[str, Any]] = [
    {},
    {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
    {"size": {"longest_edge": 50}, "max_image_size": {"longest_edge": 64}},
    {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 30}, "do_image_splitting": False},
    {"size": {"height": 70, "width": 45}, "max_image_size": {"longest_edge": 28}, "resample": 3},
    {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "image_mean": [0.4] * 3, "resample": 0},
]


@pytest.mark.parametrize(("processor", "settings"), CROPS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cropped_pixels_are_transformers(processor: type[Any], settings: dict[str, Any], size: tuple[int, int]) -> None:
    image, theirs = noise(*size), processor(**settings)
    json = {**settings, "image_processor_type": processor.__name__.removesuffix("Pil")}
    ours = image_to_square(image, CropSettings.from_json(json))
    assert np.array_equal(ours, theirs(images=image, return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("settings", PIECES, ids=str)
@pytest.mark.parametrize("size", [(42, 42), (84, 140), (28, 196), (3, 90), (333, 201)], ids=str)
def test_pieces_are_transformers(settings: dict[str, Any], size: tuple[int, int]) -> None:
    image = noise(*size)
    pieces, rows, columns = image_to_pieces(image, PieceSettings.from_json(settings))
    theirs = Idefics3ImageProcessorPil(**settings)(images=image, return_tensors="np", return_row_col_info=True)
    assert np.array_equal(pieces, theirs["pixel_values"][0])
    assert (rows, columns) == (theirs["rows"][0][0], theirs["cols"][0][0])
    assert theirs["pixel_attention_mask"].all(), "a piece with padding would need a mask"


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([84, 1456, 2048, 5000]), st.sampled_from([28, 364]))
def test_sizes_are_transformers(width: int, height: int, longest_edge: int, side: int) -> None:
    resized = scaled_size(height, width, longest_edge)
    assert resized == get_resize_output_image_size(_blank(height, width), longest_edge)
    told = SimpleNamespace(resize=lambda image, size, resample: size)
    theirs: Any = Idefics3ImageProcessorPil.resize_for_vision_encoder(told, _blank(*resized), side)
    assert whole_pieces(*resized, side) == (theirs.height, theirs.width)


def _blank(height: int, width: int) -> npt.NDArray[np.uint8]:
    """A picture that takes no memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def test_a_size_with_a_limit_of_the_longest_edge_is_refused() -> None:
    with pytest.raises(ValueError, match="is not supported; supported: shortest_edge, or height and width"):
        CropSettings.from_json({"size": {"shortest_edge": 336, "longest_edge": 672}})


@pytest.mark.parametrize("settings", [CropSettings, PieceSettings])
@pytest.mark.parametrize("step", ["do_resize", "do_rescale", "do_normalize"])
def test_a_skipped_step_is_refused(settings: Any, step: str) -> None:
    with pytest.raises(ValueError, match=f"a preprocessor with {step} = false is not supported"):
        settings.from_json({step: False})


def test_a_hairline_is_refused_before_it_is_resized() -> None:
    settings = CropSettings.from_json({"size": 336, "crop_size": 336})
    with pytest.raises(TriptychError, match="a picture of 1 x 20000 pixels is too narrow: resized it is 336 x 6720000"):
        image_to_square(Image.new("RGB", (1, 20_000)), settings)


# --- prompts


@pytest.mark.parametrize("name", MAKERS)
def test_prompts_and_pixels_are_those_of_transformers_processor(name: str, folder_of: FolderOf) -> None:
    info = load_model_info(str(folder_of(name)))
    content = [
        part for number in range(len(SIZES)) for part in ({"type": "image"}, {"type": "text", "text": f"{number}"})
    ]
    prompt = TextProcessor(info).render_chat([{"role": "user", "content": content}])
    theirs = expand(make_processor(info), info, prompt, [noise(*size, seed=seed) for seed, size in enumerate(SIZES)])
    items = processed(info.folder)
    layouts = iter([item.layout for item in items])
    ours = []
    for token in prompt:
        expansion = next(layouts).expansion if token == info.placeholder_token_id else [(token, 1)]
        ours += [token for token, count in expansion for _ in range(count)]
    assert ours == theirs["input_ids"][0].tolist()
    for item in items:
        rows = sum(count for token, count in item.layout.expansion if token == info.placeholder_token_id)
        assert rows == item.layout.num_encoder_tokens == item.shape[0]
    pixels = np.concatenate(
        [item.arrays["pixel_values"].reshape(-1, *item.arrays["pixel_values"].shape[-3:]) for item in items]
    )
    assert np.array_equal(pixels, theirs["pixel_values"].flatten(0, -4).numpy())


def test_line_breaks_that_the_tokenizer_joins_are_one_token(folder_of: FolderOf) -> None:
    processors.init_worker(str(folder_of("idefics3")), "float32")
    split = processors.process("image", encoded(noise(84, 28))).layout.expansion
    ids = TextProcessor(load_model_info(str(folder_of("idefics3")))).encode("\n\n", add_special_tokens=False)
    assert len(ids) == 1
    assert split.count((ids[0], 1)) == 1


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("llava", "preprocessor_config.json", {"crop_size": 56}, "makes pictures of 56 x 56 pixels, .* takes 42 x 42"),
        ("llava", "preprocessor_config.json", {"do_center_crop": False}, "set do_center_crop and crop_size"),
        ("idefics3", "processor_config.json", {"image_seq_len": 9}, "makes 9 tokens of a piece .*, its encoder 4"),
        ("idefics3", "config.json", {"image_token_id": 999}, "has no token 999, its image_token_id"),
    ],
)
def test_settings_that_do_not_fit_the_encoder_are_refused(
    name: str, file: str, change: dict[str, Any], message: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(folder_of(name), folder)
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **change}))
    with pytest.raises(TriptychError, match=message):
        processors.init_worker(str(folder), "float32")


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_preprocessing_children_import_no_torch(name: str, folder_of: FolderOf) -> None:
    arguments = (str(folder_of(name)), "float32")
    with ProcessPoolExecutor(1, get_context("spawn"), processors.init_worker, arguments) as pool:
        assert pool.submit(processors.process, "image", encoded(noise(50, 60))).result(timeout=60).shape[1] == 64
        loaded = pool.submit(eval, "set(__import__('sys').modules)").result(timeout=60)
        assert {"torch", "transformers"}.isdisjoint(loaded)


# --- encoders


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("together_bytes", [1, 2**26], ids=["piece by piece", "at once"])
def test_outputs_equal_transformers_alone_and_together(
    name: str, together_bytes: int, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(idefics3._WIDEST_BYTES, "cpu", together_bytes)
    folder = folder_of(name)
    theirs = AutoModelForImageTextToText.from_pretrained(folder).eval()

    def expected(item: ProcessedInput) -> torch.Tensor:
        pixels = torch.from_numpy(item.arrays["pixel_values"])[None]
        return torch.cat(list(theirs.model.get_image_features(pixels).pooler_output))

    assert_outputs_equal(folder, processed(folder), expected)


@torch.inference_mode()
def test_several_layers_with_the_class_token_equal_transformers(tmp_path: Path) -> None:
    layers = {"vision_feature_layer": [-3, 1, -1], "vision_feature_select_strategy": "full"}
    folder = make_llava(tmp_path / "layers", **layers)
    [item, *_] = processed(folder)
    theirs = AutoModelForImageTextToText.from_pretrained(folder).eval()
    expected = theirs.model.get_image_features(torch.from_numpy(item.arrays["pixel_values"])[None]).pooler_output[0]
    assert item.shape == (37, 64)
    torch.testing.assert_close(encoder_of(folder).encode([item])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_bfloat16_stays_bfloat16(name: str, folder_of: FolderOf) -> None:
    assert_bfloat16_close(folder_of(name), processed(folder_of(name), "bfloat16"))


# --- loading


def assert_loads_equal(ours: Path, original: Path) -> None:
    assert torch.equal(logits_of(decoder_of(ours), torch.arange(20)), logits_of(decoder_of(original), torch.arange(20)))
    items = processed(original)[:2]
    for one, other in zip(encoder_of(ours).encode(items), encoder_of(original).encode(items), strict=True):
        assert torch.equal(one, other)


def _todays_name(name: str) -> str:
    new = name.replace("language_model.lm_head", "lm_head").replace("language_model.model", "model.language_model")
    return new.replace("vision_tower.", "model.vision_tower.").replace("multi_modal", "model.multi_modal")


def _published_name(name: str) -> str:
    """As in LLaVA-1.5's files: the tower has a level more."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize("rename", [_todays_name, _published_name])
def test_names_of_all_years_load(rename: Callable[[str], str], folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "renamed"
    shutil.copytree(folder_of("llava"), folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {rename(name.replace("vision_model.", "")): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    assert_loads_equal(folder, folder_of("llava"))


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_shards_are_shared_out_between_encoder_and_decoder(name: str, folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(folder_of(name), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForImageTextToText.from_pretrained(folder_of(name)).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_loads_equal(folder, folder_of(name))
    encoder, decoder = reads_of_both(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted([*encoder, *decoder]) == sorted(index)


@pytest.mark.parametrize("where", ["config", "text_config"])
def test_a_tied_head_may_be_told_of_in_either_config(where: str, tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "tied", tie_word_embeddings=True)
    assert not [name for name in load_file(folder / "model.safetensors") if "lm_head" in name]
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = where == "config"
    config["text_config"]["tie_word_embeddings"] = where == "text_config"
    (folder / "config.json").write_text(json.dumps(config))
    model = decoder_of(folder)
    assert "lm_head.weight" not in dict(model.named_parameters())
    theirs = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = theirs(torch.arange(20)[None]).logits[0]
    torch.testing.assert_close(logits_of(model, torch.arange(20)), expected, rtol=0, atol=1e-4)


def test_saved_position_numbers_are_not_read(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "numbered"
    shutil.copytree(folder_of("llava"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(37)[None]
    save_file(tensors, folder / "model.safetensors")
    assert_loads_equal(folder, folder_of("llava"))


def test_another_checkpoints_weights_are_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(folder_of("llava"), folder)
    shutil.copy(folder_of("siglip") / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"missing tower.embeddings.class_embedding"):
        encoder_of(folder)


def test_the_placeholder_has_the_key_of_older_or_of_newer_configurations(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(folder_of("llava"), folder)
    older = json.loads((folder / "config.json").read_text())
    token = older.pop("image_token_index")
    for key in ("image_token_index", "image_token_id"):
        (folder / "config.json").write_text(json.dumps({**older, key: token}))
        info = load_model_info(str(folder))
        assert info.placeholder_token_id == token
        _, layout, _ = LlavaProcessor(info)(encoded(noise(36, 36)))
        assert layout.expansion == [(token, 36)]


# --- published folders, without their weights

LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pixel_shuffle_factor": 4,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "use_resampler": False,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "idefics3",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
        "use_base_siglip": False,
    },
    "vocab_size": 49280,
}


def published(folder: Path, config: dict[str, Any], preprocessor: dict[str, Any]) -> ModelInfo:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return load_model_info(str(folder))


@pytest.mark.parametrize("config", [LLAVA_1_5, SMOLVLM_256M], ids=["llava-1.5-7b", "smolvlm-256m"])
def test_published_configs_give_the_parameters_that_transformers_gives(config: dict[str, Any], tmp_path: Path) -> None:
    info = published(tmp_path / "published", config, {})
    theirs_config = AutoConfig.from_pretrained(info.folder)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(theirs_config)
        decoder = build(info)
        encoder: EncoderModel = (LlavaEncoder if info.family.name == "llava" else Idefics3Encoder)(theirs_config)
    sizes = {name: parameter.numel() for name, parameter in theirs.named_parameters()}
    local = {MULTIMODAL_LAYOUT.local_name(name): count for name, count in sizes.items()}
    for name, parts in decoder.sources().items():
        assert decoder.get_parameter(name).numel() == sum(local[part] for part in parts)
    in_encoder = {encoder.layout.local_name(name): count for name, count in sizes.items()}
    for name, parameter in encoder.module.named_parameters():
        assert parameter.numel() == in_encoder[name]
    assert info.max_model_len == theirs_config.text_config.max_position_embeddings
    assert info.vocab_size == theirs_config.text_config.vocab_size


def test_a_published_llava_1_5_makes_576_tokens_of_every_picture(tmp_path: Path) -> None:
    preprocessor = {
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 336},
    }
    processor = LlavaProcessor(published(tmp_path / "published", LLAVA_1_5, preprocessor))
    image = noise(500, 375)
    arrays, layout, shape = processor(encoded(image))
    assert (layout.num_encoder_tokens, layout.expansion, shape) == (576, [(32000, 576)], (576, 4096))
    theirs = CLIPImageProcessorPil(**preprocessor)(images=image, return_tensors="np")["pixel_values"][0]
    assert np.array_equal(arrays["pixel_values"], theirs)


def test_a_published_smolvlm_makes_64_tokens_of_every_piece(folder_of: FolderOf, tmp_path: Path) -> None:
    preprocessor = {
        "do_image_splitting": True,
        "do_pad": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Idefics3ImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 512},
        "resample": 1,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 2048},
    }
    tiny = load_model_info(str(folder_of("smolvlm")))  # whose tokenizer stands in
    config = {**SMOLVLM_256M, "image_token_id": tiny.placeholder_token_id}
    info = published(tmp_path / "published", config, preprocessor)
    (info.folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    shutil.copy(tiny.folder / "tokenizer.json", info.folder)
    arrays, layout, shape = Idefics3Processor(info)(encoded(noise(640, 480)))
    assert arrays["pixel_values"].shape == (13, 3, 512, 512)
    assert (layout.num_encoder_tokens, shape) == (13 * 64, (13 * 64, 576))
    # Three rows of four pieces and the whole, two tokens before each; three line breaks (the last two are one token);
    # and the end.
    assert sum(count for _, count in layout.expansion) == 13 * (2 + 64) + 3 + 1
