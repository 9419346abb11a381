# shellcheck shell=bash disable=SC2154
# `make compose-test MULTI=1`: the cluster as a stack over two hosts. Each host is an engine of our own (engine.sh) with a
# network of its own; a cable (a pair of veth interfaces) joins them, and goes with them. Sourced by test.sh.

on_other() { DOCKER_HOST="unix://${engine_sockets[1]}" "$@"; }

in_network_of() { nsenter --target "${engine_pids[$1]}" --net "${@:2}"; }

join_hosts() { # starts the second host, gives it the images, makes both a swarm; DOCKER_HOST stays the manager
    local manager=$DOCKER_HOST number
    engine_start "$scratch/other"
    export DOCKER_HOST=$manager
    docker save "triptych-broker:$TRIPTYCH_TAG" "triptych-proxy:$TRIPTYCH_TAG" "triptych-worker:$TRIPTYCH_TAG" | on_other docker load --quiet >/dev/null
    # The next version, for the rolling update: the same image under another tag.
    docker tag "triptych-worker:$TRIPTYCH_TAG" "triptych-worker:$TRIPTYCH_TAG-next"
    on_other docker tag "triptych-worker:$TRIPTYCH_TAG" "triptych-worker:$TRIPTYCH_TAG-next"
    ip link add cable netns "${engine_pids[0]}" type veth peer name cable netns "${engine_pids[1]}"
    for number in 0 1; do
        in_network_of $number ip address add "192.168.99.$((number + 1))/24" dev cable
        in_network_of $number ip link set cable up
    done
    docker swarm init --advertise-addr 192.168.99.1 >/dev/null
    on_other docker swarm join --token "$(docker swarm join-token --quiet worker)" 192.168.99.1:2377
    docker node ls --format 'table {{.Hostname}}\t{{.Status}}\t{{.ManagerStatus}}\t{{.EngineVersion}}'
}

deploy_stack() { # as docs/deploy/swarm.md tells it
    { echo 'version: "3.9"'
      compose --file docker-compose.stack.yml config 2>"$scratch/config.log" |
          sed -e '/^name:/d' -e 's/published: "\([0-9]*\)"/published: \1/'
    } | docker stack deploy --resolve-image never --compose-file - "$project" 2>&1 | grep -v '^Ignoring'
}

whole() { # as many tasks run as the services want; `service ls` counts those of a dead host, too, as running
    local wanted running
    wanted=$(docker service ls --format '{{.Replicas}}' | awk -F / '{ wanted += $2 } END { print wanted }')
    running=$(docker stack ps --filter desired-state=running --format '{{.CurrentState}}' "$project" | grep -c ^Running)
    [ "$running" = "$wanted" ]
}

await_replicas() { # until all tasks run, that is are healthy
    local began_s=$SECONDS
    until whole; do
        [ $((SECONDS - began_s)) -le 300 ] || { docker stack ps --no-trunc "$project" >&2; die "the stack is not whole after 300 s"; }
        sleep 0.5
    done
    docker stack ps --filter desired-state=running --format '{{.Name}} {{.Node}} {{.Image}}' "$project" | sort | sed "s/${project}_//" | column -t
}

inside() { # run a module of tools/ in the stack's network, with the proxy's image
    docker run --rm --network "${project}_default" --env TRIPTYCH_MODEL --env TRIPTYCH_CLUSTER_KEY --env TRIPTYCH_API_KEY \
        --env "TRIPTYCH_BROKER=redis://:$TRIPTYCH_BROKER_PASSWORD@broker:6379" --volume "$PWD/tools:/checks/tools:ro" \
        --volume "$signs:/signs" --workdir /checks --entrypoint python "triptych-proxy:$TRIPTYCH_TAG" \
        -m "tools.compose.$1" "${@:2}"
}

update() { # ROLE ARGUMENT…: replace the tasks one after the other; returns when all are
    docker service update --quiet --no-resolve-image "${@:2}" "${project}_$1" >/dev/null
}

pin_roles() { # encoders and decode workers on one host, prefill workers on the other
    update encoder --constraint-add node.hostname==host-1
    update prefill --constraint-add node.hostname==host-2
    update decode --constraint-add node.hostname==host-1
    await_replicas
}

unpin_and_upgrade() {
    local role
    for role in encoder prefill decode; do
        update "$role" --image "triptych-worker:$TRIPTYCH_TAG-next" \
            --constraint-rm node.hostname==host-1 --constraint-rm node.hostname==host-2
    done
    await_replicas
}

cable_bytes() { in_network_of 0 awk '$1 == "cable:" { print $2 + $10 }' /proc/net/dev; } # received and sent

spread() { # one task of each role to each host: Swarm moves none that runs, but gives a new one to the emptier host
    local roles=("${project}_encoder" "${project}_prefill" "${project}_decode")
    docker service scale --detach=false "${roles[@]/%/=1}" >/dev/null
    docker service scale --detach=false "${roles[@]/%/=2}" >/dev/null
    await_replicas
}

kill_host() { # with all that runs on it: its first process is the engine
    local began_s=$SECONDS
    kill -KILL "${engine_pids[1]}"
    until [ "$(docker node inspect --format '{{.Status.State}}' host-2)" = down ]; do sleep 0.2; done
    echo "host-2 is killed; noticed after $((SECONDS - began_s)) s"
    while docker stack ps --filter desired-state=running --format '{{.Node}}' "$project" | grep -q host-2; do sleep 0.2; done
    await_replicas
    echo "whole again after $((SECONDS - began_s)) s"
}

test_swarm() {
    local before
    export TRIPTYCH_ENCODERS=2 TRIPTYCH_PREFILLS=2 TRIPTYCH_DECODES=2 TRIPTYCH_PREFILL_DECODES=0
    step "two hosts, one swarm"
    join_hosts

    step "the stack"
    deploy_stack
    await_replicas

    step "encoders and decode workers move to one host, prefill workers to the other"
    pin_roles
    inside endpoints "${scaled[@]}"

    step "so every tensor crosses from host to host: 32 questions"
    before=$(cable_bytes)
    inside asking 32 160 | tee "$scratch/crossed.txt"
    before=$(($(cable_bytes) - before))
    moved=$(sed -n 's/.*handoff_bytes \([0-9]*\).*/\1/p' "$scratch/crossed.txt")
    echo "over the cable went $before bytes"
    [ "${moved:-0}" -gt 0 ] && [ "$before" -gt "$moved" ] || die "the keys and values of ${moved:-no} bytes took another way"

    step "under load, all workers are upgraded and spread over both hosts again"
    amid_questions 32 40 unpin_and_upgrade
    inside endpoints "${scaled[@]}"

    step "one worker of each role on each host"
    spread
    inside endpoints "${scaled[@]}"

    step "a host is killed in the middle of streams"
    amid_questions 6 900 kill_host | tee "$scratch/killed.txt"
    grep -q ' [1-9][0-9]* moved' "$scratch/killed.txt" || die "the kill met no stream"
    inside endpoints "${scaled[@]}"
    inside asking 32 160
}
