#!/usr/bin/env bash
# `make compose-test`: build the images, bring a cluster up with the bundled model, ask it, take it down.
# Uses the Docker engine that answers; where none does, starts Debian's in namespaces of its own (root, Debian).
#   BASE_IMAGE    what the images start from (default python:3.11-slim; with our own engine, a Debian made here)
#   PYTHON        Python 3.11 to 3.14 with its venv module (default python3)
# Downloads stay in .cache/compose for the next run; everything else is gone at the end, also after a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/compose
cache=$PWD/.cache/compose
mkdir -p "$cache"
exec 9>"$cache/lock"
flock --nonblock 9 || { echo "compose-test: another one is running" >&2; exit 1; }
rm -rf "$cache"/run.* # of a run that was killed
scratch=$(mktemp -d "$cache/run.XXXXXX")
project=triptych-compose-test
scale=(--scale encoder=2 --scale prefill=1 --scale decode=1)
expected=(encoder=2 prefill=1 decode=1 prefill_decode=1 proxy=1)
pictures=24
key() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
TRIPTYCH_BROKER_PASSWORD=$(key) TRIPTYCH_CLUSTER_KEY=$(key) TRIPTYCH_API_KEY=$(key)
export TRIPTYCH_BROKER_PASSWORD TRIPTYCH_CLUSTER_KEY TRIPTYCH_API_KEY
export TRIPTYCH_TAG=compose-test TRIPTYCH_PUBLISH=127.0.0.1:0 TRIPTYCH_MODEL=signpost TRIPTYCH_START_PERIOD=300s
began=$SECONDS

die() { echo "compose-test: $*" >&2; exit 1; }
step() { printf '\n── %s (%d s)\n' "$*" $((SECONDS - began)); }
compose() { "${compose_binary[@]}" --project-name "$project" --file docker-compose.yml "$@"; }

# shellcheck source-path=SCRIPTDIR source=engine.sh
. "$here/engine.sh"
# shellcheck source-path=SCRIPTDIR source=images.sh
. "$here/images.sh"

cleanup() {
    local status=$?
    trap - EXIT INT TERM
    set +e
    step "take it down"
    if docker info >/dev/null 2>&1; then
        if [ $status != 0 ] && [ -n "${compose_binary[*]:-}" ]; then compose ps -a; compose logs --no-color --tail 20; fi >&2
        [ -n "${compose_binary[*]:-}" ] && compose --progress quiet down --volumes --remove-orphans --timeout 10
        echo "containers left: $(docker ps -aq --filter "label=com.docker.compose.project=$project" | wc -l)"
        [ "${own_engine:-1}" = 1 ] || images_remove # our own engine's go with $scratch
    fi
    engine_stop
    rm -rf "$scratch"
    if [ $status = 0 ]; then step "compose-test passed"; else step "compose-test FAILED"; fi
    exit $status
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

up() { # returns once all are healthy
    compose --progress quiet up --detach --no-build --wait --wait-timeout 360 "${scale[@]}"
}

inside() { # run a program of the proxy's image in the cluster's network
    compose --progress quiet run --rm --no-deps --no-TTY --volume "$PWD/tools/compose:/checks:ro" --entrypoint "$1" proxy \
        "${@:2}"
}

kill_encoder() { # its processes, not the container: that is what a restart policy is for
    local id waited=0
    id=$(compose ps --quiet encoder | tail -n 1)
    docker exec "$id" sh -c 'kill -KILL -1' || true
    until [ "$(docker inspect --format '{{.RestartCount}}' "$id")" -ge 1 ]; do
        [ $((waited += 1)) -le 100 ] || die "the encoder was not started again within 20 s"
        sleep 0.2
    done
    docker inspect --format 'restarts of {{.Name}}: {{.RestartCount}}' "$id"
}

step "engine"
if docker info >/dev/null 2>&1; then
    own_engine=0
else
    own_engine=1
    engine_start
fi
docker info --format 'Docker {{.ServerVersion}}, storage {{.Driver}}, {{.OperatingSystem}}'
find_compose
compose version --short
compose config --quiet

step "wheels and base image"
make_wheels
[ $own_engine = 0 ] || make_base_image

step "build"
build_images
docker images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep "^triptych-.*:$TRIPTYCH_TAG " | sort
docker run --rm --network none --entrypoint python "triptych-proxy:$TRIPTYCH_TAG" -c '
import importlib.util as modules
assert not any(modules.find_spec(name) for name in ("torch", "transformers")), "the proxy image holds torch"
print("the proxy image holds neither torch nor transformers")'

step "up, with two encoders, and prefill and decode apart beside the prefill-decode worker"
up
compose ps --format 'table {{.Name}}\t{{.Status}}'
echo "started in this order:"
compose ps --quiet | xargs docker inspect --format '  {{slice .State.StartedAt 11 19}} {{slice .Name 1}}' | sort
# shellcheck disable=SC2016
compose exec -T encoder sh -c 'echo "an encoder runs as user $(id -u) with capabilities $(sed -n "s/CapEff:.//p" /proc/1/status)"
    ! touch /app/x 2>/dev/null && echo "and cannot write to its image"'

step "health endpoints"
inside python /checks/endpoints.py "${expected[@]}"
published=$(compose port proxy 8000)
from_host python3 - "http://$published" <<'PYTHON'
import os, sys, urllib.error, urllib.request
key = {"Authorization": f"Bearer {os.environ['TRIPTYCH_API_KEY']}"}
for path, headers in (("/health", {}), ("/ready", {}), ("/metrics", key), ("/v1/models", key)):
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, headers=headers), timeout=10) as answer:
        print(f"from the host: {path} {answer.status}")
try:
    urllib.request.urlopen(sys.argv[1] + "/v1/models", timeout=10)
except urllib.error.HTTPError as error:
    assert error.code == 401, error
    print("from the host, without a key: /v1/models 401")
else:
    sys.exit("the API answers without a key")
PYTHON

step "parallel client: two questions about each of $pictures pictures, 8 in flight"
install --directory --mode 777 "$scratch/signs"
compose --progress quiet run --rm --no-deps --no-TTY --volume "$scratch/signs:/signs" \
    --volume "$PWD/tools/compose:/checks:ro" --entrypoint python proxy /checks/pictures.py /signs "$pictures"
signs=("$scratch"/signs/*.png)
for question in "What does the sign say?" "What colour is the sign?"; do
    echo "$question"
    compose --progress quiet run --rm --no-deps --no-TTY --volume "$scratch/signs:/signs:ro" proxy \
        request "${signs[@]/#*\///signs/}" --prompt "$question" --parallel 8 --url http://proxy:8000
done | tee "$scratch/answers.txt"
# Each file is named after what is right: colour-text.png.
sed -nE 's/.*✓ ([^-]+)-([^.]+)\.png: ([^ ]+) .*/\1 \2 \3/p' "$scratch/answers.txt" >"$scratch/answers.tsv"
right=$(awk '$1 == $3 || $2 == $3' "$scratch/answers.tsv" | wc -l)
colours=$(awk '$1 == $3' "$scratch/answers.tsv" | wc -l)
echo "$right of $((2 * pictures)) answers right, $colours of $pictures colours"
[ $((10 * colours)) -ge $((9 * pictures)) ] || die "so many wrong colours mean that something is broken"

step "an encoder dies and is started again"
kill_encoder
up
inside python /checks/endpoints.py "${expected[@]}"
