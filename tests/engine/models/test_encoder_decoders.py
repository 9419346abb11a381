"""BART, mBART, T5 and Flan-T5: our decoders and the encoders that we load compute what transformers computes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention

from common.errors import TriptychError
from common.model_info import load_model_info
from common.text.prompts import encode_tokens
from engine import processors
from engine.encoders.text import batches_by_length
from engine.models.registry import load_encoder
from engine.models.t5 import bucket_of_distance
from engine.processors import ProcessedInput
from tests.engine.models.dense import decoder_of, logits_of
from tests.engine.models.encoders import assert_outputs_equal
from tests.engine.models.reads import noted_reads, reads_of_both
from tests.engine.models.test_decoders import assert_equal_logits
from tests.equality.cases import ENCODER_DECODER_FAMILIES
from tests.equality.conftest import MAKERS
from tests.tiny import encdec

CPU = torch.device("cpu")
LENGTHS = (7, 40, 1, 128, 42, 7)


@pytest.fixture(scope="module", params=ENCODER_DECODER_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("models") / request.param)


def random_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, encdec.FIRST_LANGUAGE, (count,), generator=torch.Generator().manual_seed(seed))


def texts(folder: Path) -> list[ProcessedInput]:
    processors.init_worker(str(folder), "float32")
    return [
        processors.process("text", encode_tokens(random_ids(length, seed).tolist()))
        for seed, length in enumerate(LENGTHS)
    ]


def reference(folder: Path) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def transformers_logits(model: Any, encoder_output: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(encoder_outputs=(encoder_output[None],), decoder_input_ids=input_ids[None]).logits[0]
    return logits


def assert_equals_transformers(folder: Path) -> None:
    encoder_output = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    theirs = transformers_logits(reference(folder), encoder_output, random_ids(100))
    assert_equal_logits(logits_of(decoder_of(folder), random_ids(100), encoder_output=encoder_output), theirs)


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of a model folder with other tensors in its file."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    changed = {name: tensor.clone() for name, tensor in change(load_file(path)).items()}
    save_file(changed, path, metadata={"format": "pt"})
    return folder


def test_decoders_equal_transformers(folder: Path) -> None:
    assert_equals_transformers(folder)


def test_encoders_equal_transformers_alone_and_together(folder: Path) -> None:
    theirs = reference(folder).get_encoder()

    def expected(item: ProcessedInput) -> torch.Tensor:
        return theirs(torch.from_numpy(item.arrays["input_ids"])[None]).last_hidden_state[0]

    assert_outputs_equal(folder, texts(folder), expected)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("bart", {"activation_function": "gelu_new", "scale_embedding": True}),
        ("bart", {"decoder_attention_heads": 2, "decoder_layers": 3, "decoder_ffn_dim": 40}),
        ("bart", {"tie_word_embeddings": False}),
        ("mbart", {"scale_embedding": False, "activation_function": "gelu"}),
        ("t5", {"num_decoder_layers": 3, "d_kv": 16, "num_heads": 4}),
        ("t5", {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
        ("flan_t5", {"feed_forward_proj": "gated-silu"}),
    ],
    ids=str,
)
def test_variants_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    assert_equals_transformers(MAKERS[family](tmp_path / "model", **overrides))


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (32, 64), (8, 100)])
def test_distances_fall_into_the_buckets_of_transformers(buckets: int, distance: int) -> None:
    table = bucket_of_distance(buckets, distance)
    back = torch.arange(len(table))
    theirs = T5Attention._relative_position_bucket(-back, False, buckets, distance)
    assert torch.equal(table, theirs)
    far = T5Attention._relative_position_bucket(torch.tensor([-10_000]), False, buckets, distance)
    assert table[-1] == far[0] == buckets - 1


@torch.inference_mode()
def test_bfloat16_stays_bfloat16_and_close(folder: Path) -> None:
    info, ids = load_model_info(str(folder)), random_ids(12)
    processors.init_worker(str(folder), "bfloat16")
    item = processors.process("text", encode_tokens(ids.tolist()))
    half, full = (load_encoder(info, CPU, dtype)[0].encode([item])[0] for dtype in (torch.bfloat16, torch.float32))
    assert half.dtype == torch.bfloat16
    assert half.nbytes == item.size_bytes
    assert (half.float() - full).norm() < 0.1 * full.norm()
    low, high = (
        logits_of(decoder_of(folder, output.dtype), ids, encoder_output=output).float() for output in (half, full)
    )
    assert (low - high).norm() < 0.1 * high.norm()


def test_texts_of_similar_length_share_a_batch() -> None:
    assert list(batches_by_length([7, 40, 1, 128, 42, 7])) == [[2], [0, 5], [1, 4], [3]]
    assert list(batches_by_length([])) == []


def test_encoder_and_decoder_share_nothing_but_the_embedding(folder: Path) -> None:
    encoder, decoder = reads_of_both(folder)
    [shared] = encoder.keys() & decoder.keys()
    assert shared.endswith("shared.weight")
    assert encoder.keys() | decoder.keys() == set(load_file(folder / "model.safetensors"))


def test_every_name_that_the_embedding_had_is_understood(folder: Path, tmp_path: Path) -> None:
    """Checkpoints hold it once, under any of its names, or once per user of it."""

    def under(*names: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            [shared] = [name for name in tensors if name.endswith("shared.weight")]
            prefix, table = shared.removesuffix("shared.weight"), tensors.pop(shared)
            return tensors | {prefix + name: table for name in names}

        return change

    both = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    original = logits_of(decoder_of(folder), random_ids(9), encoder_output=torch.ones(5, 64))
    for number, names in enumerate((both, ("shared.weight", *both))):
        copy = rewritten(folder, tmp_path / str(number), under(*names))
        load_encoder(load_model_info(str(copy)), CPU, torch.float32)
        ours = logits_of(decoder_of(copy), random_ids(9), encoder_output=torch.ones(5, 64))
        assert torch.equal(ours, original)


def test_the_bare_model_of_facebooks_bart_base_is_one_that_generates(tmp_path: Path) -> None:
    """Its file has no outer prefix, no head and no bias of one."""
    full = encdec.make_bart(tmp_path / "bart")
    bare = rewritten(
        full,
        tmp_path / "bare",
        lambda tensors: {
            name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "final_logits_bias"
        },
    )
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["BartModel"]}))
    assert load_model_info(str(bare)).family.name == "bart"
    encoder, decoder = reads_of_both(bare)
    assert encoder.keys() | decoder.keys() == set(load_file(bare / "model.safetensors"))
    assert_equals_transformers(bare)


def test_shards_are_read_as_one_file_is(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "sharded"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    reference(folder).save_pretrained(copy, max_shard_size="60KB")
    assert len(list(copy.glob("*.safetensors"))) > 2
    encoder_output = torch.ones(5, 64)
    theirs = logits_of(decoder_of(folder), random_ids(9), encoder_output=encoder_output)
    assert torch.equal(logits_of(decoder_of(copy), random_ids(9), encoder_output=encoder_output), theirs)


def test_a_bart_checkpoint_may_lack_the_bias_of_its_head(tmp_path: Path) -> None:
    folder = encdec.make_bart(tmp_path / "bart")
    without = rewritten(
        folder,
        tmp_path / "without",
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "final_logits_bias"},
    )
    bias = load_file(folder / "model.safetensors")["final_logits_bias"]
    assert bias.any()
    plain, biased = (
        logits_of(decoder_of(path), random_ids(9), encoder_output=torch.ones(5, 64)) for path in (without, folder)
    )
    torch.testing.assert_close(plain + bias, biased)


def test_what_transformers_saves_of_flan_t5_today_loads_as_what_was_published(tmp_path: Path) -> None:
    published = encdec.make_flan_t5(tmp_path / "published")
    assert json.loads((published / "config.json").read_text())["tie_word_embeddings"] is False
    saved = tmp_path / "saved"
    reference(published).save_pretrained(saved)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is True
    outputs = [
        logits_of(decoder_of(path), random_ids(9), encoder_output=torch.ones(5, 64)) for path in (published, saved)
    ]
    assert torch.equal(*outputs)


def test_the_unused_bias_of_old_t5_checkpoints_is_left_alone(tmp_path: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    folder = encdec.make_t5(tmp_path / "t5")
    old = rewritten(folder, tmp_path / "old", lambda tensors: {**tensors, name: torch.zeros(16, 4)})
    with noted_reads() as sizes:
        decoder_of(old)
    assert name not in sizes


def test_t5_takes_512_tokens_where_its_config_names_no_limit(tmp_path: Path) -> None:
    folder = encdec.make_t5(tmp_path / "t5")
    assert load_model_info(str(folder)).max_model_len == 128
    config = json.loads((folder / "config.json").read_text())
    del config["n_positions"]
    (folder / "config.json").write_text(json.dumps(config))
    info = load_model_info(str(folder))
    assert info.max_model_len == info.max_encoder_tokens == decoder_of(folder).spec.max_model_len == 512


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_an_unknown_activation_is_refused_at_load(family: str, tmp_path: Path) -> None:
    folder = MAKERS[family](tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": "snake"}))
    with pytest.raises(TriptychError, match="activation 'snake' is not supported; supported: gelu, "):
        decoder_of(folder)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (b"", "the encoder prompt is empty"),
        (b"abc", "3 bytes are no token ids"),
        (encode_tokens([5, 264]), "token id 264 of the encoder prompt is outside the vocabulary of 264"),
        (encode_tokens([5] * 129), "has 129 tokens, the encoder of .* takes at most 128"),
    ],
)
def test_an_encoder_prompt_is_checked_before_it_is_encoded(tmp_path: Path, media: bytes, message: str) -> None:
    processors.init_worker(str(encdec.make_bart(tmp_path / "bart")), "float32")
    with pytest.raises(TriptychError, match=message):
        processors.process("text", media)


def test_no_panel_imports_what_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import sys; from common.model_info import load_model_info; from engine import processors;"
        "[processors.init_worker(folder, 'float32') for folder in sys.argv[1:]];"
        "processors.process('text', bytes([5, 0, 0, 0]));"
        "assert 'torch' not in sys.modules;"
        "import torch; from engine.models.registry import load_decoder;"
        "[load_decoder(load_model_info(folder), torch.device('cpu'), torch.float32) for folder in sys.argv[1:]];"
        "assert 'transformers' not in sys.modules"
    )
    folders = [str(MAKERS[name](tmp_path / name)) for name in ENCODER_DECODER_FAMILIES]
    subprocess.run([sys.executable, "-c", program, *folders], check=True, timeout=120)
