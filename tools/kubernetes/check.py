"""Render the chart for a matrix of values and hold every object to the schema of its kind.

Usage: python -m tools.kubernetes.check HELM KUBECTL
Built-in kinds: the strict schemas of several Kubernetes versions, and kubectl's decoding without a server. KEDA's and
Prometheus' kinds: models made from their definitions, where a field that they do not know is an error. DisaggregatedSet
and RayService: pod templates by Kubernetes' schema, the fields around them by FIELDS; no definitions are packaged.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from tools.kubernetes.matrix import MATRIX, REFUSED, Values

yaml: Final[Any] = import_module("yaml")
CHART: Final = Path(__file__).parents[2] / "launch" / "kubernetes" / "chart"
VERSIONS: Final = ("1.37", "1.32", "1.27")
Manifest = dict[str, Any]
MODELS: Final = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
}
_ROLE: Final = "spec.roles.spec"
_CLUSTER: Final = "spec.rayClusterConfig"
FIELDS: Final[dict[str, str]] = {
    # github.com/kubernetes-sigs/lws, api/disaggregatedset/v1 and api/leaderworkerset/v1
    "DisaggregatedSet": f"""spec spec.roles spec.roles.name {_ROLE} {_ROLE}.replicas
        {_ROLE}.rolloutStrategy {_ROLE}.rolloutStrategy.type {_ROLE}.rolloutStrategy.rollingUpdateConfiguration
        {_ROLE}.rolloutStrategy.rollingUpdateConfiguration.maxSurge
        {_ROLE}.rolloutStrategy.rollingUpdateConfiguration.maxUnavailable
        {_ROLE}.leaderWorkerTemplate {_ROLE}.leaderWorkerTemplate.size {_ROLE}.leaderWorkerTemplate.workerTemplate""",
    # github.com/ray-project/kuberay, ray-operator/apis/ray/v1
    "RayService": f"""spec spec.serveConfigV2 {_CLUSTER} {_CLUSTER}.rayVersion {_CLUSTER}.enableInTreeAutoscaling
        {_CLUSTER}.headGroupSpec {_CLUSTER}.headGroupSpec.rayStartParams {_CLUSTER}.headGroupSpec.template
        {_CLUSTER}.workerGroupSpecs {_CLUSTER}.workerGroupSpecs.groupName {_CLUSTER}.workerGroupSpecs.replicas
        {_CLUSTER}.workerGroupSpecs.minReplicas {_CLUSTER}.workerGroupSpecs.maxReplicas
        {_CLUSTER}.workerGroupSpecs.rayStartParams {_CLUSTER}.workerGroupSpecs.template""",
}
"""Fields that the chart may give, as dotted paths."""
FREE: Final = ("rayStartParams", "template", "workerTemplate")
"""Fields whose content is looked at elsewhere, or is any."""


def render(helm: str, values: Values) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with values in addition to the chart's own."""
    command = [helm, "template", "demo", str(CHART), "--namespace", "models", "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)


def read(rendered: str) -> list[Manifest]:
    """Return the objects of a rendered chart."""
    return [one for one in yaml.safe_load_all(rendered) if one]


def check(manifest: Manifest) -> None:
    """Raise where an object is not of its kind. Raises kubernetes_validate's errors, or ValueError."""
    kind, schemas = manifest["kind"], cast(Any, import_module("kubernetes_validate"))
    if kind in MODELS:
        _check_by_model(manifest)
    elif kind in FIELDS:
        unknown = sorted(set(_paths({"spec": manifest["spec"]})) - set(FIELDS[kind].split()))
        if unknown:
            raise ValueError(f"{kind} has no field {', '.join(unknown)}")
        templates = list(_templates(manifest["spec"]))
        if not templates:
            raise ValueError(f"{kind} without a pod")
        for template in templates:
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            schemas.validate(pod, VERSIONS[0], strict=True)
    else:
        for version in VERSIONS:
            schemas.validate(manifest, version, strict=True)


def _check_by_model(manifest: Manifest) -> None:
    model = getattr(import_module(MODELS[manifest["kind"]]), manifest["kind"])
    read_back = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if read_back != manifest:
        raise ValueError(f"{manifest['kind']} reads back as {read_back}")


def _paths(value: object, before: str = "") -> Iterator[str]:
    """Every field of an object as a dotted path, items of lists without their index."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{before}{name}"
            if name not in FREE:
                yield from _paths(inner, f"{before}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, before)


def _templates(value: object) -> Iterator[Manifest]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("template", "workerTemplate"):
                yield inner
            else:
                yield from _templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates(inner)


def decode(kubectl: str, manifests: list[Manifest]) -> int:
    """Let kubectl decode the built-in kinds with its own types, without a server; return how many."""
    known = [one for one in manifests if one["kind"] not in {*MODELS, *FIELDS}]
    command = [kubectl, "annotate", "--local", "--filename", "-", "checked=yes", "--output", "name"]
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": known})
    done = subprocess.run(command, input=objects, capture_output=True, text=True)
    if done.returncode or len(done.stdout.splitlines()) != len(known):
        sys.exit(f"kubectl: {done.stderr or done.stdout}")
    return len(known)


def main(helm: str, kubectl: str) -> None:
    kinds, decoded = Counter[str](), 0
    for name, values in MATRIX.items():
        done = render(helm, values)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        manifests = read(done.stdout)
        names = Counter((one["kind"], one["metadata"]["name"]) for one in manifests)
        if twice := [name for name, count in names.items() if count > 1]:
            sys.exit(f"{name}: rendered twice: {twice}")
        for manifest in manifests:
            try:
                check(manifest)
            except Exception as error:
                sys.exit(f"{name}: {manifest['kind']} {manifest['metadata']['name']}: {error}")
        decoded += decode(kubectl, manifests)
        kinds.update(one["kind"] for one in manifests)
        print(f"{len(manifests):3d} objects: {name}", flush=True)
    for name, (values, part) in REFUSED.items():
        done = render(helm, values)
        if done.returncode == 0 or part not in done.stderr:
            sys.exit(f"{name}: not refused as it should be: {done.stderr}")
    print(f"{len(REFUSED)} values refused, each with a sentence: {', '.join(REFUSED)}")
    print(f"{kinds.total()} objects of {len(MATRIX)} sets of values are valid, {decoded} decoded by kubectl:")
    print("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
