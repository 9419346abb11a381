"""`make gpu-carry`: gathers what a bare machine without an index needs for `make gpu-check`, in one small folder.

    wheels/          what pyproject.toml asks for and the machine has not, resolved by pip for its Python
    kernels.tar.xz   FlashInfer's kernels, as far as they were built ahead (python -m tools.gpu_check.kernels)

With --models, real checkpoints are cut into parts in a folder beside it, FOLDER-models: each of its numbered folders is
for a journey of its own (tools.gpu_check.parts).

pip resolves against what stands there: each package of there.txt takes part as an empty wheel of that version.
Needs pip and the standard library alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tools.gpu_check import parts
from tools.gpu_check.layout import ROOT, THERE, WORKSPACE, Carried, There, requirements

PYTHON_VERSION: Final = "3.12"
PLATFORMS: Final = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64")
PINNED: Final = ("flashinfer-python==0.6.13",)
"""Later releases are four times as large."""
LIMIT_MIB: Final = 64
MIB: Final = 2**20
_NO_KERNELS: Final = """
No kernels of FlashInfer are carried, for none were found under {workspace}: the machine will compile them when they are
first used, for minutes. To build them here, with nvcc and without a GPU, and to carry them (docs/how-to/cuda.md):

    FLASHINFER_WORKSPACE_BASE=build/flashinfer FLASHINFER_CUDA_ARCH_LIST=9.0a python -m tools.gpu_check.kernels --check
    make gpu-carry
"""
_LOCAL: Final = "there"
_NAME_WIDTH: Final = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the folder and print what is in it; returns the exit status, 1 if it is larger than the limit."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.carry", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to put it")
    parser.add_argument("--workspace", type=Path, default=WORKSPACE, help="where FlashInfer has built its kernels")
    parser.add_argument("--there", type=Path, default=THERE, help="list of what the machine has")
    parser.add_argument("--models", type=Path, nargs="+", default=(), help="folders of checkpoints to carry in parts")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="of the folder and the repository's files")
    options = parser.parse_args(arguments)
    carried = Carried(options.folder)
    fetch_wheels(carried.wheels, There.read(options.there))
    collect_kernels(options.workspace, carried.kernels)
    sizes = {name: _tree_bytes([path]) for name, path in _parts(carried)}
    sizes["the repository"] = _tree_bytes(_repository_files())
    print(table(sizes, options.limit_mib))
    if not carried.kernels.exists():
        print(_NO_KERNELS.format(workspace=options.workspace))
    if options.models:
        for journey in parts.cut(options.models, options.folder.with_name(f"{options.folder.name}-models")):
            print(f"{journey!s:{_NAME_WIDTH}} {_tree_bytes([journey]) / MIB:6.1f} MiB, to be carried by itself")
    return int(sum(sizes.values()) > options.limit_mib * MIB)


def fetch_wheels(target: Path, there: There) -> None:
    """Download the wheels that are missing there; what was in `target` before is gone.

    Raises CalledProcessError where pip finds no set that fits; its own words are on stderr.
    """
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        stand_ins = Path(temporary)
        pins = [f"{name}=={_stand_in(name, version, stand_ins)}" for name, version in there.versions.items()]
        constraints = stand_ins / "constraints.txt"
        constraints.write_text("\n".join([*PINNED, *pins]))
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "-qq", "--dest", str(target), "--only-binary", ":all:"]
        command += ["--python-version", PYTHON_VERSION, "--implementation", "cp", *platforms]
        command += ["--find-links", str(stand_ins), "--constraint", str(constraints)]
        subprocess.run([*command, *requirements()], check=True)
    for stand_in in target.glob(f"*+{_LOCAL}-*.whl"):
        stand_in.unlink()


def collect_kernels(workspace: Path, target: Path) -> None:
    """Pack the libraries of a workspace of FlashInfer; what was in `target` before is gone.

    Only they: elsewhere everything would be compiled again, because ninja sees other paths. FlashInfer takes libraries
    without asking ninja from where its releases with built kernels have them; the check puts them there.
    """
    target.unlink(missing_ok=True)
    if libraries := sorted(workspace.glob("**/cached_ops/*/*.so")):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for library in libraries:
                archive.add(library, f"{library.stem}/{library.name}")


def table(sizes: dict[str, int], limit_mib: float) -> str:
    """A row for each part and their sum against the limit, in MiB."""
    total = sum(sizes.values())
    verdict = "fits" if total <= limit_mib * MIB else "TOO LARGE"
    rows = [f"{name:{_NAME_WIDTH}} {size / MIB:6.1f} MiB" for name, size in sizes.items()]
    return "\n".join([*rows, f"{'together':{_NAME_WIDTH}} {total / MIB:6.1f} MiB of {limit_mib:g}: {verdict}"])


def _stand_in(name: str, version: str, folder: Path) -> str:
    """Write a wheel that has nothing but a name and a version; returns that version, which no index has."""
    local = f"{version}+{_LOCAL}"
    stem = f"{name.replace('-', '_')}-{local}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        info = f"{stem}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {local}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return local


def _parts(carried: Carried) -> Iterable[tuple[str, Path]]:
    """The rows of the table: wheels by name and version, then kernels."""
    for path in sorted(carried.wheels.glob("*.whl"), key=lambda path: -path.stat().st_size):
        yield " ".join(path.name.split("-")[:2]), path
    if not carried.kernels.exists():
        yield "kernels of FlashInfer: none", carried.kernels
        return
    with tarfile.open(carried.kernels) as archive:
        yield f"kernels of FlashInfer: {len(archive.getnames())}", carried.kernels


def _repository_files() -> list[Path]:
    """What git would take along: tracked files, and others that it does not ignore; nothing outside a repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def _tree_bytes(paths: Iterable[Path]) -> int:
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
