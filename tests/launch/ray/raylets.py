"""A Ray cluster of a head and two raylets, each in a network namespace with an address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

START_S = 120.0
NODES = ("left", "right")
BRIDGE = "10.123.7"
"""The network between the namespaces; the head has .1."""
HEAD = f"{BRIDGE}.1"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
}


def missing() -> str:
    """Return why no such cluster can be had here; an empty text if one can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"triptych-probe-{os.getpid()}"], capture_output=True, check=False)
    if probe.returncode:
        return f"network namespaces are not allowed here: {probe.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", f"triptych-probe-{os.getpid()}"], check=False)
    return ""


@dataclass
class Raylets:
    """The running processes of `ray start`, by node."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HEAD}:6399"

    def start(self, node: str, *options: str) -> None:
        """Run `ray start` in the node's namespace, and wait until it says that it runs.

        One after the other: nodes share a folder of sockets, whose names they take as they find them.
        """
        inside = [] if node == "head" else ["ip", "netns", "exec", f"triptych-{node}"]
        command = [*inside, str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        number = 1 if node == "head" else NODES.index(node) + 2
        command += [f"--node-ip-address={BRIDGE}.{number}", "--object-store-memory=120000000", *options]
        with (self.folder / f"{node}.log").open("wb") as log:
            environment = {**os.environ, **ENVIRONMENT}
            self.processes[node] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

        deadline_s = time.monotonic() + START_S
        while b"Ray runtime started" not in (said := (self.folder / f"{node}.log").read_bytes()):
            assert self.processes[node].poll() is None, said.decode(errors="replace")
            assert time.monotonic() < deadline_s, f"{node} has not started within {START_S:g} s"
            time.sleep(0.1)

    def kill(self, node: str) -> None:
        """SIGKILL everything that Ray runs in the node's namespace, as the loss of a machine would."""
        found = subprocess.run(
            ["ip", "netns", "pids", f"triptych-{node}"], capture_output=True, text=True, check=True
        ).stdout
        for pid in map(int, found.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def raylets(folder: Path) -> Iterator[Raylets]:
    """Make the network, start head and raylets, and take everything down again."""
    running = Raylets(folder)
    try:
        _network()
        head = ("--head", "--port=6399", "--num-cpus=4", "--include-dashboard=false", '--resources={"head":1}')
        running.start("head", *head)
        for node in NODES:
            running.start(node, f"--address={running.address}", "--num-cpus=4")
        yield running
    finally:
        for node in NODES:
            if _has(node):
                running.kill(node)
        running.end()
        _remove_network()


def wait_for_nodes(count: int) -> None:
    """Return once Ray counts so many living nodes; `ray.init` comes before."""
    import ray

    deadline_s = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < count:
        assert time.monotonic() < deadline_s, f"not {count} nodes within {START_S:g} s: {ray.nodes()}"
        time.sleep(0.1)


def _network() -> None:
    """A bridge with the head's address, and a cable from each namespace to it."""
    _remove_network()
    _ip("link", "add", "triptych0", "type", "bridge")
    _ip("addr", "add", f"{HEAD}/24", "dev", "triptych0")
    _ip("link", "set", "triptych0", "up")
    for number, node in enumerate(NODES):
        name, cable = f"triptych-{node}", f"ttc{number}"
        _ip("netns", "add", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", cable, "master", "triptych0", "up")
        for words in (["addr", "add", f"{BRIDGE}.{number + 2}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "lo", "up")


def _remove_network() -> None:
    """Take bridge, cables and namespaces down, as far as they exist.

    The kernel takes a namespace down some time after `netns del`, once its last process is gone, and its
    end of the cable with it. So each cable is deleted by name first: the next `link add` finds its name free.
    """
    _ip("link", "del", "triptych0", check=False)
    for number, node in enumerate(NODES):
        _ip("link", "del", f"ttc{number}", check=False)
        _ip("netns", "del", f"triptych-{node}", check=False)


def _has(node: str) -> bool:
    return Path(f"/run/netns/triptych-{node}").exists()


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
