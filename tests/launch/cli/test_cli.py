"""The command line: quick to import, one line for an error, an example in every help."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from typer.main import get_command

from common.errors import TriptychError
from common.families import FAMILIES
from common.model_info import BUNDLED, load_model_info
from launch.cli.app import app, main
from launch.cluster.configure import load_settings
from launch.cluster.plan import make_plan


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cluster this machine runs, nobody has told these tests of it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TRIPTYCH_BROKER", raising=False)


def run(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of `triptych ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["triptych", *arguments.split()])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, *capsys.readouterr()


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "fastapi", "httpx", "redis", "zmq", "pydantic", "numpy", "asyncio")
    code = f"import launch.cli.app, sys; print([name for name in {heavy!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["", *get_command(app).commands])  # type: ignore[attr-defined]
def test_help_teaches_by_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = run(f"{command} --help", monkeypatch, capsys)
    assert code == 0
    assert f"  triptych {command}" in output
    assert "Example" in output or "Start here" in output


@pytest.mark.parametrize("command", ["status", "drain", "switch", "logs"])
def test_the_port_of_a_running_cluster_is_said_to_tell_clusters_apart(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, output, _ = run(f"{command} --help", monkeypatch, capsys)
    [line] = [line for line in output.splitlines() if line.startswith("│") and "--port " in line]
    assert "tells clusters of one name on this machine apart" in line
    assert "default" not in line


def test_a_shell_completes_commands() -> None:
    environment = {"_TRIPTYCH_COMPLETE": "complete_bash", "COMP_WORDS": "triptych do", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['triptych']; from launch.cli.app import main; main()"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["doctor"], done.stderr


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run("--version", monkeypatch, capsys)
    assert (code, output.split()[0]) == (0, "triptych")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("serve --on ray --start-timeout 60", "--start-timeout does not count with --on ray: leave it out"),
        ("serve signpost --topology 0pd", "nothing would decode"),
        ("serve signpost --topology 1e1p", "add 1d"),
        ("serve signpost --device gpu", "'auto', 'cpu' or 'cuda'"),
        ("serve signpost --port 70000", "port = 70000: input should be less than or equal to 65535"),
        ("serve signpost --kv-cache-bytes lots", "512MiB"),
        ("serve signpost --max-num-seqs 0", "engine.max_num_seqs = 0"),
        ("serve no-such-model", "neither a folder"),
        ("serve signpots", "did you mean 'signpost'?"),
        ("serve ./no-such-folder", "cannot find the model './no-such-folder': the folder does not exist"),
        ("serve /no/such/folder", "cannot find the model '/no/such/folder': the folder does not exist"),
        ("serve signpost --port 0 --broker nonsense://x", "broker"),
        ("serve signpost --prot 1", "--prot"),
        ("serve signpost --start-timeout -1", "--start-timeout"),
        ("worker --role encoder", "give --broker"),
        ("worker --role cook", "--role"),
        ("status", "no cluster 'triptych' of yours runs on this machine: give --broker"),
        ("drain e0 --cluster staging", "no cluster 'staging' of yours"),
        ("drain", "ID"),
        ("switch e0", "--role"),
        ("switch e0 --role cook", "--role"),
        ("proxy", "give --broker"),
        ("request", "nothing to ask"),
        ("request no-such-file.png --prompt x", "no-such-file.png"),
        ("request --prompt x --together", "--together"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_bad_value_takes_one_line_and_exit_code_2(
    arguments: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run(arguments, monkeypatch, capsys)
    assert code == 2
    assert reason in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_ctrl_c_before_a_command_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("common.config.describe_settings", interrupted)  # for the options, after a slow import
    assert run("status", monkeypatch, capsys) == (130, "", "")


def test_a_model_that_is_not_supported_is_refused_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LLamaForCausalLM"]}')
    code, output, errors = run(f"serve {tmp_path}", monkeypatch, capsys)
    assert (code, output) == (2, "")
    assert errors.startswith("error: architecture LLamaForCausalLM is not supported; of its kind LlamaForCausalLM is;")
    assert all(name in errors for family in FAMILIES for name in family.architectures)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot read {folder}/config.json: "),
        ("[1]", "{folder}/config.json holds a list, not a JSON object"),
        (
            '{"architectures": ["Qwen2MoeForCausalLM"]}',
            "of its kind Qwen2AudioForConditionalGeneration, Qwen2ForCausalLM, Qwen2",
        ),
        ('{"architectures": ["OPTForCausalLM"]}', "architecture OPTForCausalLM is not supported; supported: "),
        (
            '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gguf"}}',
            "quantization_config method gguf is not supported; supported: awq, gptq, fp8, compressed-tensors",
        ),
        (
            '{"architectures": "LlamaForCausalLM"}',
            "config.json: architectures is 'LlamaForCausalLM', not a list",
        ),
        ('{"text_config": 3}', "{folder}/config.json: text_config is 3, not an object"),
        (
            '{"text_config": {"hidden_size": "abc"}}',
            "{folder}/config.json: hidden_size is 'abc', not a positive whole",
        ),
        ('{"num_attention_heads": 0}', "{folder}/config.json: num_attention_heads is 0, not a positive whole number"),
        ('{"architectures": ["LlamaForCausalLM"]}', "{folder} has no tokenizer.json: "),
    ],
)
def test_a_model_folder_that_cannot_be_served_is_a_sentence(
    config: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    code, output, errors = run(f"serve {tmp_path}", monkeypatch, capsys)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert said.format(folder=tmp_path) in errors


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_of_another_user_is_a_sentence(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(BUNDLED / "numerals", tmp_path / "model")
    opened = Path.open if file == "model.safetensors" else Path.stat  # as root no file is refused

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == folder / file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, opened.__name__, refuse)
    code, _, errors = run(f"serve {folder}", monkeypatch, capsys)
    assert (code, errors) == (2, f"error: [Errno 13] Permission denied: '{folder}/{file}'\n")


def test_a_damaged_tokenizer_is_a_sentence_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    code, output, errors = run(f"serve {tmp_path}", monkeypatch, capsys)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert f"cannot read {tmp_path}/tokenizer.json: " in errors


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("chat_template.jinja", "{% for x in messages %}", "cannot read the chat template of {folder}: line 1: "),
        (
            "preprocessor_config.json",
            '{"do_resize": false}',
            "the preprocessor of {folder} cannot be used: a preprocessor with do_resize = false is not supported",
        ),
        ("generation_config.json", '{"top_p": 2}', "cannot use {folder}/generation_config.json: top_p must be above 0"),
    ],
)
def test_a_template_preprocessor_or_sampling_that_cannot_be_used_is_a_sentence(
    file: str,
    content: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(BUNDLED / "signpost", tmp_path / "model"))
    (folder / file).write_text(content)
    code, output, errors = run(f"serve {folder}", monkeypatch, capsys)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert said.format(folder=folder) in errors


def test_a_given_template_that_is_no_file_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = run("serve signpost --chat-template mine.jinja", monkeypatch, capsys)
    assert (code, output, errors) == (
        2,
        "",
        "error: cannot read the chat template mine.jinja: No such file or directory\n",
    )


def test_what_a_configuration_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}')
    info = load_model_info(str(tmp_path))
    for look in (lambda: info.placeholder_token_id, lambda: info.config["vision_config"]["image_size"]):
        with pytest.raises(TriptychError, match=r"the configuration of the model has no 'image_(token_index|size)'"):
            look()


def test_a_port_in_use_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output, errors = run(f"serve signpost --port {port}", monkeypatch, capsys)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in errors
    assert output == ""


@pytest.mark.parametrize("host", ["::1", "nowhere.invalid"])
def test_a_host_that_workers_cannot_listen_on_is_an_error_before_anything_starts(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = run(f"serve signpost --port 0 --host {host}", monkeypatch, capsys)
    assert (code, output) == (2, "")
    assert f"cannot listen on host '{host}'" in errors
    assert "give an IPv4 address" in errors


def test_a_port_is_looked_for_at_the_address_that_processes_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most systems name ::1 first for localhost: what is free there may be taken at 127.0.0.1."""
    look_up, both = socket.getaddrinfo, [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]

    def resolve(host: str, port: int | None, family: int = 0, **options: int) -> list[Any]:
        if host != "localhost":
            return cast("list[Any]", look_up(host, port, family, **options))
        found = [(one, address) for one, address in both if family in (0, one)]
        return [(one, socket.SOCK_STREAM, 0, "", (place[0], port or 0, *place[2:])) for one, place in found]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        settings = load_settings({"model": "signpost", "host": "localhost", "port": taken.getsockname()[1]})
        with pytest.raises(TriptychError, match=r"cannot listen on 127\.0\.0\.1:"):
            make_plan(settings)


def test_a_broker_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run("serve signpost --port 0 --broker redis://127.0.0.1:1", monkeypatch, capsys)
    assert code == 1
    assert "the broker did not answer" in errors
