# Everything happens in .venv, which the first target that needs it makes. Needs Python 3.11+, make and gcc.

PYTHON ?= python3
BIN := .venv/bin
# What `text-generation-launcher` is given by `make run`, e.g. make run ARGS="--model-id ./my-model --port 8080".
ARGS ?=
CODE := benchmark clients/python integration-tests launcher router server hatch_build.py

.PHONY: install run test check proto bench chaos test-clients clean

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

# The stubs are made whenever the package is built or installed; this makes them again.
proto: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .

# Prints tokens per second beside transformers, and writes the table into benchmark/README.md.
bench: install
	$(BIN)/text-generation-benchmark compare --write benchmark/README.md

# Kills, stops and starves a server under 64 streams, and writes what its clients noticed into integration-tests/README.md.
chaos: install
	$(BIN)/python integration-tests/chaos.py --write integration-tests/README.md $(ARGS)

# The official clients, each in a virtual environment of its own, against a server on the demo model.
test-clients: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python integration-tests/clients/run_clients.py

clean:
	rm -rf .venv .venv-* build dist proto/text_generation_proto .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
