"""The fingerprint of a model, equal for equal files and cheap for big ones, and its recommended sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from common.errors import TriptychError
from common.model_info import BUNDLED, load_model_info


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model that may be changed."""
    return Path(shutil.copytree(BUNDLED / "signpost", tmp_path / "signpost"))


def fingerprint(folder: Path) -> str:
    return load_model_info(str(folder)).fingerprint


def test_weights_that_are_there_twice_leave_the_fingerprint_as_it_is(folder: Path) -> None:
    """One host has downloaded them, another one has not."""
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert fingerprint(folder) == load_model_info("signpost").fingerprint


def test_equal_files_have_the_bundled_models_fingerprint(folder: Path) -> None:
    assert fingerprint(folder) == load_model_info("signpost").fingerprint


@pytest.mark.parametrize("at", [0.02, 0.5, 0.9])
def test_a_megabyte_of_zeros_anywhere_in_the_weights_shows(folder: Path, at: float) -> None:
    before, weights = fingerprint(folder), folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(int(at * weights.stat().st_size))
        file.write(bytes(2**20))
    assert fingerprint(folder) != before


def test_one_byte_at_the_end_or_in_a_small_file_shows(folder: Path) -> None:
    (folder / "small.safetensors").write_bytes(bytes(300_000))
    before = fingerprint(folder)
    (folder / "small.safetensors").write_bytes(bytes(150_000) + b"x" + bytes(149_999))
    changed = fingerprint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert len({before, changed, fingerprint(folder)}) == 3


def test_other_configuration_shows(folder: Path) -> None:
    before, config = fingerprint(folder), folder / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"rope_phi"'))
    assert fingerprint(folder) != before


def test_a_file_of_many_gigabytes_is_not_read_as_a_whole(folder: Path) -> None:
    with (folder / "big.safetensors").open("wb") as file:
        file.truncate(2**40)  # takes no room; reading it would outlast any test
    assert fingerprint(folder) != load_model_info("signpost").fingerprint


def test_without_generation_config_the_outer_part_of_config_says_what_ends_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["eos_token_id"] = 3
    for outer, expected in (([4, 5], (4, 5)), (0, (0,)), (None, (3,))):
        path.write_text(json.dumps({**config, "eos_token_id": outer}))
        assert load_model_info(str(folder)).eos_token_ids == expected


def test_the_recommended_sampling_is_that_of_generation_config(folder: Path) -> None:
    given = {"temperature": 1, "top_k": None, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(given))
    info = load_model_info(str(folder))
    assert info.sampling_defaults("auto") == {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
    assert info.sampling_defaults("none") == {}
    with pytest.raises(TriptychError, match="generation_config is 'auto' or 'none', not 'x'"):
        info.sampling_defaults("x")


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_p", 1.5), ("top_k", 0.5)])
def test_an_impossible_recommendation_is_a_sentence(folder: Path, name: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(TriptychError, match=f"^cannot use {folder}/generation_config.json: .*{name}.*config none$"):
        load_model_info(str(folder)).sampling_defaults("auto")


def test_weights_that_a_repository_has_twice_are_downloaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    again = ["consolidated.safetensors", "model.fp32-00001-of-00002.safetensors", "original/model.safetensors"]
    got: list[str] = []

    def download(_: str, **patterns: list[str]) -> Path:
        got.extend(filter_repo_objects([*used, *again, "pytorch_model.bin"], **patterns))
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_model_info("o/m")
    assert got == used


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("Got: ConnectError: no such host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(TriptychError, match=r"cannot be reached: check .*hf download o/m --local") as caught:
        load_model_info("o/m")
    assert "ConnectError" not in caught.value.info.message


def test_a_model_that_the_hub_keeps_back_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("401 Client Error.\n\nCannot access gated repo for url U.\nAccess to model o/m is restricted.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(TriptychError, match=r"hub: 401 Client Error\. Cannot access gated repo for url U\. Access to"):
        load_model_info("o/m")
