#!/usr/bin/env bash
# `make compose-test`: build the images, bring clusters up with the bundled model, ask them, kill and restart their
# workers, take all down. With MULTI=1: the cluster as a stack of Docker Swarm over two hosts (swarm.sh).
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
scale=(--scale encoder=2 --scale prefill=2 --scale decode=2 --scale prefill-decode=0)
scaled=(encoder=2 prefill=2 decode=2 prefill_decode=0 proxy=1)
pictures=24
signs=$scratch/signs # the containers' /signs
install --directory --mode 777 "$signs"
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
        if [ "${MULTI:-}" ]; then docker stack rm "$project" >/dev/null; fi
        [ -n "${compose_binary[*]:-}" ] && compose --progress quiet down --volumes --remove-orphans --timeout 10
        echo "containers left: $(docker ps -aq --filter "label=com.docker.compose.project=$project" | wc -l)"
        [ "${own_engine:-1}" = 1 ] || images_remove # our own engine's go with $scratch
    fi
    engine_stop
    rm -rf "$scratch"
    [ -z "${MULTI:-}" ] || echo "processes left: $(pgrep -fc "$scratch")"
    if [ $status = 0 ]; then step "compose-test passed"; else step "compose-test FAILED"; fi
    exit $status
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

up() { # returns once all are healthy
    compose --progress quiet up --detach --no-build --wait --wait-timeout 600 "$@"
    compose ps --format 'table {{.Name}}\t{{.Status}}'
}

inside() { # run a module of tools/ in the cluster's network, with the proxy's image
    compose --progress quiet run --rm --no-deps --no-TTY --volume "$PWD/tools:/checks/tools:ro" --workdir /checks \
        --volume "$signs:/signs" --entrypoint python proxy -m "tools.compose.$1" "${@:2}"
}

request() { # the command `triptych request`, with what there is in the environment of a proxy
    compose --progress quiet run --rm --no-deps --no-TTY --volume "$signs:/signs:ro" proxy \
        request "$@" --url http://proxy:8000
}

amid_questions() { # NUMBER MAX_TOKENS COMMAND…: run the command while the questions go round
    touch "$signs/asking"
    inside asking "$1" "$2" /signs/asking </dev/null | (
        trap 'rm -f "$signs/asking"' EXIT
        while read -r line; do
            echo "$line"
            if [[ $line == "asking again"* ]]; then
                "${@:3}" </dev/null
                rm "$signs/asking"
            fi
        done
    )
}

await_return() { # ID RESTARTS: until Docker has started a container once more, and its worker is ready
    local began_s=$SECONDS
    until [ "$(docker inspect --format "{{gt .RestartCount $2}} {{.State.Status}} {{.State.Health.Status}}" "$1")" = \
        "true running healthy" ]; do
        [ $((SECONDS - began_s)) -le 300 ] || die "a worker was not back within 300 s"
        sleep 0.2
    done
    docker inspect --format "restarts of {{.Name}}: {{.RestartCount}}, ready after $((SECONDS - began_s)) s" "$1"
}

restarts_of() { docker inspect --format '{{.RestartCount}}' "$1"; }

kill_worker() { # SERVICE: its processes, not the container: that is what a restart policy is for
    local id restarts
    id=$(compose ps --quiet "$1" | tail -n 1)
    restarts=$(restarts_of "$id")
    docker exec "$id" sh -c 'kill -KILL -1' || true
    await_return "$id" "$restarts"
}

roll_workers() { # one after the other: drained, and started again by Docker
    local id restarts
    for id in $(compose ps --quiet encoder prefill decode); do
        restarts=$(restarts_of "$id")
        # Fails where Docker has started the worker again before the command's second look.
        compose exec -T proxy triptych drain "${id:0:12}" || true
        await_return "$id" "$restarts"
    done
}

step "engine"
if [ -z "${MULTI:-}" ] && docker info >/dev/null 2>&1; then
    own_engine=0
else
    own_engine=1
    engine_start
fi
digest=$(LC_ALL=C && cat "$here"/*.* Dockerfile docker-compose.yml docker-compose.stack.yml | sha256sum | cut -c -16)
echo "test and images of $digest" # the transcript in the docs is of these files
docker info --format 'Docker {{.ServerVersion}}, storage {{.Driver}}, {{.OperatingSystem}}'
find_compose
compose version --short
compose config --quiet

step "wheels and base image"
download_wheels
make_wheels
[ $own_engine = 0 ] || make_base_images

step "build"
build_images
docker images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep "^triptych-.*:$TRIPTYCH_TAG " | sort
docker run --rm --network none --entrypoint python "triptych-proxy:$TRIPTYCH_TAG" -c '
import importlib.util as modules
assert not any(modules.find_spec(name) for name in ("torch", "transformers")), "the proxy image holds torch"
print("the proxy image holds neither torch nor transformers")'
docker run --rm --network none --read-only --tmpfs /tmp --entrypoint python "triptych-worker:$TRIPTYCH_TAG" -c '
import torch
from engine.native import quantised
x, codes = torch.ones(2, 64), torch.arange(512, dtype=torch.int32).reshape(8, 64).remainder(127).to(torch.int8)
assert quantised.serves(x), "the worker image lacks the kernels for quantised weights"
assert torch.equal(quantised.linear(x, codes, torch.ones(8, 1), None, 64, None), x @ codes.float().T)
print("a worker multiplies int8 weights by", quantised.library()._name)' 2>&1

if [ "${MULTI:-}" ]; then
    # shellcheck source-path=SCRIPTDIR source=swarm.sh
    . "$here/swarm.sh"
    test_swarm
    exit
fi

step "up, the plain default"
up
echo "started in this order:"
compose ps --quiet | xargs docker inspect --format '  {{slice .State.StartedAt 11 19}} {{slice .Name 1}}' | sort
# shellcheck disable=SC2016
compose exec -T encoder sh -c 'echo "an encoder runs as user $(id -u) with capabilities $(sed -n "s/CapEff:.//p" /proc/1/status)"
    ! touch /app/x 2>/dev/null && echo "and cannot write to its image"'

step "health endpoints"
inside endpoints encoder=1 prefill=0 decode=0 prefill_decode=1 proxy=1
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

inside pictures /signs "$pictures"
signs_inside=("$signs"/*.png)
signs_inside=("${signs_inside[@]/#*\///signs/}")

step "the plain default: a picture, a text, and 32 questions"
request "${signs_inside[0]}" --prompt "What colour is the sign?"
request --prompt "Which colours do you know?"
inside asking 32 160

step "up, scaled to two encoders, two prefill and two decode workers"
up "${scale[@]}"
inside endpoints "${scaled[@]}"

step "parallel client: two questions about each of $pictures pictures, 8 in flight"
for question in "What does the sign say?" "What colour is the sign?"; do
    echo "$question"
    request "${signs_inside[@]}" --prompt "$question" --parallel 8
done | tee "$scratch/answers.txt"
# Each file is named after what is right: colour-text.png.
sed -nE 's/.*✓ ([^-]+)-([^.]+)\.png: ([^ ]+) .*/\1 \2 \3/p' "$scratch/answers.txt" >"$scratch/answers.tsv"
right=$(awk '$1 == $3 || $2 == $3' "$scratch/answers.tsv" | wc -l)
colours=$(awk '$1 == $3' "$scratch/answers.tsv" | wc -l)
echo "$right of $((2 * pictures)) answers right, $colours of $pictures colours"
[ $((10 * colours)) -ge $((9 * pictures)) ] || die "so many wrong colours mean that something is broken"

step "what went through prefill and decode: 32 questions"
inside asking 32 160

step "an encoder dies and is started again"
kill_worker encoder
inside endpoints "${scaled[@]}"

step "a decode worker dies in the middle of streams and is started again"
amid_questions 6 900 kill_worker decode | tee "$scratch/killed.txt"
grep -q ' [1-9][0-9]* moved' "$scratch/killed.txt" || die "the kill met no stream"
inside endpoints "${scaled[@]}"

step "all workers are drained and started again, one by one, under load"
amid_questions 32 40 roll_workers
inside endpoints "${scaled[@]}"
