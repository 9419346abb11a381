"""The models of docs/how-to/add-a-model.md answer as transformers does once they stand where the page puts them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

import common.families
import engine.encoders
import engine.models
import engine.processors
from common.families import FAMILIES, Family
from common.sampling_params import SamplingParams
from engine.llm import LLM
from tests.media_files import encoded, noise
from tests.tiny_models import (
    CHAT_SPECIALS,
    FIRST_SPECIAL,
    save_chat_tokenizer,
    save_generation,
    save_random,
    text_config,
    write_json,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-model.md"
BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)
IMAGE_TOKEN = FIRST_SPECIAL + len(CHAT_SPECIALS)
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything on the page is in place: the files beside the real ones, the entries in the table."""
    root, entries = tmp_path_factory.mktemp("example"), list[Family]()
    patch = pytest.MonkeyPatch()
    for path, code in BLOCK.findall(PAGE.read_text()):
        if path == "common/families.py":
            entries += eval(f"[{code}]", {"Family": Family})
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(code)
    for package in (engine.models, engine.encoders, engine.processors):
        folder = str(root.joinpath(*package.__name__.split(".")))
        patch.setattr(package, "__path__", [*package.__path__, folder])
    patch.setattr(common.families, "FAMILIES", (*FAMILIES, *entries))
    importlib.invalidate_caches()
    yield root
    patch.undo()
    for path in root.glob("engine/*/*.py"):
        sys.modules.pop(".".join(path.relative_to(root).with_suffix("").parts), None)


def test_the_text_model_of_the_page_answers_as_transformers(example: Path, tmp_path: Path) -> None:
    folder, prompts = tmp_path / "olmo2", [[5], list(range(40, 70)), [7, 8, 9]]
    save_random(Olmo2ForCausalLM(Olmo2Config(**text_config(tie_word_embeddings=False))), folder, 0)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL)
    save_chat_tokenizer(folder, CHAT_SPECIALS)
    theirs: Any = Olmo2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [_generate(theirs, prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert _answers(folder, [{"prompt_token_ids": prompt} for prompt in prompts]) == expected


def test_the_vision_model_of_the_page_answers_as_transformers(example: Path, tmp_path: Path) -> None:
    folder, num_tokens = _make_vipllava(tmp_path / "vipllava"), 9
    theirs: Any = VipLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    images = [noise(30, 50, seed=1), noise(80, 21, seed=2)]
    prompts, expected = [], []
    for order in ([0], [1], [0, 1]):
        prompt = [65, *([IMAGE_TOKEN, 66] * len(order))]
        pixels = processor(images=[images[index] for index in order], return_tensors="pt")["pixel_values"]
        expanded = [token for token in prompt for _ in range(num_tokens if token == IMAGE_TOKEN else 1)]
        expected.append(_generate(theirs, expanded, pixel_values=pixels))
        media = [encoded(images[index]) for index in order]
        prompts.append({"prompt_token_ids": prompt, "multi_modal_data": {"image": media}})
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert _answers(folder, prompts) == expected


def test_the_example_keeps_the_rules_of_the_repository(example: Path) -> None:
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", *options, str(example)], check=True, cwd=ROOT, timeout=60)
    subprocess.run([*ruff, "format", "--check", *options, str(example)], check=True, cwd=ROOT, timeout=60)


def test_each_file_of_the_example_is_short(example: Path) -> None:
    files = sorted(example.glob("engine/*/*.py"))
    assert len(files) == 3
    for path in files:
        assert len(path.read_text().splitlines()) <= 120


@pytest.mark.usefixtures("example")
def test_the_entries_of_the_page_are_not_in_the_table_already() -> None:
    names = {family.name for family in FAMILIES}
    assert {"olmo2", "vipllava"} == {family.name for family in common.families.FAMILIES} - names


def _answers(folder: Path, prompts: list[Any]) -> list[list[int]]:
    llm = LLM(folder, max_num_batched_tokens=16)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], **inputs: torch.Tensor) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": MAX_TOKENS, "min_new_tokens": MAX_TOKENS, "do_sample": False, "eos_token_id": None}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _make_vipllava(folder: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = VipLlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=21, patch_size=7).to_dict(),
        text_config=LlamaConfig(**text_config()).to_dict(),
        vision_feature_layer=[-2, -3, 1],
        image_token_index=IMAGE_TOKEN,
    )
    save_random(VipLlavaForConditionalGeneration(config), folder, 0)
    save_generation(folder, eos_token_id=FIRST_SPECIAL + 2, pad_token_id=FIRST_SPECIAL)
    size = {"size": {"shortest_edge": 21}, "crop_size": {"height": 21, "width": 21}}
    write_json(folder / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor", **size})
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["VipLlavaForConditionalGeneration"]
    return save_chat_tokenizer(folder, (*CHAT_SPECIALS, "<image>"))
