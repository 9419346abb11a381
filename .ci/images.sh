#!/usr/bin/env bash
# Build the images of a release, look whether each tells the version, and save them to FOLDER.
# Usage: .ci/images.sh VERSION FOLDER. Uses the Docker engine that answers; where none does, starts Debian's in namespaces
# of its own (root, Debian), as `make compose-test` does: there the images start from a Debian made here.
#   PYTHON    Python 3.11 to 3.14 with its venv module (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1 folder=$2 here=tools/compose cache=$PWD/.cache/compose project=triptych-dist
export TRIPTYCH_TAG=$version
die() { echo "dist: $*" >&2; exit 1; }
compose() { "${compose_binary[@]}" --project-name "$project" --file docker-compose.yml "$@"; }
# shellcheck source-path=SCRIPTDIR source=../tools/compose/engine.sh
. "$here/engine.sh"
# shellcheck source-path=SCRIPTDIR source=../tools/compose/images.sh
. "$here/images.sh"

mkdir -p "$cache" "$folder"
exec 9>"$cache/lock"
flock --nonblock 9 || die "make compose-test is running, and has the same downloads"
scratch=$(mktemp -d "$cache/run.XXXXXX")
trap 'engine_stop; rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if docker info >/dev/null 2>&1; then
    find_compose
else
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "no images: no Docker engine answers, and only root on Debian can start one here"
        exit
    fi
    echo "no Docker engine answers: starting Debian's, which builds without the index (minutes, some GiB) …"
    engine_start
    find_compose
    download_wheels
    make_wheels
    make_base_images
fi
build_images
for name in proxy worker; do
    told=$(docker run --rm --network none "triptych-$name:$version" --version)
    [ "$told" = "triptych $version" ] || die "the image triptych-$name:$version says: $told"
done
docker run --rm --network none --entrypoint valkey-server "triptych-broker:$version" --version | cut -d ' ' -f 1-3
archive=$folder/triptych-images-$version.tar.gz
docker save "triptych-broker:$version" "triptych-proxy:$version" "triptych-worker:$version" | gzip -1 >"$archive.new"
mv "$archive.new" "$archive"
docker images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep "^triptych-\(broker\|proxy\|worker\):$version " | sort
echo "saved: $archive, $(du -h "$archive" | cut -f 1); docker load --input reads it"
