"""`python -m tools.house.trace`: how many named functions and files one chat request with an image runs on `1e1pd`.

Every process records the repository's functions that run while a flag file names a phase: `idle`, whose functions are
left out of the count, and `request`, one streamed request. Comprehensions, lambdas and attention itself do not count.
With --limits the exit status is 1 where a figure is over its limit.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer
from PIL import Image

from common.config import Settings
from launch.cli.client import ClientRequest, Media
from launch.cluster.local_cluster import LocalCluster
from tools.house.measure import show

ROOT: Final = Path(__file__).resolve().parents[2]
RECORDER: Final = Path(__file__).with_name("recorder.py")
BY_PROCESSOR: Final = "engine/attention/native_", "engine/attention/torch_", "engine/attention/visible", "engine/native"
"""Attention by our kernels, and by PyTorch where a processor has no AVX2."""
Functions = set[tuple[str, str]]
"""Pairs of a file and a qualified name."""


def main(
    limits: Annotated[bool, typer.Option("--limits", help="Exit with 1 where a figure is over its limit.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="Print every function, too.")] = False,
) -> None:
    """Start a cluster with the bundled model, ask it once, and print the figures of each process and of all."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with _traced(folder) as cluster:
            _ask(cluster.base_url, shade=10)
            time.sleep(2)
            idle = _record(folder, "idle", lambda: time.sleep(4))
            request = _record(folder, "request", lambda: _ask(cluster.base_url, shade=90))
    total: Functions = set()
    for process, functions in sorted(request.items()):
        own = {pair for pair in functions - idle.get(process, set()) if not pair[0].startswith(BY_PROCESSOR)}
        total |= own
        if own:
            print(f"{len(own):5d} functions in {_num_files(own):3d} files   {process.partition(' ')[2][-70:]}")
    if list_all:
        print("\n".join(f"  {file}\t{name}" for file, name in sorted(total)))
    is_well = show({"files of a request": _num_files(total), "functions of a request": len(total)})
    sys.exit(int(limits and not is_well))


def _traced(folder: Path) -> LocalCluster:
    """Return a cluster whose processes record into `folder`."""
    (folder / "sitecustomize.py").write_text(RECORDER.read_text())
    os.environ |= {"TRACE_DIR": str(folder), "TRACE_ROOT": f"{ROOT}/", "PYTHONPATH": str(folder)}
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1"}
    return LocalCluster(Settings(model="signpost", port=0), "1e1pd")


def _ask(url: str, shade: int) -> None:
    """One streamed chat request about an image of its own."""
    png = io.BytesIO()
    Image.new("RGB", (112, 112), (200, 40, shade)).save(png, "PNG")
    question = ClientRequest("", "What does the sign say?", (Media("sign.png", "image/png", png.getvalue()),))
    body = {"model": "signpost", "stream": True, "max_tokens": 8, "messages": [question.message]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status()


def _record(folder: Path, phase: str, action: Callable[[], None]) -> dict[str, Functions]:
    """Functions by process, `pid command`, that ran while `action` did."""
    flag = folder / "flag"
    flag.write_text(phase)
    time.sleep(0.5)
    action()
    time.sleep(2)
    flag.unlink()
    time.sleep(1.5)
    recorded = {}
    for path in folder.glob(f"{phase}.*.txt"):
        command, *rows = path.read_text().splitlines()
        pairs = (row.split("\t") for row in rows)
        named = {(file, name) for file, name in pairs if not name.split(".")[-1].startswith("<")}
        recorded[f"{path.name.split('.')[1]} {' '.join(command.split())}"] = named
    return recorded


def _num_files(functions: Functions) -> int:
    return len({file for file, _ in functions})


if __name__ == "__main__":
    typer.run(main)
