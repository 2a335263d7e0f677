# Two commands on a fresh machine: `make run` trains the default job on a CPU, `make test` passes the tests.
# Both set up .venv first. torch is installed before everything else, so that the pinned build is the one that stays.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/arithmetic.toml
NAME := $(basename $(notdir $(RECIPE)))
RUN_DIR ?= runs/$(NAME)-$(shell date +%Y%m%d-%H%M%S)
STAMP := $(VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_REQUIREMENTS := deploy/sglang-cpu/requirements.txt
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: help setup run test soak sglang-cpu test-sglang simulate check format bench clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with everything that run, test and check need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ratchet needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: setup ## Train the default job (RECIPE=recipes/copy.toml for another one)
	$(BIN)/ratchet run $(RECIPE) --dir $(RUN_DIR)

test: setup ## Run the tests
	$(BIN)/python -m pytest

soak: setup ## The long tests that `test` leaves out
	$(BIN)/python -m pytest -m soak

sglang-cpu: $(SGLANG_STAMP) ## Make .venv-sglang with a real SGLang server for CPUs (docs/sglang.md)

# An environment of its own: its torchvision does not load beside the torch of .venv. SGLang names packages that only
# GPUs have use for, so only torch's own dependencies are followed, and everything else is listed.
$(SGLANG_STAMP): $(SGLANG_REQUIREMENTS)
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --constraint $(SGLANG_REQUIREMENTS) torch
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps --requirement $(SGLANG_REQUIREMENTS)
	$(SGLANG_BIN)/python deploy/sglang-cpu/serve.py --help > /dev/null
	touch $@

test-sglang: setup sglang-cpu ## The tests of the SGLang engine against a real server
	$(BIN)/python -m pytest -m sglang tests/sglang

simulate: setup ## Ten minutes of fresh random worlds on two cores
	$(BIN)/python -m tests.simulation --seconds 600 --jobs 2

check: setup ## Format, lint, types and layers, as CI does
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup ## Run every benchmark once; each prints its own table
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python $$file || exit 1; done

clean: ## Remove .venv, .venv-sglang and caches; runs/ stays
	rm -rf $(VENV) $(SGLANG_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
