# shellcheck shell=bash disable=SC2154
# A Docker engine of our own for `make compose-test`, where the machine has none: Debian's packages, unpacked (not
# installed) into $cache, run in namespaces of their own. Sourced by test.sh, which sets `cache` and `scratch`.
#
# In its own PID, mount and network namespace the engine leaves nothing behind when it ends, however it ends: all
# containers die with its first process, its mounts and bridges go with the namespaces, the host's firewall and
# routing are never touched. The price: containers reach each other but not the outside, so test.sh brings wheels.

unpack_debian() { # FOLDER FILE PACKAGE…: download and unpack once; later runs find the file in the folder
    [ -x "$cache/$1/$2" ] && return
    command -v apt-get >/dev/null || die "this needs Debian's packages ${*:3}, and there is no apt-get"
    mkdir -p "$cache/debs/partial"
    apt-cache show "$3" >/dev/null 2>&1 || apt-get update -qq
    # --reinstall: also those that the machine has installed, but not running, are wanted as files.
    apt-get install -qq --no-install-recommends --download-only --reinstall \
        -o "Dir::Cache::archives=$cache/debs" "${@:3}" >/dev/null
    local deb
    for deb in "$cache"/debs/*.deb; do dpkg-deb --extract "$deb" "$cache/$1"; done
    rm -r "$cache/debs"
}

engine_packages() {
    unpack_debian engine usr/sbin/dockerd docker.io containerd runc iptables debootstrap
    ln -sf xtables-legacy-multi "$cache/engine/usr/sbin/iptables"
    ln -sf xtables-legacy-multi "$cache/engine/usr/sbin/ip6tables"
}

engine_environment() { # for the commands that come out of the packages
    export PATH="$cache/engine/usr/sbin:$cache/engine/usr/bin:$PATH:/usr/sbin:/sbin"
    LD_LIBRARY_PATH=$cache/engine/usr/lib/$(uname -m)-linux-gnu
    XTABLES_LIBDIR=$LD_LIBRARY_PATH/xtables
    export LD_LIBRARY_PATH XTABLES_LIBDIR
}

engine_shells=() engine_pids=() engine_sockets=() # of every engine started here: who waits for it, its first process, its door

engine_start() { # [FOLDER]: one more engine, with its images in the folder, else in $scratch; sets DOCKER_HOST
    [ "$(id -u)" = 0 ] || die "no Docker engine answers, and only root can start one: start Docker, or run this as root"
    engine_packages
    local folder=${1:-$scratch} waited=0 number=${#engine_shells[@]}
    mkdir -p "$folder"
    engine_sockets+=("$(mktemp -d)/docker.sock") # a short path: that of a socket may have 107 characters
    export DOCKER_HOST="unix://${engine_sockets[number]}" PATH="$cache/engine/usr/bin:$PATH"
    # In a session of its own, Ctrl-C does not reach it. If this script dies without a word, so does unshare, and with
    # it the first process of the PID namespace.
    ( engine_environment
      exec setsid setpriv --pdeathsig KILL unshare --fork --kill-child --pid --mount --mount-proc --net --ipc --uts \
          "$BASH" -c "$(declare -f engine_inside); engine_inside '$folder' '${engine_sockets[number]}' host-$((number + 1))"
    ) >"$folder/dockerd.log" 2>&1 &
    engine_shells+=($!)
    until docker info >/dev/null 2>&1; do
        kill -0 "${engine_shells[number]}" 2>/dev/null && [ $((waited += 1)) -le 60 ] || {
            tail -n 20 "$folder/dockerd.log" >&2
            die "Debian's Docker engine did not come up within 30 s"
        }
        sleep 0.5
    done
    engine_pids+=("$(pgrep -P "${engine_shells[number]}" -f dockerd)")
}

from_host() { # run a command where published ports are reached
    [ "${engine_pids[*]:-}" ] && set -- nsenter --target "${engine_pids[0]}" --net "$@"
    "$@"
}

engine_inside() { # FOLDER SOCKET HOSTNAME: the first process in the namespaces
    echo "$3" >/proc/sys/kernel/hostname
    ip link set lo up
    mount -t tmpfs tmpfs /run
    [[ $1 == /opt/* ]] || mount -t tmpfs tmpfs /opt # containerd makes a folder there
    echo '{"deprecated-key-path": "'"$1"'/key.json"}' >"$1/daemon.json"
    exec dockerd --config-file "$1/daemon.json" --host "unix://$2" --data-root "$1/data" \
        --exec-root /run/docker --pidfile /run/docker.pid --cgroup-parent /triptych-compose-test
}

engine_stop() { # all of them
    local number waited=0
    for number in "${!engine_shells[@]}"; do
        kill -TERM "${engine_pids[number]:-${engine_shells[number]}}" 2>/dev/null || true
    done
    # dockerd ends its containers within 10 s; whatever is left after 20 s dies with the namespace.
    for number in "${!engine_shells[@]}"; do
        while kill -0 "${engine_shells[number]}" 2>/dev/null && [ $((waited += 1)) -le 100 ]; do sleep 0.2; done
        kill -KILL "${engine_shells[number]}" 2>/dev/null || true
        wait "${engine_shells[number]}" 2>/dev/null || true
        rm -rf "${engine_sockets[number]%/*}"
    done
    find /sys/fs/cgroup -depth -type d -path '*/triptych-compose-test*' -exec rmdir {} + 2>/dev/null || true
    engine_shells=() engine_pids=() engine_sockets=()
}
