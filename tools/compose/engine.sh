# shellcheck shell=bash disable=SC2154
# A Docker engine of our own for `make compose-test`, where the machine has none: Debian's packages, unpacked (not
# installed) into $cache, run in namespaces of their own. Sourced by test.sh, which sets `cache` and `scratch`.
#
# In its own PID, mount and network namespace the engine leaves nothing behind when it ends, however it ends: all
# containers die with its first process, its mounts and bridges go with the namespaces, the host's firewall and
# routing are never touched. The price: containers reach each other but not the outside, so test.sh brings wheels.

engine_packages() { # download and unpack once; later runs find them in $cache
    [ -x "$cache/engine/usr/sbin/dockerd" ] && return
    command -v apt-get >/dev/null || die "no Docker engine runs here, and without apt-get none can be fetched; start one"
    mkdir -p "$cache/debs/partial"
    apt-cache show docker.io >/dev/null 2>&1 || apt-get update -qq
    # --reinstall: also those that the machine has installed, but not running, are wanted as files.
    apt-get install -qq --no-install-recommends --download-only --reinstall \
        -o "Dir::Cache::archives=$cache/debs" docker.io containerd runc iptables debootstrap >/dev/null
    local deb
    for deb in "$cache"/debs/*.deb; do dpkg-deb --extract "$deb" "$cache/engine"; done
    ln -sf xtables-legacy-multi "$cache/engine/usr/sbin/iptables"
    ln -sf xtables-legacy-multi "$cache/engine/usr/sbin/ip6tables"
    rm -r "$cache/debs"
}

engine_environment() { # for the commands that come out of the packages
    export PATH="$cache/engine/usr/sbin:$cache/engine/usr/bin:$PATH:/usr/sbin:/sbin"
    LD_LIBRARY_PATH=$cache/engine/usr/lib/$(uname -m)-linux-gnu
    XTABLES_LIBDIR=$LD_LIBRARY_PATH/xtables
    export LD_LIBRARY_PATH XTABLES_LIBDIR
}

engine_start() { # sets DOCKER_HOST and engine_pid; the images live in $scratch
    [ "$(id -u)" = 0 ] || die "no Docker engine answers, and only root can start one: start Docker, or run this as root"
    engine_packages
    engine_socket=$(mktemp -d)/docker.sock # a short path: that of a socket may have 107 characters
    export DOCKER_HOST="unix://$engine_socket" PATH="$cache/engine/usr/bin:$PATH"
    # In a session of its own, Ctrl-C does not reach it. If this script dies without a word, so does unshare, and with
    # it the first process of the PID namespace.
    ( engine_environment
      exec setsid setpriv --pdeathsig KILL unshare --fork --kill-child --pid --mount --mount-proc --net --ipc --uts \
          "$BASH" -c "$(declare -f engine_inside); engine_inside '$scratch' '$engine_socket'" ) >"$scratch/dockerd.log" 2>&1 &
    engine_shell=$!
    local waited=0
    until docker info >/dev/null 2>&1; do
        kill -0 "$engine_shell" 2>/dev/null && [ $((waited += 1)) -le 60 ] || {
            tail -n 20 "$scratch/dockerd.log" >&2
            die "Debian's Docker engine did not come up within 30 s"
        }
        sleep 0.5
    done
    engine_pid=$(pgrep -P "$engine_shell" -f dockerd)
}

from_host() { # run a command where published ports are reached
    [ "${engine_pid:-}" ] && set -- nsenter --target "$engine_pid" --net "$@"
    "$@"
}

engine_inside() { # SCRATCH SOCKET: the first process in the namespaces
    ip link set lo up
    mount -t tmpfs tmpfs /run
    [[ $1 == /opt/* ]] || mount -t tmpfs tmpfs /opt # containerd makes a folder there
    echo '{"deprecated-key-path": "'"$1"'/key.json"}' >"$1/daemon.json"
    exec dockerd --config-file "$1/daemon.json" --host "unix://$2" --data-root "$1/data" \
        --exec-root /run/docker --pidfile /run/docker.pid --cgroup-parent /triptych-compose-test
}

engine_stop() {
    [ -n "${engine_shell:-}" ] || return 0
    local waited=0
    kill -TERM "${engine_pid:-$engine_shell}" 2>/dev/null || true
    # dockerd ends its containers within 10 s; whatever is left after 20 s dies with the namespace.
    while kill -0 "$engine_shell" 2>/dev/null && [ $((waited += 1)) -le 100 ]; do sleep 0.2; done
    kill -KILL "$engine_shell" 2>/dev/null || true
    wait "$engine_shell" 2>/dev/null || true
    rm -rf "${engine_socket%/*}"
    find /sys/fs/cgroup -depth -type d -path '*/triptych-compose-test*' -exec rmdir {} + 2>/dev/null || true
    engine_shell=
}
