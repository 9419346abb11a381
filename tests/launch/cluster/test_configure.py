"""Settings: flags over environment over file over defaults, and the same settings in a child process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

import pytest

from common.config import AttentionBackendName, Settings
from common.errors import TriptychError
from launch.cluster.configure import _check_variables, child_environment, load_settings
from services.process.drain import VARIABLE


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_flags_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_settings({}).port == 8000
    (tmp_path / "triptych.toml").write_text(
        "port = 1111\nhost = '0.0.0.0'\n[engine]\nmax_num_seqs = 11\nblock_size = 8\n"
    )
    assert load_settings({"port": None}).port == 1111
    monkeypatch.setenv("TRIPTYCH_PORT", "2222")
    monkeypatch.setenv("TRIPTYCH_ENGINE__MAX_NUM_SEQS", "22")
    assert load_settings({}).port == 2222
    settings = load_settings({"port": 3333, "engine.max_num_seqs": 33, "engine.device": None})
    assert (settings.port, settings.engine.max_num_seqs) == (3333, 33)
    assert (settings.host, settings.engine.block_size) == ("0.0.0.0", 8)


@pytest.mark.parametrize("name", ["topology", "instance_id", "served_model_name"])
def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compose passes on variables that are not set as empty ones."""
    monkeypatch.setenv(f"TRIPTYCH_{name.upper()}", "")
    assert getattr(load_settings({}), name) is None


def test_bad_values_are_named_in_one_line() -> None:
    with pytest.raises(TriptychError) as raised:
        load_settings({"port": 99999, "engine.device": "gpu", "colour": "red", "cluster": "a b", "instance_id": "e:0"})
    message = raised.value.info.message
    assert "\n" not in message
    assert "port = 99999: input should be less than or equal to 65535" in message
    assert "engine.device = 'gpu'" in message
    assert "unknown setting 'colour'" in message
    assert "cluster = 'a b': value error, has to consist of letters" in message
    assert "instance_id = 'e:0': " in message


def test_a_misspelt_attention_backend_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(TriptychError, match=r"engine\.attention_backend = 'flashinfr'") as raised:
        load_settings({"engine.attention_backend": "flashinfr"})
    assert all(repr(name) in raised.value.info.message for name in get_args(AttentionBackendName))


def test_misspelt_settings_are_refused_with_the_closest_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "triptych.toml"
    file.write_text("prot = 1\n[engine]\nmax_num_seq = 11\n")
    with pytest.raises(TriptychError) as raised:
        load_settings({})
    message = raised.value.info.message
    assert "unknown setting 'prot' in triptych.toml; did you mean 'port'?" in message
    assert "unknown setting 'engine.max_num_seq' in triptych.toml; did you mean 'max_num_seqs'?" in message
    file.unlink()
    for name in ("TRIPTYCH_PROT", "TRIPTYCH_ENGINE__MAX_NUM_SEQ", "TRIPTYCH_MODELS", VARIABLE):
        monkeypatch.setenv(name, "1")
    with pytest.raises(TriptychError) as raised:
        load_settings({})
    assert raised.value.info.message == (
        "unknown setting 'TRIPTYCH_ENGINE__MAX_NUM_SEQ' in the environment; did you mean "
        "'TRIPTYCH_ENGINE__MAX_NUM_SEQS'?; unknown setting 'TRIPTYCH_PROT' in the environment; did you mean "
        "'TRIPTYCH_PORT'?"
    )


def test_variables_of_the_compose_files_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in Path(__file__).parents[3].glob("docker-compose*.yml"):
        for name in re.findall(r"\bTRIPTYCH_[A-Z_]+", file.read_text()):
            monkeypatch.setenv(name, "")
    _check_variables()


@pytest.mark.parametrize("text", ["2GiB", "2147483648", " 2 gib "])
def test_sizes_are_written_alike_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    assert load_settings({"engine.kv_cache_bytes": text}).engine.kv_cache_bytes == 2 * 2**30
    monkeypatch.setenv("TRIPTYCH_MAX_BODY_BYTES", text)
    (tmp_path / "triptych.toml").write_text(f"[engine]\nswap_bytes = '{text}'\n")
    settings = load_settings({})
    assert settings.max_body_bytes == settings.engine.swap_bytes == 2 * 2**30


@pytest.mark.parametrize(
    ("content", "why"), [(b"port = = 3", r"Invalid value \(at"), (b"model = '\xff'", "'utf-8' codec can't decode")]
)
def test_an_unreadable_file_is_said_to_be_one(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "triptych.toml").write_bytes(content)
    with pytest.raises(TriptychError, match=rf"cannot read the configuration /.*/triptych\.toml: {why}"):
        load_settings({})


def test_a_named_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CONFIG", str(tmp_path / "nope"))
    with pytest.raises(TriptychError, match=r"^TRIPTYCH_CONFIG names '.*/nope', which is not a file$"):
        load_settings({})
    (tmp_path / "nope").write_text("port = 1111")
    assert load_settings({}).port == 1111


def test_a_child_gets_exactly_the_parents_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = {
        "engine.max_num_seqs": 7,
        "served_model_name": ("x", "y"),
        "handoff_timeout_s": 1.5,
        "max_media_bytes": 4096,
    }
    settings = load_settings(flags)
    monkeypatch.setenv("TRIPTYCH_ENGINE__BLOCK_SIZE", "128")
    monkeypatch.setenv("TRIPTYCH_PORT", "4444")
    environment = child_environment(settings, threads=3)
    (tmp_path / "triptych.toml").write_text("port = 1111")
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert child_environment(settings, threads=3)["PYTHONWARNINGS"] == "error,ignore:resource_tracker"


def test_sizes_are_plain_integers_whatever_they_were_written_as(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec encodes no subclass of int: a receiver that told its largest tensor so would never be reached."""
    monkeypatch.setenv("TRIPTYCH_ENGINE__KV_CACHE_BYTES", "2GiB")
    settings = load_settings({"max_body_bytes": "1MiB"})
    sizes = settings.engine.kv_cache_bytes, settings.max_body_bytes, settings.max_media_bytes
    assert [(type(size), size) for size in sizes] == [(int, 2**31), (int, 2**20), (int, 2**25)]
