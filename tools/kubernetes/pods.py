"""Run the pods of a rendered chart with `podman kube play`, ask them, and replace them one by one under load.

Usage: python -m tools.kubernetes.pods MANIFESTS FOLDER     (in a network namespace of its own, with podman on the PATH)
Podman runs the pods: images, commands, users, read-only roots, security contexts, resources. Played here, as there are
neither kubelet nor controllers: names and addresses in fields, Secrets, empty volumes, Services, probes, preStop, and a
Deployment's rolling update with maxSurge 1 and maxUnavailable 0.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import httpx

from tools.compose.asking import IN_FLIGHT, draw_ask
from tools.soak.asking import send
from tools.soak.tally import Judge

yaml: Final[Any] = import_module("yaml")
NETWORK: Final = "triptych-helm-test"
SUBNET: Final = "10.99.0.0/24"
START_S: Final = 240.0
QUESTIONS: Final = 12
TOKENS: Final = 60
Manifest = dict[str, Any]


async def run(*command: str, limit_s: float = START_S) -> str:
    """Run a command and return its output. Raises RuntimeError with its last words if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(limit_s):
        output = (await process.communicate())[0].decode()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {output[-2000:]}")
    return output


@dataclass(eq=False)
class Pod:
    """One pod: where it is, and what its probes said."""

    name: str
    ip: str
    component: str
    container: Manifest
    grace_s: int
    started_s: float = field(default_factory=time.monotonic)
    ready: bool = False
    ends: bool = False
    looks: int = 0

    async def probe(self, http: httpx.AsyncClient, kind: str) -> bool:
        """Ask once as the kubelet does; a probe that is no HTTP request opens a connection."""
        probe = self.container[kind]
        ports = {one["name"]: one["containerPort"] for one in self.container["ports"]}
        try:
            if "httpGet" in probe:
                port = ports[probe["httpGet"]["port"]]
                url = f"http://{self.ip}:{port}{probe['httpGet']['path']}"
                return (await http.get(url, timeout=probe.get("timeoutSeconds", 1))).is_success
            _, writer = await asyncio.open_connection(self.ip, ports[probe["tcpSocket"]["port"]])
            writer.close()
        except (httpx.HTTPError, OSError):
            return False
        return True


class Cluster:
    """The pods that run, and what of the rendered chart they need."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self._folder = folder
        self._addresses = (f"10.99.0.{number}" for number in itertools.count(10))
        self.deployments = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Deployment"}
        self.secrets = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "Secret"}
        self._services = [one for one in manifests if one["kind"] == "Service"]
        self.pods: list[Pod] = []
        self.http = httpx.AsyncClient(trust_env=False)

    async def start(self, deployment: str) -> Pod:
        """Start one more pod of a Deployment; return it when ready. Raises TimeoutError with its log on the way."""
        template = copy.deepcopy(self.deployments[deployment]["spec"]["template"])
        number = sum(pod.name.startswith(deployment) for pod in self.pods)
        name, address = f"{deployment}-{number}", next(self._addresses)
        spec = template["spec"]
        (container,) = spec["containers"]
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        pod = Pod(name, address, component, copy.deepcopy(container), spec.get("terminationGracePeriodSeconds", 30))
        self._play_kubelet(spec, name, address)
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}, "spec": spec}
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(manifest))
        await run("podman", "kube", "play", "--quiet", "--network", NETWORK, "--ip", address, str(path))
        self.pods.append(pod)
        end_s = time.monotonic() + START_S
        for kind in ("startupProbe", "readinessProbe"):
            while not await pod.probe(self.http, kind):
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{name} is not ready: {await self.log(pod)}")
                await asyncio.sleep(0.2)
        pod.ready = True
        print(f"{name} is ready after {time.monotonic() - pod.started_s:.0f} s", flush=True)
        return pod

    def _play_kubelet(self, spec: Manifest, name: str, address: str) -> None:
        (container,) = spec["containers"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
            container.pop(kind, None)  # podman would take each port of the host, too
        values = {"metadata.name": name, "status.podIP": address}
        for variable in container["env"]:
            source = variable.pop("valueFrom", {})
            if "fieldRef" in source:
                variable["value"] = values[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = self.secrets[source["secretKeyRef"]["name"]]
                variable["value"] = base64.b64decode(secret[source["secretKeyRef"]["key"]]).decode()
        for volume in spec["volumes"]:
            folder = self._folder / name / volume["name"]
            folder.mkdir(parents=True)
            folder.chmod(0o777)
            if "secret" in volume:
                for key, value in self.secrets[volume["secret"]["secretName"]].items():
                    (folder / key).write_bytes(base64.b64decode(value))
            kept = volume["name"]
            volume.clear()
            volume |= {"name": kept, "hostPath": {"path": str(folder), "type": "Directory"}}
        spec["hostAliases"] = [
            {"ip": pod.ip, "hostnames": [one["metadata"]["name"]]}
            for one in self._services
            for pod in self.pods
            if one["spec"]["selector"].get("app.kubernetes.io/component") == pod.component and not pod.ends
        ][:1]

    async def log(self, pod: Pod) -> str:
        return (await run("podman", "logs", "--tail", "30", f"{pod.name}-{pod.container['name']}"))[-3000:]

    async def end(self, pod: Pod) -> None:
        """End a pod as Kubernetes does: off its Services, preStop, SIGTERM, SIGKILL after the grace period."""
        pod.ends, began_s = True, time.monotonic()
        name = f"{pod.name}-{pod.container['name']}"
        if "lifecycle" in pod.container:
            command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
            await run("podman", "exec", name, *command, limit_s=pod.grace_s)
        drained_s = time.monotonic() - began_s
        await run("podman", "pod", "stop", "--time", str(max(1, pod.grace_s - int(drained_s))), pod.name)
        status = (await run("podman", "inspect", "--format", "{{.State.ExitCode}}", name)).strip()
        await run("podman", "pod", "rm", "--force", pod.name)
        if drained_s >= pod.grace_s or status != "0":
            raise RuntimeError(f"{pod.name} ended with {status} after {drained_s:.0f} s")
        print(f"{pod.name} has left: preStop {drained_s:.1f} s, exit code {status}", flush=True)

    async def roll(self, deployment: str) -> None:
        """Replace every pod of a Deployment: a new one is ready before an old one is asked to leave."""
        for old in [pod for pod in self.pods if pod.name.rpartition("-")[0] == deployment and not pod.ends]:
            await self.start(deployment)
            await self.end(old)

    async def watch(self) -> None:
        """Probe for ever: readiness of all pods; liveness, which must not fail. Raises RuntimeError where it does."""
        while True:
            for pod in [one for one in self.pods if (one.ready or one.looks) and not one.ends]:
                ready, alive = await pod.probe(self.http, "readinessProbe"), await pod.probe(self.http, "livenessProbe")
                if not pod.ends and not alive:
                    raise RuntimeError(f"{pod.name} fails its livenessProbe: {await self.log(pod)}")
                pod.ready, pod.looks = ready or pod.ends, pod.looks + 1
            await asyncio.sleep(1)

    def behind_service(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == "proxy" and pod.ready and not pod.ends]


async def balance(cluster: Cluster) -> asyncio.Server:
    """Serve as the Service: pass each connection on to the next proxy that is ready, at 127.0.0.1."""
    turn = itertools.count()

    async def copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = cluster.behind_service()
        pod = ready[next(turn) % len(ready)]
        there, back = await asyncio.open_connection(pod.ip, 8000)
        await asyncio.gather(copy_bytes(reader, back), copy_bytes(there, writer))

    return await asyncio.start_server(connect, "127.0.0.1", 0)


async def main(manifests: list[Manifest], folder: Path) -> None:
    cluster = Cluster(manifests, folder)
    await run("podman", "network", "create", "--subnet", SUBNET, NETWORK)
    try:
        await check(cluster)
    except BaseException:
        for pod in cluster.pods:
            if not pod.ends:
                print(f"── {pod.name}\n{await cluster.log(pod)}", file=sys.stderr)
        raise


async def check(cluster: Cluster) -> None:
    """Start, ask, replace under load; print the figures last."""
    broker = next(name for name in cluster.deployments if name.endswith("-broker"))
    await cluster.start(broker)
    others = [name for name in cluster.deployments if name != broker]
    # The broker is there; the pods of all other Deployments start in any order, two at once on a small machine.
    for name in sorted(others, key=lambda one: one.endswith("-proxy")):
        for _ in range(cluster.deployments[name]["spec"]["replicas"]):
            await cluster.start(name)
    server, judge = await balance(cluster), Judge()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    key = next(iter(base64.b64decode(one).decode().strip() for one in _api_keys(cluster)))
    over = asyncio.Event()

    async def ask(http: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        while not (over.is_set() and judge.tally.compared):
            question = draw_ask(next(numbers) % QUESTIONS, TOKENS)
            judge.note(question, await send(http, question))

    limits = httpx.Limits(max_keepalive_connections=IN_FLIGHT)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as http:
        if (await http.get("/v1/models")).status_code != 401:
            raise RuntimeError("the API answers without a key")
        http.headers["Authorization"] = f"Bearer {key}"
        for number in range(QUESTIONS):
            question = draw_ask(number, TOKENS)
            judge.note(question, await send(http, question))
        print(f"{QUESTIONS} questions answered before: {judge.tally}", flush=True)
        numbers = itertools.count()
        watching = asyncio.create_task(cluster.watch())
        asking = [asyncio.create_task(ask(http, numbers)) for _ in range(IN_FLIGHT)]
        rolling = asyncio.create_task(_roll_all(cluster, others))
        await asyncio.wait({watching, rolling, *asking}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, *asking):
            if task.done():
                task.result()
        over.set()
        await asyncio.gather(rolling, *asking)
        watching.cancel()
    server.close()
    looks = sum(pod.looks for pod in cluster.pods)
    if judge.tally.wrong or set(judge.tally.endings) != {"whole"}:
        raise RuntimeError(f"not all answers are whole and right: {judge.tally}")
    for pod in cluster.pods:
        if not pod.ends and pod.component != "broker":
            await cluster.end(pod)
    replaced = sum(cluster.deployments[name]["spec"]["replicas"] for name in others)
    total = sum(judge.tally.endings.values())
    print(f"{replaced} pods replaced under load: {total} answers, all whole, {judge.tally.compared} compared, 0 differ")
    print(f"liveness looked at {looks} times and never failed")


def _api_keys(cluster: Cluster) -> Iterator[str]:
    return (data["api-keys"] for data in cluster.secrets.values() if "api-keys" in data)


async def _roll_all(cluster: Cluster, names: list[str]) -> None:
    for name in names:
        await cluster.roll(name)


if __name__ == "__main__":
    asyncio.run(main([*filter(None, yaml.safe_load_all(Path(sys.argv[1]).read_text()))], Path(sys.argv[2])))
