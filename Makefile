# One line each; `bench` and `test` do all set-up from a fresh clone. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# torch is installed first, at an exact version: with a range, another package could install a different build.
TORCH  ?= torch==2.13.0
EXTRAS ?= server,grammar,quantization,dev
PORT   ?= 3000
NUM_SHARD ?= 8
BLOOM  ?= bigscience/bloom
BASE   ?= HEAD~1
MINUTES ?= 30
SOAK_SECONDS ?= 1800
# Three test processes, since many tests wait for servers; the first to end takes tests from the others.
SIDE_BY_SIDE ?= -n 3 --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images for containers often set it; here each of a hundred processes would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install bench test test-again test-long test-gpu clients soak check check-types check-structure supply-chain lock format tune perf-gate proto docs clean \
	run-bloom-560m download-bloom run-bloom run-bloom-quantize server-dev router-dev

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 22

install: $(STAMP)  ## create .venv and install everything the other targets need
$(STAMP): pyproject.toml constraints.txt
	@echo 'Installing into $(VENV): a few minutes, mostly torch.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The pip of Python 3.11 resolves these packages three times as slowly as a new one.
	$(BIN)/python -m pip install --quiet 'pip>=25.3'
	$(BIN)/pip install --quiet --no-compile -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@# As pip, but with all processors. Some packages hold files that this Python cannot compile.
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

bench: $(STAMP)  ## serve preset:tiny-llama, load it, write runs/<id>/report.html
	$(BIN)/tgi-bench run --mode closed --concurrency 8 --duration 20s --warmup 3s --input-tokens 128 --output-tokens 64

# `make check` runs the tests of the structure.
test: $(STAMP)  ## run the test suite
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) --ignore=tests/contract/test_structure.py

test-again: $(STAMP)  ## run the tests that failed in the last run once more, one at a time
	$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

test-long: $(STAMP)  ## run the slow tests, which `make test` leaves out
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) --timeout 600 -m 'slow and not gpu and not network'

test-gpu: $(STAMP)  ## run the tests that need a GPU; fails without one
	$(BIN)/python -m pytest -q -m gpu tests/gpu

clients: $(STAMP)  ## run real clients, each in its own environment, against a launched server; print a table
	$(BIN)/python -m pytest -q -m clients tests/clients

soak: $(STAMP)  ## misbehaving clients (MINUTES=30), then memory, blocks and answers of an engine (SOAK_SECONDS=1800)
	$(BIN)/python -m benchmarks.robustness.soak --minutes $(MINUTES)
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -q -s -m slow tests/end_to_end/test_soak.py

check: $(STAMP)  ## format, lint, types, import contracts, import cycles
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --output-sync -j2 check-types check-structure

# Side by side, since mypy takes most of the time of `check`.
check-types: $(STAMP)
	$(BIN)/mypy

check-structure: $(STAMP)
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/contract/test_structure.py

supply-chain: $(STAMP)  ## licences of all dependencies, the lock, the wheel's content and metadata; writes dist/sbom.json
	$(BIN)/python -m pytest -q -m '' tests/contract/test_licenses.py tests/contract/test_lock.py tests/contract/test_wheel.py \
		tests/contract/test_sbom.py
	mkdir -p dist
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file dist/sbom.json

lock: $(STAMP)  ## write requirements.lock: the packages that the images install, each file with its hash
	$(BIN)/uv pip compile pyproject.toml --extra server --extra grammar --constraint constraints.txt --no-config --quiet \
		--python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-emit-index-url \
		--custom-compile-command 'make lock' --output-file requirements.lock

format: $(STAMP)  ## format the sources, so that `check` accepts them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tune: $(STAMP)  ## a complete small study on the embedded preset, with its report; about ten minutes
	$(BIN)/tgi-tune run docs/quick-study.toml

perf-gate: $(STAMP)  ## compare the performance of this commit with the one before (BASE=main: with main)
	$(BIN)/tgi-bench compare "git:$(BASE)" git:HEAD --config docs/ci/gate.toml --interleave 8 --warmup 0.25s --duration 2s --min-pairs 7 --min-effect 5% --max-minutes 12

proto: $(STAMP)  ## write the descriptor set after a change of proto/
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --include_imports \
		--descriptor_set_out=reference_server/transport/generate.binpb v2/generate.proto v3/generate.proto

docs: $(STAMP)  ## write the generated pages under docs/ and the tree of docs/architecture.md
	$(BIN)/python docs/tree.py
	$(BIN)/python docs/pages.py

run-bloom-560m: $(STAMP)  ## serve bloom-560m (its preset with seeded random weights when the hub is closed)
	$(BIN)/text-generation-launcher --port $(PORT) --model-id $$( \
		$(BIN)/text-generation-server download-weights bigscience/bloom-560m >/dev/null 2>&1 \
		&& echo bigscience/bloom-560m || echo preset:bloom-560m)

download-bloom: $(STAMP)  ## fetch BLOOM's weights (about 350 GB)
	$(BIN)/text-generation-server download-weights $(BLOOM)

run-bloom: $(STAMP)  ## serve BLOOM: requires 8xA100 80GB
	$(BIN)/text-generation-launcher --port $(PORT) --model-id $(BLOOM) --num-shard $(NUM_SHARD)

run-bloom-quantize: $(STAMP)  ## serve BLOOM with bitsandbytes: requires 8xA100 40GB
	$(BIN)/text-generation-launcher --port $(PORT) --model-id $(BLOOM) --num-shard $(NUM_SHARD) --quantize bitsandbytes

server-dev: $(STAMP)  ## one model server on the default socket
	$(BIN)/text-generation-server serve preset:tiny-llama

router-dev: $(STAMP)  ## the router on that socket
	$(BIN)/text-generation-router --tokenizer-name preset:tiny-llama --port $(PORT)

clean:  ## remove the environment, runs, studies and caches
	rm -rf $(VENV) runs studies build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
