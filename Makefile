# Everything happens in .venv, which the first target that needs it makes. Needs Python 3.11+, make and gcc.

PYTHON ?= python3
BIN := .venv/bin
# What `text-generation-launcher` is given by `make run`, e.g. make run ARGS="--model-id ./my-model --port 8080".
ARGS ?=
# The GPU check runs from .gpu/, on a machine whose Python and processor these are.
GPU_PYTHON ?= 3.12
GPU_ARCHITECTURE ?= x86_64
# What our own processes import and torch, transformers, grpcio, protobuf and prometheus_client do not bring.
GPU_PACKAGES := fastapi httptools httpx orjson uvicorn uvloop
CODE := benchmark clients/python integration-tests launcher router server hatch_build.py

.PHONY: install run test check proto fuzz bench bench-peers gpu-wheels gpu-check chaos test-clients clean

install: .venv/installed

# torch goes first and exactly, so that everybody has the build the tests were run with.
.venv/installed: pyproject.toml hatch_build.py proto/generate.proto
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

run: install
	$(BIN)/text-generation-launcher $(ARGS)

test: install
	$(BIN)/pytest $(ARGS)

check: install
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy benchmark/text_generation_benchmark clients/python/text_generation launcher/text_generation_launcher \
		router/text_generation_router server/text_generation_server

# The scheduler's and the prefix cache's state machines, 100,000 steps and more of each.
fuzz: install
	$(BIN)/pytest router/text_generation_router/scheduling/tests/test_scheduler_machine.py \
		router/text_generation_router/scheduling/tests/test_prefix_cache.py --hypothesis-profile=fuzz $(ARGS)

# The stubs are made whenever the package is built or installed; this makes them again.
proto: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .

# Prints tokens per second beside the peers that are there, and writes the table into benchmark/README.md.
bench: install
	$(BIN)/text-generation-benchmark compare --write benchmark/README.md $(ARGS)

# The peers, each in a virtual environment of its own. llama.cpp is compiled: cmake and some minutes.
bench-peers: .venv-vllm/installed .venv-llama-cpp/installed

.venv-%/installed: benchmark/text_generation_benchmark/peers/install.py | install
	$(BIN)/python -m text_generation_benchmark.peers.install $* .venv-$*
	touch $@

# What a machine without a network lacks, unpacked, and the stubs: take .gpu/ there, and run gpu-check.
gpu-wheels: install
	rm -rf .gpu
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --target .gpu/site --only-binary=:all: \
		--implementation cp --python-version $(GPU_PYTHON) --platform manylinux_2_28_$(GPU_ARCHITECTURE) \
		--platform manylinux2014_$(GPU_ARCHITECTURE) $(GPU_PACKAGES)
	cp -R proto/text_generation_proto .gpu/site/
	rm -rf .gpu/site/bin .gpu/site/text_generation_proto/__pycache__
	du -sh .gpu

# Kernels, speed and the whole server on a GPU, into benchmark/results/, or a rehearsal without one. Installs nothing.
gpu-check:
	PYTHONPATH=$(CURDIR)/.gpu/site:$(CURDIR)/benchmark:$(CURDIR)/launcher:$(CURDIR)/router:$(CURDIR)/server \
		$(PYTHON) -m text_generation_benchmark.gpu.check $(ARGS)

# Kills, stops and starves a server under 64 streams, and writes what its clients noticed into integration-tests/README.md.
chaos: install
	$(BIN)/python integration-tests/chaos.py --write integration-tests/README.md $(ARGS)

# The official clients, each in a virtual environment of its own, against a server on the demo model.
test-clients: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python integration-tests/clients/run_clients.py

clean:
	rm -rf .venv .venv-* .gpu build dist proto/text_generation_proto .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
