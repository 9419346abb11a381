"""The plan of a local cluster, decided and checked before any process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic import SecretStr

from common.config import Settings
from common.keys import ClusterKey, own_api_key
from common.messages import Role
from common.model_info import ModelInfo, load_model_info
from common.process import start_phase
from common.process.ports import reserve_port
from common.text.processor import TextProcessor
from engine.models.checkpoint_index import read_index
from engine.models.lora.config import ADAPTER_STEM, read_lora_config
from engine.models.quantised.names import check_quantised
from engine.processors import make_processor
from launch.cluster.children import Command
from launch.cluster.configure import child_environment
from launch.cluster.instance import Instance
from launch.cluster.shares import available_cores, runs_on_gpu, split_memory, split_threads
from launch.cluster.topology import Topology, choose_topology, usual_topology
from services.process.addresses import resolve_host
from services.process.drain import VARIABLE, DrainMarker

PROXY_ID = "proxy"
MemoryShares: TypeAlias = Mapping[Role, Mapping[str, float | int]]
"""The engine settings of each worker's role that share the memory out."""


@dataclass(frozen=True)
class Plan:
    """Settings with the model's folder and the port's number, and the instances to run."""

    settings: Settings
    info: ModelInfo
    topology: Topology
    reason: str = ""
    """Why this topology, for a person, where it was chosen for them."""

    @property
    def base_url(self) -> str:
        """Future base URL of the OpenAI API, without `/v1`."""
        host = "127.0.0.1" if self.settings.host == "0.0.0.0" else self.settings.host
        return f"http://{host}:{self.settings.port}"

    def instances(self, broker_url: str, logs: Path) -> list[Instance]:
        """Return all instances with their command lines; logs go to `<logs>/<instance id>.log`."""
        memory = self.memory()
        instances: list[tuple[str, Role]] = [*self.topology.workers(), (PROXY_ID, "proxy")]
        return [self.instance(name, role, broker_url, logs, memory) for name, role in instances]

    def memory(self) -> MemoryShares:
        """Return the engine settings of each role that share the memory out. Raises TriptychError as `split_memory`."""
        settings, engine = self.settings, self.settings.engine
        if runs_on_gpu(engine):  # the transports take memory of it, too
            from services.process.gpu_reserve import engine_on_gpu

            engine = engine_on_gpu(settings, resolve_host(settings.host))
        return split_memory(engine, self.topology, self.info, encoder_fallback=settings.encoder_fallback)

    def threads(self) -> dict[Role, int]:
        """Return the CPU threads of an instance of each role."""
        given = self.settings.engine.num_threads
        shared = split_threads(self.topology, available_cores())
        return {**{role: given or count for role, count in shared.items()}, "proxy": 1}

    def instance(
        self, instance_id: str, role: Role, broker_url: str, logs: Path, memory: MemoryShares, port: int = 0
    ) -> Instance:
        """Return an instance with its role's share of memory and threads, as if the whole topology ran on this host."""
        worker, threads = role != "proxy", self.threads()[role]
        engine = self.settings.engine
        if worker:
            engine = engine.model_copy(update={"num_threads": threads, **memory[role]})
        settings = self.settings.model_copy(
            update={
                "broker": broker_url,
                "instance_id": instance_id,
                "engine": engine,
                "port": port if worker else self.settings.port,
                "topology": str(self.topology),
            }
        )
        # -P: a folder `common` or `engine` in the user's working directory must not take the place of ours.
        argv = [sys.executable, "-P", "-m", "triptych", *(["worker", "--role", role] if worker else ["proxy"])]
        argv += ["--model", settings.model, "--instance-id", instance_id]
        argv += ["--host", settings.host, "--port", str(settings.port), "--follow-parent"]
        note = logs / f"{instance_id}.departure"
        phase_file = logs / f"{instance_id}.phase"
        environment = child_environment(settings, threads) | {
            VARIABLE: str(note),
            start_phase.VARIABLE: str(phase_file),
        }
        root = Path(__file__).resolve().parents[2]
        if root.name not in ("site-packages", "dist-packages"):  # a checkout, installed or not, goes first
            paths = filter(None, (str(root), environment.get("PYTHONPATH")))
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = Command(argv, environment, logs / f"{instance_id}.log")
        http_address = "" if worker else self.base_url
        marker = DrainMarker(note)
        return Instance(instance_id, role, command, http_address=http_address, note=marker, phase_file=phase_file)


def make_plan(settings: Settings, topology: str | Topology | None = None) -> Plan:
    """Decide model, topology, port, and the key that makes the processes a cluster.

    Raises TriptychError: no such model, a tokenizer or weights that are missing, damaged or cut, a chat template or
    sampling defaults that cannot be used, a preprocessor or a topology that does not fit the model, a host without
    an IPv4 address, a port that is taken, or a key that is none.
    """
    info = load_model_info(settings.model, settings.lora_modules)
    TextProcessor(info, settings.chat_template)  # damaged files are refused here, before a process starts
    info.sampling_defaults(settings.generation_config)
    if info.media_kind is not None:
        make_processor(info)
    for name, folder in info.adapters.items():
        read_lora_config(name, folder)
        read_index(folder, ADAPTER_STEM)
    if settings.engine.load_format != "dummy":
        check_quantised(info, read_index(info.folder), as_int8=settings.engine.quantization == "int8")
    reason, asked = "", topology or settings.topology
    if asked is None:
        asked, reason = usual_topology(info, None if runs_on_gpu(settings.engine) else available_cores())
    chosen = asked if isinstance(asked, Topology) else choose_topology(asked, info, settings.encoder_fallback)
    update: dict[str, object] = {"port": reserve_port(resolve_host(settings.host), settings.port)}
    if settings.served_model_name is None:
        update["served_model_name"] = (info.name,)
    update["model"] = str(info.folder)  # so that no process asks the hub again
    if ClusterKey.of(settings) is None:
        update["cluster_key"] = SecretStr(ClusterKey.generate().reveal())
    own_api_key(settings)  # a file that cannot be read is told now
    return Plan(settings.model_copy(update=update), info, chosen, reason)
