# All tools live in .venv; the first target that needs .venv makes it. Needs Python 3.11+, make and gcc. `make run` installs
# what serving needs, every target for developers installs what tests need, too.

PYTHON ?= python3
BIN := .venv/bin
# PyTorch's index of builds for CPUs. A machine without an NVIDIA driver takes torch from here, if the index answers within
# TORCH_WAIT_S seconds. The default index has torch with CUDA, which is several GiB larger.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_WAIT_S := 5
# Files that an NVIDIA driver makes, on Linux and on WSL.
NVIDIA_DRIVER := $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so*)
# Arguments that `make run` passes to `text-generation-launcher`, e.g. make run ARGS="--model-id ./my-model --port
# 8080".
ARGS ?=
# The GPU check runs from .gpu/, on a machine with this version of Python and this processor architecture.
GPU_PYTHON ?= 3.12
GPU_ARCHITECTURE ?= x86_64
# Packages that our own processes and tests import, and that torch, transformers, grpcio, protobuf and prometheus_client
# do not install (test_gpu_packages.py).
GPU_PACKAGES := httptools httpx llguidance orjson pytest pytest-xdist starlette uvicorn uvloop
# The environment in which vLLM reads calls, for test-peer-parsers.
VLLM_PYTHON ?= .venv-vllm/bin/python
# The checkout that bench-guard compares this one with, after a `make install` in it.
BEFORE ?= ../before
PACKAGES := benchmark clients common router server tools
QUIET := --quiet --disable-pip-version-check
LOCK := .venv/tools/bin/uv pip compile --quiet --universal --upgrade --python-version 3.11 --generate-hashes --no-config \
	--no-header
AUDIT := .venv/tools/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off
LOCKED := --require-hashes --no-deps
PIP_INSTALL = $(BIN)/pip install $(QUIET) --no-compile
# The packages of $(BIN), as a pattern for the shell.
SITE = $(BIN)/../lib/python3*/site-packages
OWN_PACKAGES := $(addsuffix /text_generation*,benchmark clients/python common launcher proto router server)
# Prints every 3 s how long a recipe has run, the size of .venv, the step, and the newest file or folder. Downloads and the
# compiler's files lie in .venv/tmp meanwhile. The loop ends with the shell that has started it.
PROGRESS := rm -rf .venv/tmp; mkdir -p .venv/tmp; export TMPDIR='$(CURDIR)/.venv/tmp'; started=$$(date +%s); \
	while sleep 3 >/dev/null 2>&1; kill -0 $$$$ 2>/dev/null; do \
		newest=$$(ls -td .venv/tmp/*/*.whl .venv/tmp/*/*.o .venv/lib/python3*/site-packages/* 2>/dev/null | head -n 1); \
		echo "$$(($$(date +%s) - started)) s, $$(du -sm .venv 2>/dev/null | cut -f 1) MiB in .venv:" \
			"$$(tail -n 1 .venv/tmp/step 2>/dev/null) ($$(basename "$$newest"))"; \
	done & trap "kill $$!" EXIT; set -e;
# Prints what an installation does next.
STEP = @mkdir -p .venv/tmp; echo "$(1)" | tee .venv/tmp/step
# For the parts of an installation, which are targets of their own because two of them run at the same time.
QUIETLY := --no-print-directory
# Build tools lie in a folder of their own, because building and running need different versions of protobuf. -S hides the
# packages of .venv, which are installed at the same time.
BUILD := PYTHONPATH=.venv/build $(BIN)/python -S -m hatchling build
# Files and folders whose comments, docstrings and messages must pass tools/prose: `make check` refuses findings in them.
PLAIN := .ci ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md Makefile README.md benchmark clients/python common deploy docs \
	hatch_build.py integration-tests launcher monitoring proto pyproject.toml requirements router server tools
CODE := benchmark clients/python common deploy integration-tests launcher router server tools hatch_build.py conftest.py
CPU_KERNELS := server/text_generation_server/kernels/cpu
C_CODE := $(wildcard $(CPU_KERNELS)/csrc/*.[ch])

# What hatch_build.py makes the gRPC stubs, the CPU kernels and the package's metadata of.
BUILD_INPUTS := pyproject.toml hatch_build.py clients/python/text_generation/__init__.py $(wildcard proto/*.proto) \
	$(C_CODE) $(CPU_KERNELS)/build.py common/text_generation_common/cpu_features.py

GRAMMAR_TESTS := router/text_generation_router/text/grammars/tests

.PHONY: install install-test torch editable test-packages kernels run test test-wheel test-image test-models test-schema test-grammars check format prose rooms proto lock sbom audit fuzz fuzz-grammars fuzz-files fuzz-formats fixtures-quantized fixtures-gguf gguf-quality gguf-texts demo-model test-demo-model bench bench-guard bench-peers \
	gpu-wheels gpu-check compile-gpu chaos blinks test-cluster test-fronts test-page test-ray attacks neighbours digest test-routes mutate fuzz-bodies test-slow test-clients test-served-calls fetch-templates test-peer-parsers goldens-peft test-adapters test-int-texts test-kept clean

# What serving needs, with the kernels for this machine's processor. Every file is checked against the hashes in requirements/
# (see requirements/README.md), torch excepted.
install: .venv/installed

.venv/installed: requirements/run.txt requirements/torch.txt requirements/build.txt $(BUILD_INPUTS)
	@$(PROGRESS) $(MAKE) $(QUIETLY) .venv/build/packages; \
		$(MAKE) $(QUIETLY) --jobs 2 .venv/packages .venv/wheels/built; \
		$(MAKE) $(QUIETLY) editable; \
		rm -rf .venv/tmp
	@touch $@

.venv/bin/pip:
	$(call STEP,A virtual environment in .venv)
	@$(PYTHON) -m venv .venv

.venv/build/packages: requirements/build.txt | .venv/bin/pip
	$(call STEP,Packages of requirements/build.txt: 35 MiB)
	@rm -rf .venv/build
	@$(PIP_INSTALL) $(LOCKED) --target .venv/build --requirement requirements/build.txt
	@touch $@

.venv/packages: requirements/run.txt requirements/torch.txt | .venv/bin/pip
	$(call STEP,Packages of requirements/run.txt: 260 MiB)
	@$(PIP_INSTALL) $(LOCKED) --requirement requirements/run.txt
	@$(MAKE) $(QUIETLY) torch
	@touch $@

# Installs torch, unless this version is there, and prints which build it is.
torch:
	$(call STEP,$$(cat requirements/torch.txt): 700 MiB as a build for CPUs; several GiB with CUDA)
	@ls -d $(SITE)/$$(sed "s/==/-/" requirements/torch.txt)[.+]*dist-info >/dev/null 2>&1 || \
		$(if $(NVIDIA_DRIVER),,{ $(TORCH_INDEX_ANSWERS) && $(TORCH_FOR_CPUS); } || { echo $(TORCH_ELSEWHERE); false; } ||) \
		$(PIP_INSTALL) --requirement requirements/torch.txt
	@$(PRINT_TORCH)

TORCH_INDEX_ANSWERS = (exec $(BIN)/python -c "import signal, urllib.request; signal.alarm($(TORCH_WAIT_S)); \
	urllib.request.urlopen('$(TORCH_INDEX)/torch/').read(1)") 2>/dev/null
TORCH_ELSEWHERE = "$(TORCH_INDEX) gives no torch: pip takes it from its default index, with CUDA"
TORCH_FOR_CPUS = $(PIP_INSTALL) --index-url $(TORCH_INDEX) --no-deps --requirement requirements/torch.txt
TORCH_HAS_CUDA = grep -q "^cuda.* = '" $(SITE)/torch/version.py
PRINT_TORCH = version=$$(sed -n "s/^__version__ = '\(.*\)'/\1/p" $(SITE)/torch/version.py); \
	size=$$(du -cm $(SITE)/torch $(SITE)/nvidia $(SITE)/triton 2>/dev/null | tail -n 1 | cut -f 1); \
	if ! $(TORCH_HAS_CUDA); then what="without CUDA"; \
	elif [ -n "$(NVIDIA_DRIVER)" ]; then what="with CUDA"; \
	else what="with CUDA, for which this machine has no driver; for the smaller build: make clean install TORCH_INDEX=URL, \
	where URL is an index of torch for CPUs that this machine can reach"; fi; \
	echo "torch $$version: $$size MiB, $$what"

# The gRPC stubs and the kernels for this processor, and a wheel that makes Python find the packages of this checkout.
.venv/wheels/built: $(BUILD_INPUTS) .venv/build/packages
	@echo "Kernels for this processor, from C" | tee -a .venv/tmp/step
	@rm -rf .venv/wheels
	@$(BUILD) --target wheel:editable --directory .venv/wheels
	@touch $@

editable:
	$(call STEP,The package itself)
	@$(PIP_INSTALL) --no-deps --force-reinstall .venv/wheels/*.whl
	$(call STEP,Bytecode of what a server imports: 100 MiB)
	@$(BYTECODE) -x $(UNUSED_IN_A_START) $(SITE) $(OWN_PACKAGES) || :

BYTECODE = $(BIN)/python -m compileall -qq -j 0
# Half of all code that is installed. Python compiles a file of it when a program imports it first.
UNUSED_IN_A_START = '/(tests|transformers/models|torch/(_inductor|_dynamo|onnx)|sympy|networkx|pip|setuptools)/'

# What tests and developers need beside that, and the kernels for every kind of processor.
install-test: .venv/installed-test

.venv/installed-test: .venv/installed requirements/test.txt
	@$(PROGRESS) $(MAKE) $(QUIETLY) --jobs 2 test-packages kernels; \
		rm -rf .venv/tmp
	@touch $@

# A torch with CUDA has a pin of triton, which may be another than that of test.txt; its own one stays.
test-packages:
	$(call STEP,Packages of requirements/test.txt: 1500 MiB)
	@$(PIP_INSTALL) $(LOCKED) --requirement requirements/test.txt
	@! $(TORCH_HAS_CUDA) || $(PIP_INSTALL) --requirement requirements/torch.txt
	$(call STEP,Bytecode of all packages)
	@$(BYTECODE) -x /tests/ $(SITE) || :

# The kernels for every kind of processor; `make install` compiles those for this machine's only.
kernels: install
	@$(BIN)/python $(CPU_KERNELS)/build.py

.venv/tools/installed: requirements/tools.txt | install
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install $(QUIET) $(LOCKED) --requirement requirements/tools.txt
	touch $@

run: install
	$(BIN)/text-generation-launcher $(ARGS)

# All tests, in parts (integration-tests/all_tests.py): packages, whole servers and launcher in three processes, and then alone
# those that a busy machine would fail. Prints the seconds of each part and the 40 slowest tests. With ARGS pytest
# gets these, and runs in one process. Before all tests, code that has changed since the installation is compiled once: where
# PYTHONDONTWRITEBYTECODE is set, each process of each server would compile it again.
test: install-test
ifeq ($(ARGS),)
	@$(BYTECODE) -x $(UNUSED_IN_A_START) $(OWN_PACKAGES) || :
	$(BIN)/python integration-tests/all_tests.py $(PACKAGES)
else
	$(BIN)/pytest $(ARGS)
endif

# Builds a wheel, installs it with what serving needs into an environment of its own, asks its demo model, and checks that pip
# finds versions of all packages that the wheel asks for.
test-wheel: install-test
	rm -rf build/wheel
	$(BUILD) --target wheel --directory build/wheel
	@case $$(ls build/wheel) in *-any.whl) echo "the wheel has no compiled kernels: its tag names no platform"; exit 1;; esac
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install $(QUIET) --no-compile $(LOCKED) --requirement requirements/run.txt
	$(MAKE) $(QUIETLY) torch BIN=build/wheel/venv/bin
	build/wheel/venv/bin/pip install $(QUIET) --no-deps build/wheel/*.whl
	build/wheel/venv/bin/pip check
	cd / && "$(CURDIR)/$(BIN)/python" "$(CURDIR)/integration-tests/ask_installed.py" "$(CURDIR)/build/wheel/venv"
	build/wheel/venv/bin/pip install $(QUIET) --dry-run --ignore-installed build/wheel/*.whl

# Executes the lines of deploy/Dockerfile in changed roots of Debian, and serves the demo model from the result: as root, with
# debootstrap on the PATH. What pip needs of this machine: ARGS="--bind /etc/pip.conf --env PIP_INDEX_URL".
test-image: install-test
	$(BIN)/python integration-tests/prove_image.py $(ARGS)

# All tests of models: an hour and more. Writes their results into docs/models.md, also those of a part: ARGS="-k bloom".
# Results of the other tests stay. ARGS=--missing runs those that have not passed; ARGS=--collect-only runs none, and
# writes the page anew.
test-models: install-test
	$(BIN)/python server/text_generation_server/tests/make_models_page.py $(ARGS)

check: install-test
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy benchmark/text_generation_benchmark clients/python/text_generation common/text_generation_common \
		launcher/text_generation_launcher router/text_generation_router server/text_generation_server \
		tools/demo_model tools/gpu_check tools/mutation tools/prose tools/rooms tools/vendored
	$(BIN)/lint-imports --no-cache --no-logo
	PYTHONPATH=tools $(BIN)/python -m prose $(PLAIN)
	PYTHONPATH=tools $(BIN)/python -m rooms --check
	$(BIN)/clang-format --dry-run -Werror $(C_CODE)
	$(BIN)/python $(CPU_KERNELS)/build.py --check

format: install-test
	$(BIN)/ruff format $(CODE)
	$(BIN)/clang-format -i $(C_CODE)

# Findings in every file; ARGS="--counts" counts them; ARGS="--sample 100" draws 100 comments and docstrings to read.
prose: install-test
	PYTHONPATH=tools $(BIN)/python -m prose $(ARGS)

# What each room of the code uses of its budget in pyproject.toml, and the length of the spine (tools/rooms/spine.txt).
rooms: install-test
	PYTHONPATH=tools $(BIN)/python -m rooms $(ARGS)

# Runs the state machine tests of the scheduler and of the prefix cache, 100,000 steps or more each.
fuzz: install-test
	$(BIN)/pytest router/text_generation_router/scheduling/tests/test_scheduler_machine.py \
		router/text_generation_router/scheduling/memory/tests/test_prefix_cache.py \
		router/text_generation_router/text/calls/tests/test_mutated_texts.py --hypothesis-profile=fuzz $(ARGS)

# Odd grammars, schemas and tools at random: 50,000 are compiled in children, others by a whole server, which follows 2,000 of
# those that compile. Prints the seed; another one: ARGS="--seed 7". About 9 minutes.
fuzz-grammars: install-test
	$(BIN)/python integration-tests/fuzz_grammars.py $(ARGS)

# Odd tokenizers and chat templates at random: what the check of a start takes costs a router little. Prints the seed; another
# one: ARGS="--seed 7". About 2 minutes.
fuzz-files: install-test
	$(BIN)/python integration-tests/fuzz_files.py $(ARGS)

# Quantized layers with random changes of settings and tensors, and GGUF files with changed headers: each is read, or
# refused in one line. What is read, and blocks of random bytes, is then multiplied by the kernels of every target. Other
# ones: ARGS="COUNT SEED". About five minutes.
fuzz-formats: install-test
	cd common/text_generation_common/gguf/tests && $(abspath $(BIN))/python test_hostile_headers.py $(or $(ARGS),20000 1)
	cd common/text_generation_common/quantized/tests && $(abspath $(BIN))/python test_fuzz.py $(or $(ARGS),20000 1)
	PYTHONPATH=common/text_generation_common/quantized/tests:server/text_generation_server/tests \
		$(BIN)/python server/text_generation_server/layers/tests/test_fuzzed_codes.py $(or $(ARGS),20000 1)

# Quantized layers as the formats' own libraries write them, into common/text_generation_common/quantized/tests/goldens. The libraries
# get an environment of their own, .venv-quantizers. Some files only: ARGS="awq modelopt"
fixtures-quantized: install-test .venv-quantizers/installed
	.venv-quantizers/bin/python common/text_generation_common/quantized/tests/make_goldens.py $(ARGS)

.venv-quantizers/installed: requirements/torch.txt
	$(PYTHON) -m venv .venv-quantizers
	.venv-quantizers/bin/pip install --quiet --requirement requirements/torch.txt setuptools wheel transformers accelerate \
		compressed-tensors bitsandbytes auto-round nvidia-modelopt
	.venv-quantizers/bin/pip install --quiet --no-deps --no-build-isolation autoawq
	touch $@

# What llama.cpp's own converter makes of a model of each architecture, written into gguf_goldens.json. LLAMA: the folder of
# llama.cpp's source, which is in a package: pip download --no-binary :all: --no-deps llama-cpp-python. Other ones: ARGS=FIXTURE
fixtures-gguf: install-test
	PYTHONPATH=common/text_generation_common/gguf/tests $(BIN)/python server/text_generation_server/tests/make_gguf_goldens.py $(LLAMA) $(ARGS)

# What llama.cpp and this server compute of files that llama.cpp has quantized: about five minutes. Needs
# .venv-llama-cpp (make bench-peers), or another environment: ARGS="--llama FOLDER".
gguf-quality: install-test
	PYTHONPATH=server/text_generation_server/tests:tools $(BIN)/python integration-tests/gguf_quality.py $(ARGS)

# 10,000 texts in tokens, by llama.cpp and by this server. LLAMA: as for fixtures-gguf. Needs .venv-llama-cpp, too.
gguf-texts: install-test
	$(BIN)/python integration-tests/gguf_texts.py $(LLAMA) $(ARGS)

# Sends 2,000 cases to each route, made of the OpenAPI document, valid and invalid ones; checks status and body.
test-schema: install-test
	$(BIN)/pytest router/text_generation_router/openapi/tests/test_cases.py --hypothesis-profile=schema $(ARGS)

# Sends 20,000 valid bodies with random changes to a server, and checks every answer. Prints the seed; ARGS="--seed 7
# --count 1000" sends others.
fuzz-bodies: install-test
	$(BIN)/python integration-tests/mutants.py $(ARGS)

# Grammars: 300 JSON schemas followed at random and by the demo model at temperature 1, and the JSON-Schema-Test-Suite, which
# is in the source package of jsonschema. Where schemas are treated otherwise than the suite says is in standard_suite.tsv;
# ARGS=--write writes it anew.
test-grammars: install-test
	rm -rf build/jsonschema && mkdir -p build/jsonschema
	$(BIN)/pip download $(QUIET) --no-deps --no-binary jsonschema --dest build/jsonschema \
		"jsonschema==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jsonschema"))')"
	tar --extract --gzip --strip-components 1 --directory build/jsonschema --file build/jsonschema/*.tar.gz
	$(BIN)/python -m text_generation_router.text.grammars.tests.standard_suite build/jsonschema/json/tests \
		$(GRAMMAR_TESTS)/standard_suite.tsv $(ARGS)
	ALL_SCHEMAS=1 $(BIN)/pytest -s $(GRAMMAR_TESTS)/test_schemas_followed.py
	$(BIN)/python integration-tests/follow_schemas.py

# Makes 500 small changes (mutants) of the code, drawn by a seed, and prints which of them the tests notice. Takes
# hours. E.g. ARGS="--room worker".
mutate: install-test
	PYTHONPATH=tools $(BIN)/python -m mutation $(ARGS)

# Trains the demo model anew, from a seed, and writes it into a folder: an hour or more. E.g. ARGS=./my-demo-model
demo-model: install-test
	PYTHONPATH=tools $(BIN)/python -m demo_model.train $(ARGS)

# Asks the served demo model 80 questions that a tool fits and 20 that none fits; `make test` asks fewer.
test-demo-model: install-test
	$(BIN)/pytest integration-tests/test_demo_model.py -m "figures or not figures" $(ARGS)

# The stubs are made whenever the package is built or installed; this makes them again.
proto: install-test
	$(BUILD) --target wheel:editable --directory .venv/wheels

# Takes the newest versions that pyproject.toml allows into requirements/*.txt; look at the difference and run the tests.
lock: .venv/tools/installed
	$(LOCK) --extra transformers --overrides requirements/without-torch.in pyproject.toml requirements/torch-needs.in \
		--output-file requirements/run.txt
	$(LOCK) --extra test --overrides requirements/without-torch.in pyproject.toml requirements/torch-needs.in \
		--constraint requirements/run.txt --output-file requirements/test.txt
	$(LOCK) requirements/build.in --output-file requirements/build.txt
	$(LOCK) requirements/tools.in --output-file requirements/tools.txt

# Bills of materials as CycloneDX JSON: of .venv with the packages for tests, and of what serving needs.
sbom: .venv/tools/installed install-test
	mkdir -p dist
	.venv/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/sbom.cdx.json $(BIN)/python
	cat requirements/run.txt requirements/torch.txt | .venv/tools/bin/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file dist/sbom-run.cdx.json -

# Fails when a package's version is known to be vulnerable, or when the advisory database does not answer for a package.
audit: .venv/tools/installed
	for lock in run test build tools; do $(AUDIT) --requirement requirements/$$lock.txt || exit; done
	$(AUDIT) --requirement requirements/torch.txt

# Measures this version and the one in the checkout $(BEFORE) in turns, three minutes long, and fails if this one is more
# than 5 % slower.
bench-guard: install-test
	$(BIN)/text-generation-benchmark turns --guard --before $(BEFORE) $(ARGS)

# Prints tokens per second of the server and of the installed peers, and writes the table into benchmark/README.md.
bench: install-test
	$(BIN)/text-generation-benchmark compare --write benchmark/README.md $(ARGS)

# The peers, each in a virtual environment of its own. llama.cpp is compiled for this machine's processor, which takes 15
# minutes on two cores that nothing else uses, and a C++ compiler.
bench-peers: .venv-vllm/installed .venv-llama-cpp/installed

.venv-%/installed: benchmark/text_generation_benchmark/peers/install.py | install-test
	$(BIN)/python -m text_generation_benchmark.peers.install $* .venv-$*
	touch $@

# Collects in .gpu/ the Python packages (unpacked) and the gRPC stubs that a machine without a network lacks. Copy .gpu/
# there and run gpu-check.
gpu-wheels: install-test
	rm -rf .gpu
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --target .gpu/site --only-binary=:all: \
		--implementation cp --python-version $(GPU_PYTHON) --platform manylinux_2_28_$(GPU_ARCHITECTURE) \
		--platform manylinux_2_31_$(GPU_ARCHITECTURE) --platform manylinux2014_$(GPU_ARCHITECTURE) $(GPU_PACKAGES)
	cp -R proto/text_generation_proto .gpu/site/
	rm -rf .gpu/site/bin .gpu/site/text_generation_proto/__pycache__
	du -sh .gpu
	@test "$$(du -sm .gpu | cut -f1)" -le 48 || { echo ".gpu is larger than 48 MiB: with the checkout it must stay below 64"; false; }

# What is left of the tests on a GPU, in at most 540 s: call it again until nothing is left (docs/gpu.md). Without a GPU: a
# rehearsal. Results go to the folder $OUT, or to benchmark/results/. Installs nothing.
gpu-check:
	PYTHONPATH=$(subst $() ,:,$(addprefix $(CURDIR)/,.gpu/site benchmark common launcher router server tools)) \
		$(PYTHON) -m gpu_check $(ARGS)

# Attention with every tile that the tuner may choose, and with all options that served models use together, compiled for
# GPUs that need not be there: hours on two cores. A part of it: ARGS="--capability 90 --dtype bfloat16 --cache same int8
# --head-size 128", or ARGS="--tables --plain"
compile-gpu: install-test
	$(BIN)/python -m text_generation_server.kernels.triton.compile_all $(ARGS)

# Kills, stops and starves a server under 64 streams, and writes what its clients noticed into integration-tests/README.md.
chaos: install-test
	$(BIN)/python integration-tests/chaos.py --write integration-tests/README.md $(ARGS)

# How long streams pause when shards or engines are killed, and what they lose in speed, with the targets, written into
# integration-tests/README.md: an hour for each model and number of shards. A part of it: ARGS="--minutes 4 --models m100
# --shards 1 --victims engine".
blinks: install-test
	$(BIN)/python integration-tests/blinks.py --write integration-tests/README.md $(ARGS)

# Three replicas on machines that Ray chooses, which are network namespaces of this one (as root, with iproute2 and
# redis-server), under 64 streams and faults of all kinds; then Ray's head is away for five minutes; then requests that kill
# whatever computes them. Writes the tables in integration-tests/README.md. More than an hour. A part of it: ARGS="--faults 20
# --seed 2 --kinds 'power lost' partition", or ARGS="--faults 0 --head-minutes 5". ARGS=--by-hand does without Ray.
test-cluster: install-test
	$(BIN)/python integration-tests/cluster_chaos.py --write integration-tests/README.md $(ARGS)

# The tests of what a server answers, with an engine and a front in processes of their own in the place of one router.
test-fronts: install-test
	API_WORKERS=1 $(BIN)/pytest $(addprefix integration-tests/test_,$(addsuffix .py,calls_served choosing_tokens contract \
		demo_model eight_bits forms grammar_tokens hostile keys metrics_page same_text scheduling tgi_board)) $(ARGS)

# The page for browsers in Chromium, which must be there, over a scripted engine and on whole servers.
test-page: install-test
	MUST_RUN=1 $(BIN)/pytest router/text_generation_router/page router/text_generation_router/openapi/tests/test_browser.py \
		integration-tests/test_page.py $(ARGS)

# Real Ray clusters: one node, whose actors, driver and engines are killed; whole servers on it; and fronts on each of two
# machines, as root with iproute2. About five minutes.
test-ray: install-test
	$(BIN)/pytest -m ray integration-tests/test_ray.py integration-tests/test_ray_server.py $(ARGS)

# Prints hashes over all answers to 500 mixed requests, during which a shard is killed, and over whole answers and refusals
# of every route (seconds: ARGS="--run routes dialect calls refusals"). A change that must alter no answer must leave the
# hashes the same. To compare two versions, and to see what differs: ARGS="--launcher
# ../older/.venv/bin/text-generation-launcher .venv/bin/text-generation-launcher --write FOLDER", then diff -r.
digest: install-test
	$(BIN)/python integration-tests/make_digest.py $(ARGS)

# Sends 2,000 requests of all routes, with fields drawn from the OpenAPI document, and compares their answers: whole, as
# streams, alone, and in a crowd on a small server whose shards and engine are killed. About 13 minutes. Prints its seed,
# which ARGS="--seed 5" repeats; a part of it: ARGS="--cases 500 --kills 8 --least-preemptions 50".
test-routes: install-test
	$(BIN)/python integration-tests/make_routes.py $(ARGS)

# 1,000 requests for 8 LoRA adapters with options of every kind: alone, in a crowd, in chunks, preempted, resumed, and on two
# replicas. About 15 minutes. A part of it: ARGS="--requests 100".
test-adapters: install-test
	$(BIN)/python integration-tests/make_adapters.py $(ARGS)

# 1,000 requests with activations in 8 bits, for each of eight formats of weights: alone, in a crowd, in chunks with little
# memory (it prints how often a request was preempted), and resumed. More than an hour. Needs .venv-llama-cpp, too. A part
# of it: ARGS="--formats int8 Q4_K_M --requests 100".
test-int-texts: install-test
	PYTHONPATH=server/text_generation_server/tests:tools $(BIN)/python integration-tests/make_int_texts.py $(ARGS)

# Kills shards 2,000 times in the middle of steps, each of which goes on with the keys and values of the one before, and
# compares all keys and values with those of a shard that was not killed. About half an hour. A part of it: ARGS="--kills 100".
test-kept: install-test
	PYTHONPATH=server/text_generation_server/tests $(BIN)/python server/text_generation_server/tests/kept_steps.py $(ARGS)

# Measures a tenant while another tenant attacks the server: each assault for 24 s, and the table in
# integration-tests/README.md. About 40 minutes. With an older version in turns: ARGS="--before
# ../older/.venv/bin/text-generation-launcher".
attacks: install-test
	$(BIN)/python integration-tests/make_attacks.py --write integration-tests/README.md $(ARGS)

# Measures what evil grammars cost their neighbours: the time between tokens of 16 streams, in turns without and with them.
# Another model: ARGS="--model-id ./my-llama".
neighbours: install-test
	$(BIN)/python integration-tests/neighbours.py $(ARGS)

# Every format of calls and reasoning through a whole server, by each API; `make test` has one format of each kind.
test-served-calls: install-test
	$(BIN)/pytest integration-tests/test_calls_served.py -m "formats or not formats" $(ARGS)

# Cases that `make test` leaves out, because another case of the same test shows the same; and tests with drawn values, of
# which `make test` tries a third. 17 minutes of processors.
test-slow: install-test
	$(BIN)/pytest -p text_generation_common.tests.examples -m "slow or hypothesis" --hypothesis-profile=many $(ARGS)

# The official clients, each in a virtual environment of its own, against a server on the demo model. A part of them:
# ARGS="--only openai-3 lm-eval". vllm is not installed here: `make bench-peers` does, or VLLM=/path/to/vllm names one.
test-clients: install-test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python integration-tests/clients/run_clients.py $(ARGS)

# Downloads chat templates of real models, as files of three packages, into .templates/. Then test_real_templates.py
# compares the prompts that they make with transformers'.
fetch-templates: install-test
	PYTHONPATH=router $(BIN)/python -m text_generation_router.text.tests.fetch_templates

# What PEFT makes of the adapters of peft_fixtures.json, written into peft_goldens.json. An environment that has PEFT beside
# the packages of .venv.
goldens-peft: install-test .venv-peft/installed
	cd server/text_generation_server/tests && $(CURDIR)/.venv-peft/bin/python make_peft_goldens.py

.venv-peft/installed: .venv/installed-test
	$(PYTHON) -m venv .venv-peft
	echo $(CURDIR)/.venv/lib/python3.*/site-packages > $$(echo .venv-peft/lib/python3.*/site-packages)/packages.pth
	.venv-peft/bin/pip install $(QUIET) --no-deps peft==0.21.2 accelerate==1.15.0
	touch $@

# Gives the texts of our tests of calls and reasoning to vLLM's readers too, and fails where they differ without an
# argument. VLLM_PYTHON=/path/to/python names another environment that has vLLM.
test-peer-parsers: install-test $(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),.venv-vllm/installed)
	cd integration-tests/peers && $(CURDIR)/$(BIN)/python compare_parsers.py $(abspath $(VLLM_PYTHON)) $(ARGS)

clean:
	rm -rf .venv .venv-* .gpu .templates build dist proto/text_generation_proto .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
