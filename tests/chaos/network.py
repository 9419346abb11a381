"""Every connection to the broker and to a worker goes through a cable, so that each can be cut.

    worker, proxy ---cable "pd0>broker"---> broker          others ---cables ">pd0"---> worker

A worker tells others an address of the loopback network that is its own, 127.0.1.N; what listens there are cables.
Those know who has connected, so that a worker can be cut off both ways: "<>pd0" are the worker's own cables, and all
others as far as it is the worker who has connected. "<>e0,pd0" cuts off the two together: they still reach each other.
"e0>pd0" is what e0 has connected to at pd0: one link between two workers that reach everybody else.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.exceptions import RedisError

from common.errors import TriptychError
from common.messages import decode_record
from launch.cluster.instance import Instance
from launch.cluster.plan import Plan
from tests.chaos.faulty_link import FaultyLink, Mode
from tests.chaos.owners import Address, owner_of

_POLL_S: Final = 0.05
_ADVERTISE: Final = "TRIPTYCH_ADVERTISE_HOST"


class Network:
    """The cables of one cluster, by name. Cables to a worker are laid as soon as it is in the registry."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._broker_url = ""
        self._cables: dict[str, list[FaultyLink]] = defaultdict(list)
        self._listening: set[Address] = set()
        self._instances: list[Instance] = []
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, broker_url: str, instances: list[Instance]) -> None:
        """Cables to the broker will lead there; whoever connects is one of the instances, or none that one knows."""
        self._broker_url, self._instances = broker_url, instances
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def to_broker(self, instance_id: str) -> str:
        """The broker's URL for one instance: through a new cable."""
        url = urlsplit(self._broker_url)
        cable = FaultyLink((url.hostname or "", url.port or 0))
        self._cables[f"{instance_id}>broker"].append(cable)
        user, at, _ = url.netloc.rpartition("@")
        host, port = cable.address
        return urlunsplit(url._replace(netloc=f"{user}{at}{host}:{port}"))

    def set(self, name: str, mode: Mode) -> None:
        """Of all the cables of one name, or of all that lead to and from instances."""
        if name.startswith("<>"):
            self._cut_off(set(name.removeprefix("<>").split(",")), mode)
            return
        source, _, target = name.partition(">")
        is_link = bool(source) and target != "broker"
        cables = self._cables.get(f">{target}" if is_link else name)
        assert cables, f"there is no cable {name!r}, only {sorted(self._cables)}"
        for cable in cables:
            cable.set(mode, (lambda who: who == source) if is_link else None)

    def _cut_off(self, ids: set[str], mode: Mode) -> None:
        assert ids < self._known, f"{ids} are not all of {self._known}"
        for name, cables in list(self._cables.items()):
            source, _, target = name.partition(">")
            for cable in cables:
                if source in ids:
                    cable.set(mode)
                elif target in ids:
                    cable.set(mode, lambda who: who not in ids)
                elif not source:
                    cable.set(mode, lambda who: who in ids)

    @property
    def _known(self) -> set[str]:
        return {name.partition(">")[0] for name in self._cables}

    def close(self) -> None:
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        for cables in self._cables.values():
            for cable in cables:
                cable.close()

    def _watch(self) -> None:
        with Redis.from_url(self._broker_url, socket_timeout=1, socket_connect_timeout=1) as redis:
            while not self._closed.wait(_POLL_S):
                with contextlib.suppress(RedisError, OSError):  # it may be what is broken at the moment
                    for key in redis.scan_iter(match=f"{self._cluster}:instance:*"):
                        self._lay(redis.get(key))

    def _lay(self, entry: bytes | None) -> None:
        """The cables to one instance; one that was started again has other ports."""
        with contextlib.suppress(TriptychError):
            record = decode_record(entry or b"")
            addresses = [record.http_address, record.requests_address, *record.tensor_address.split()]
            for url in map(urlsplit, addresses):
                if url.hostname is None or not url.hostname.startswith("127.0.1."):
                    continue
                place = url.hostname, url.port or 0
                if place not in self._listening:
                    self._listening.add(place)
                    cable = FaultyLink(("127.0.0.1", place[1]), place, self._source)
                    self._cables[f">{record.instance_id}"].append(cable)

    def _source(self, near: Address, far: Address) -> str | None:
        pids = {instance.pid: instance.id for instance in self._instances if instance.pid is not None}
        owner = owner_of(near, far, pids)
        return None if owner is None else pids[owner]


class CabledPlan(Plan):
    """A plan whose workers are reached, and reach the broker, through a network."""

    network: Network

    def instances(self, broker_url: str, logs: Path) -> list[Instance]:
        instances = super().instances(broker_url, logs)
        self.network.start(broker_url, instances)
        for number, instance in enumerate(instances):
            environment = instance.command.environment
            own = self.network.to_broker(instance.id)
            environment.update({name: value.replace(broker_url, own) for name, value in environment.items()})
            if instance.role != "proxy":
                environment[_ADVERTISE] = f"127.0.1.{1 + number}"
        return instances


def cabled(plan: Plan, network: Network) -> CabledPlan:
    """The same plan with a network."""
    copy = CabledPlan(plan.settings, plan.info, plan.topology)
    object.__setattr__(copy, "network", network)  # plans are frozen
    return copy
