#!/usr/bin/env bash
# `make helm-test PODS=1`: the pods of the chart, really run by podman. Podman is Debian's, unpacked and in namespaces of
# its own, as the Docker engine of `make compose-test` is: root and Debian. Called by test.sh.
#   HELM          Helm's binary
#   POD_PYTHON    a Python with Triptych
set -euo pipefail
export TRIPTYCH_TAG=helm-test
here=tools/compose cache=$PWD/.cache/compose
mkdir -p "$cache"
die() { echo "helm-test: $*" >&2; exit 1; }
# shellcheck source-path=SCRIPTDIR source=../compose/engine.sh
. "$here/engine.sh"
# shellcheck source-path=SCRIPTDIR source=../compose/images.sh
. "$here/images.sh"

configure_podman() { # its programs take their libraries from where they are unpacked, Python must not
    local root=$cache/podman program libraries
    libraries=usr/lib/$(uname -m)-linux-gnu
    mkdir -p "$scratch/bin" "$scratch/home"
    for program in podman/usr/bin/{podman,crun} engine/usr/sbin/{iptables,ip6tables}; do # the latter for netavark
        printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s XTABLES_LIBDIR=%s\nexec %s "$@"\n' "$cache/${program%%/*}/$libraries" \
            "$cache/engine/$libraries/xtables" "$cache/$program" >"$scratch/bin/${program##*/}"
        chmod +x "$scratch/bin/${program##*/}"
    done
    cat >"$scratch/containers.conf" <<CONF
[engine]
conmon_path = ["$root/usr/bin/conmon"]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "file"
helper_binaries_dir = ["$root/usr/lib/podman", "$root/usr/bin"]
[engine.runtimes]
crun = ["$scratch/bin/crun"]
[network]
network_backend = "netavark"
network_config_dir = "$scratch/networks"
CONF
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "/run/storage"\n' "$scratch/images" >"$scratch/storage.conf"
    mkdir -p "$scratch/home/.config/containers"
    echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$scratch/home/.config/containers/policy.json"
    export CONTAINERS_CONF=$scratch/containers.conf CONTAINERS_STORAGE_CONF=$scratch/storage.conf HOME=$scratch/home
    export PATH="$scratch/bin:$PATH"
}

build_pods() {
    local target
    docker() { podman "$@"; }
    make_wheels
    import_debian base localhost/triptych-base:$TRIPTYCH_TAG ""
    for target in broker proxy worker; do # without a compiler: workers do without the kernels
        podman build --quiet --format docker --network none --target "$target" --tag "localhost/triptych-$target:$TRIPTYCH_TAG" \
            --build-arg "BASE_IMAGE=localhost/triptych-base:$TRIPTYCH_TAG" --build-arg PIP_NO_INDEX=1 --env PIP_NO_INDEX=1 \
            --build-arg "COMPILER_IMAGE=localhost/triptych-base:$TRIPTYCH_TAG" \
            --build-arg "WHEELS_IMAGE=localhost/triptych-wheels:$TRIPTYCH_TAG" . >"$scratch/build.log" 2>&1 ||
            { tail -n 40 "$scratch/build.log" >&2; die "the image of target $target could not be built"; }
    done
}

if [ "${1:-}" = inside ]; then # the first process in the namespaces
    scratch=$2
    ip link set lo up
    mount -t tmpfs tmpfs /run
    umount /sys/fs/cgroup/unified 2>/dev/null || true # where cgroups of both versions are mounted, crun takes the first
    configure_podman
    podman version --format 'podman {{.Client.Version}}'
    build_pods
    mkdir "$scratch/pods"
    exec "$POD_PYTHON" -m tools.kubernetes.pods "$scratch/rendered.yaml" "$scratch/pods"
fi

[ "$(id -u)" = 0 ] || die "only root can run pods here"
rm -rf "$cache"/pods.* # of a run that was killed
scratch=$(mktemp -d "$cache/pods.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
engine_packages # debootstrap is among them
unpack_debian podman usr/bin/podman podman crun conmon netavark aardvark-dns catatonit
bootstrap_debian base python3,python3-venv,ca-certificates
download_wheels
"$HELM" template demo launch/kubernetes/chart --set image.registry=localhost,image.tag=$TRIPTYCH_TAG \
    --set 'keys.apiKeys={a-key-of-the-test}' --set roles.encoder.replicas=1,roles.prefill_decode.replicas=1,proxy.replicas=1 \
    --set settings.request_timeout_s=60,settings.engine.num_threads=1 >"$scratch/rendered.yaml"
unshare --fork --kill-child --pid --mount --mount-proc --net --ipc --uts "$BASH" tools/kubernetes/podman.sh inside "$scratch"
