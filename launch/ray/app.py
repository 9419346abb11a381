"""The Ray Serve application: one deployment per role, the proxy in front, a broker where none is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from ray import serve
from ray.serve import Application

from common.config import Settings
from common.errors import invalid
from common.keys import ClusterKey
from common.model_info import load_model_info
from common.process.gpu_memory import GPU_FRACTION
from launch.cluster.configure import load_settings
from launch.cluster.shares import runs_on_gpu
from launch.cluster.topology import LETTERS, Topology, choose_topology, usual_topology
from launch.ray.replicas import BROKER, BrokerReplica, LateProxy, ProxyReplica, WorkerReplica
from launch.ray.scaling import SCALING_POLICY

HEALTH_PERIOD_S = 5.0


class Scaling(BaseModel):
    """The range of a role's replicas, and the seconds of outstanding work that one replica should have."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_seconds: float = Field(default=2.0, gt=0)
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)


class Arguments(BaseModel):
    """Arguments of `serve run launch.ray:app`: on the command line (name=value) or below `args` in a Serve file.

    Roles are named as in a topology: e, p, d, pd or epd. `resources` are Ray's own options of the actors of a role, as
    {"pd": {"num_gpus": 0.8}, "e": {"num_gpus": 0.2}}; `settings` are those of triptych.toml. Environment and file
    give what is None.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    topology: str | None = None
    broker: str | None = None
    cluster: str | None = None
    proxies: int = Field(default=1, ge=1)
    resources: dict[str, dict[str, Any]] = {}
    scaling: dict[str, Scaling] = {}
    settings: dict[str, Any] = {}


def app(arguments: Arguments) -> Application:
    """Return the application. Raises TriptychError for a model, topology or setting that is none."""
    given = arguments.model_dump(include={"model", "broker", "cluster", "topology"}, exclude_none=True)
    return application_of(load_settings({**given, **arguments.settings}), arguments)


def application_of(settings: Settings, arguments: Arguments | None = None) -> Application:
    """Return the application with these settings; of `arguments`, what Ray has to know beside them."""
    arguments = arguments or Arguments()
    settings, topology = _plan(settings)
    roles = {letters: role for role, letters in LETTERS.items() if topology.count(role)}
    unknown = sorted({*arguments.resources, *arguments.scaling} - roles.keys() - {"proxy", BROKER})
    if unknown:
        raise invalid(f"no worker of the topology {topology} has the role {unknown[0]!r}", "topology")
    fixed = sorted(arguments.scaling.keys() - roles.keys())
    if fixed:
        raise invalid(f"{fixed[0]!r} does not scale: leave it out (`proxies` says how many proxies run)", "scaling")
    broker = None
    if settings.broker is None:
        options = {"num_cpus": 0, **arguments.resources.get(BROKER, {})}
        broker = _deployment(BROKER, BrokerReplica, options).bind()
    workers = []
    for letters, role in roles.items():
        options = _resources(settings, arguments.resources.get(letters, {}))
        counts = _counts(topology.count(role), arguments.scaling.get(letters))
        own = _with_share(settings, options.get("num_gpus", 0))
        grace_s = own.request_timeout_s + 10.0
        worker = _deployment(role, WorkerReplica, options, graceful_shutdown_timeout_s=grace_s, **counts)
        workers.append(worker.bind(own, str(topology), role, broker))
    front = _proxy(settings, arguments, broker is not None)
    return cast(Application, front.bind(broker, *workers))


def _plan(settings: Settings) -> tuple[Settings, Topology]:
    """Settings common to all replicas, with the key that makes them a cluster, and the topology."""
    info, asked = load_model_info(settings.model, settings.lora_modules), settings.topology
    topology = choose_topology(asked, info, settings.encoder_fallback) if asked else usual_topology(info, None)[0]
    update: dict[str, object] = {"served_model_name": settings.served_model_name or (info.name,)}
    if ClusterKey.of(settings) is None:
        update["cluster_key"] = SecretStr(ClusterKey.generate().reveal())
    return settings.model_copy(update=update), topology


def _with_share(settings: Settings, num_gpus: float) -> Settings:
    """Return the settings of a worker with a fraction of a GPU: the same fraction of what a whole one would take."""
    if not 0 < num_gpus < 1 or settings.engine.memory_bytes is not None:
        return settings
    fraction = num_gpus * (settings.engine.memory_fraction or GPU_FRACTION)
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"memory_fraction": fraction})})


def _resources(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Ray options of a worker's actor: by default one core, and a GPU where it runs on one."""
    usual: dict[str, Any] = {"num_cpus": settings.engine.num_threads or 1}
    if runs_on_gpu(settings.engine):
        usual["num_gpus"] = 1
    return {**usual, **given}


def _counts(count: int, scaling: Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"num_replicas": count}
    policy = {"policy_function": SCALING_POLICY, "policy_kwargs": {"target_seconds": scaling.target_seconds}}
    return {
        "autoscaling_config": {
            **scaling.model_dump(exclude={"target_seconds"}),
            "initial_replicas": min(max(count, scaling.min_replicas), scaling.max_replicas),
            "policy": policy,
        }
    }


def _proxy(settings: Settings, arguments: Arguments, own_broker: bool) -> Any:
    def make() -> LateProxy:
        return LateProxy(settings, own_broker)

    options = {"num_cpus": 1, **arguments.resources.get("proxy", {})}
    return _deployment(
        "proxy",
        serve.ingress(make)(ProxyReplica),
        options,
        num_replicas=arguments.proxies,
        max_ongoing_requests=2 * settings.max_inflight,  # who is too many is told by the proxy itself
        graceful_shutdown_timeout_s=settings.request_timeout_s + 10.0,
    )


def _deployment(name: str, kind: type, options: dict[str, Any], **more: Any) -> Any:
    return cast(Any, serve.deployment(kind)).options(
        name=name,
        ray_actor_options=options,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=30.0,
        **more,
    )
