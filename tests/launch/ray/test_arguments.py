"""What `serve run launch.ray:app` takes, and what it refuses before Ray starts anything."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import TriptychError
from common.process.gpu_memory import GPU_FRACTION
from launch.ray.app import Arguments, Scaling, app


def deployments(arguments: Arguments) -> dict[str, Any]:
    """The deployments of an application, by name."""
    front = app(arguments)._bound_deployment
    bound = [front, *(one._bound_deployment for one in front.init_args if one is not None)]
    return {one.name: one for one in bound}


def test_each_role_of_the_topology_is_a_deployment_beside_proxy_and_broker():
    made = deployments(Arguments(model="signpost", topology="2e1p1d", proxies=2))
    assert {name: one.num_replicas for name, one in made.items()} == {
        "proxy": 2,
        "broker": 1,
        "encoder": 2,
        "prefill": 1,
        "decode": 1,
    }


def test_what_is_not_given_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_MODEL", "numerals")
    monkeypatch.setenv("TRIPTYCH_CLUSTER", "staging")
    settings = deployments(Arguments(topology="1e1pd"))["encoder"].init_args[0]
    assert (settings.model, settings.cluster) == ("numerals", "staging")
    settings = deployments(Arguments(model="signpost", topology="1e1pd"))["encoder"].init_args[0]
    assert (settings.model, settings.cluster) == ("signpost", "staging")


def test_a_broker_of_your_own_takes_the_place_of_ours():
    assert "broker" not in deployments(Arguments(topology="1epd", broker="redis://10.0.0.5:6379"))


def test_resources_are_rays_own_and_a_fraction_of_a_gpu_is_the_same_of_its_memory():
    arguments = Arguments(topology="1e1pd", resources={"e": {"num_gpus": 0.25, "num_cpus": 3}})
    encoder = deployments(arguments)["encoder"]
    assert encoder.ray_actor_options["num_cpus"] == 3
    assert encoder.ray_actor_options["num_gpus"] == 0.25
    assert encoder.init_args[0].engine.memory_fraction == 0.25 * GPU_FRACTION


def test_a_role_scales_between_its_bounds():
    made = deployments(Arguments(topology="1e1pd", scaling={"e": Scaling(min_replicas=1, max_replicas=4)}))
    config = made["encoder"]._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (1, 4, 1)


def test_replicas_of_one_application_have_one_key_and_another_application_another():
    one, other = (deployments(Arguments(topology="1e1pd")) for _ in range(2))
    key = one["encoder"].init_args[0].cluster_key
    assert one["prefill_decode"].init_args[0].cluster_key == key
    assert other["encoder"].init_args[0].cluster_key != key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "1x"}, "no role 'x'"),
        ({"topology": "1e1pd", "resources": {"d": {}}}, "1e1pd has the role 'd'"),
        ({"topology": "1e1pd", "scaling": {"p": {"max_replicas": 2}}}, "1e1pd has the role 'p'"),
        ({"topology": "1e1pd", "scaling": {"proxy": {"max_replicas": 2}}}, "'proxy' does not scale: .*`proxies`"),
        ({"topology": "1e1pd", "scaling": {"broker": {"max_replicas": 2}}}, "'broker' does not scale"),
        ({"settings": {"max_inflite": 3}}, "unknown setting 'max_inflite'"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(TriptychError, match=message):
        app(Arguments(**arguments))


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValidationError, match="modell"):
        Arguments(modell="signpost")  # type: ignore[call-arg]
